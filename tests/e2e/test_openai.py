"""What a client of the OpenAI API gets, through the official client and its strict validation.

It is the same whether the frontend or the worker owns the tokenizer, the chat template and the stop strings.
"""

import json
from collections.abc import Callable, Iterator

import pytest

from tests.e2e.harness import Serve, echoed

pytestmark = pytest.mark.e2e

UNICODE = "héllo wörld 🎉 日本語"
HELLO = [{"role": "user", "content": "Hello, world."}]


@pytest.fixture(scope="module", params=["tokens", "text"])
def serve(start_shared: Callable[..., Serve], request: pytest.FixtureRequest) -> Iterator[Serve]:
    """A `baton serve` for each format that workers accept."""
    serve = start_shared(Serve, "--model-input", request.param)
    yield serve
    serve.stop()


tokens_only = pytest.mark.parametrize("serve", ["tokens"], indirect=True)


def test_no_process_listens_for_other_hosts(serve: Serve) -> None:
    serve.assert_unexposed()


def test_models_lists_and_retrieves_the_model(serve: Serve) -> None:
    client = serve.client()
    assert [model.id for model in client.models.list()] == ["echo"]
    assert client.models.retrieve("echo").id == "echo"


def test_chat_answers_with_text_reason_and_usage(serve: Serve) -> None:
    answer = serve.client().chat.completions.create(model="echo", messages=HELLO, max_tokens=20)
    choice = answer.choices[0]
    assert (choice.message.role, choice.message.content) == ("assistant", echoed("Hello, world.", 20))
    assert choice.finish_reason == "length"
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens, answer.usage.total_tokens) == (13, 20, 33)
    assert answer.object == "chat.completion"
    assert answer.model == "echo"


def test_chat_stream_is_the_same_text_in_pieces(serve: Serve) -> None:
    chunks = list(serve.client().chat.completions.create(model="echo", messages=HELLO, max_tokens=40, stream=True))
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == echoed("Hello, world.", 40)
    assert chunks[0].choices[0].delta.role == "assistant"
    assert [chunk.choices[0].finish_reason for chunk in chunks] == [None] * (len(chunks) - 1) + ["length"]
    assert len({chunk.id for chunk in chunks}) == 1
    assert all(chunk.usage is None for chunk in chunks)


def test_chat_stream_ends_with_usage_when_asked(serve: Serve) -> None:
    *_, last = serve.client().chat.completions.create(
        model="echo", messages=HELLO, max_tokens=20, stream=True, stream_options={"include_usage": True}
    )
    assert last.choices == []
    assert (last.usage.prompt_tokens, last.usage.completion_tokens, last.usage.total_tokens) == (13, 20, 33)


def test_completion_answers_with_text_reason_and_usage(serve: Serve) -> None:
    answer = serve.client().completions.create(model="echo", prompt="Hello, world.", max_tokens=20)
    assert answer.choices[0].text == echoed("Hello, world.", 20)
    assert answer.choices[0].finish_reason == "length"
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens, answer.usage.total_tokens) == (13, 20, 33)
    assert answer.object == "text_completion"


def test_completion_stream_is_the_same_text_in_pieces_and_ends_with_usage(serve: Serve) -> None:
    # Not strict: the client's own model of a completion chunk forbids a missing or null reason, as it is in all
    # chunks but the last, here and at OpenAI.
    chunks = list(
        serve.client(strict=False).completions.create(
            model="echo", prompt="Hello, world.", max_tokens=40, stream=True, stream_options={"include_usage": True}
        )
    )
    *pieces, last = chunks
    assert "".join(piece.choices[0].text for piece in pieces) == echoed("Hello, world.", 40)
    assert [piece.choices[0].finish_reason for piece in pieces] == [None] * (len(pieces) - 1) + ["length"]
    assert last.choices == []
    assert (last.usage.prompt_tokens, last.usage.completion_tokens) == (13, 40)


def test_an_answer_without_a_limit_ends_by_itself(serve: Serve) -> None:
    client = serve.client()
    chat = client.chat.completions.create(model="echo", messages=HELLO)
    assert (chat.choices[0].message.content, chat.choices[0].finish_reason) == ("Hello, world.", "stop")
    completion = client.completions.create(model="echo", prompt="Hello", max_tokens=None)
    assert (completion.choices[0].text, completion.choices[0].finish_reason) == ("Hello", "stop")


def test_max_completion_tokens_limits_like_max_tokens(serve: Serve) -> None:
    answer = serve.client().chat.completions.create(model="echo", messages=HELLO, max_completion_tokens=5)
    assert (answer.choices[0].message.content, answer.choices[0].finish_reason) == ("Hello", "length")


@pytest.mark.parametrize("stop", [None, "l"], ids=["length", "stop"])
def test_cached_tokens_are_counted_however_the_answer_ends(serve: Serve, stop: str | None) -> None:
    prompt = f"{stop} ends what is cached: " * 20
    for expected in (0, len(prompt) // 16 * 16):
        answer = serve.client().completions.create(model="echo", prompt=prompt, max_tokens=200, stop=stop)
        assert answer.usage is not None
        assert answer.usage.prompt_tokens_details is not None
        assert answer.usage.prompt_tokens_details.cached_tokens == expected


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(("stop", "shown"), [("wor", "Hello, "), (["zzz", ".H"], "Hello, world"), ("o, w", "Hell")])
def test_a_stop_string_ends_the_answer_and_is_not_shown(
    serve: Serve, stop: str | list[str], shown: str, stream: bool
) -> None:
    before = serve.ended("failed")
    asked = {"model": "echo", "messages": HELLO, "max_tokens": 60, "stop": stop}
    client = serve.client()
    if stream:
        choices = [chunk.choices[0] for chunk in client.chat.completions.create(**asked, stream=True)]
        text, reason = "".join(choice.delta.content or "" for choice in choices), choices[-1].finish_reason
    else:
        choice = client.chat.completions.create(**asked).choices[0]
        text, reason = choice.message.content, choice.finish_reason
    assert (text, reason) == (shown, "stop")
    serve.assert_quiet()
    assert serve.ended("failed") == before


@pytest.mark.parametrize(
    ("prompt", "stop", "shown"),
    [("abcdef", ["fab"], "abcde"), (UNICODE, ["🎉 日"], "héllo wörld "), ("abcdef", ["xyz", "e"], "abcd")],
)
def test_a_stop_string_ends_a_completion(serve: Serve, prompt: str, stop: list[str], shown: str) -> None:
    answer = serve.client().completions.create(model="echo", prompt=prompt, max_tokens=60, stop=stop)
    assert (answer.choices[0].text, answer.choices[0].finish_reason) == (shown, "stop")
    # The tokens of the stop string are counted, and none after it.
    stopped_by = next(text for text in stop if text in 2 * prompt)
    assert answer.usage.completion_tokens == len((shown + stopped_by).encode())


def test_what_may_be_a_stop_string_is_shown_when_it_is_none(serve: Serve) -> None:
    answer = serve.client().completions.create(model="echo", prompt="abcabd", max_tokens=6, stop=["abe", "bdx"])
    assert (answer.choices[0].text, answer.choices[0].finish_reason) == ("abcabd", "length")


@pytest.mark.parametrize("stream", [False, True])
def test_n_gives_that_many_different_choices(serve: Serve, stream: bool) -> None:
    asked = {"model": "echo", "messages": HELLO, "max_tokens": 30, "n": 4}
    client = serve.client()
    texts, reasons = [""] * 4, [None] * 4
    if stream:
        for chunk in client.chat.completions.create(**asked, stream=True):
            for choice in chunk.choices:
                texts[choice.index] += choice.delta.content or ""
                reasons[choice.index] = choice.finish_reason or reasons[choice.index]
    else:
        answer = client.chat.completions.create(**asked)
        assert answer.usage.completion_tokens == 120
        for choice in answer.choices:
            texts[choice.index], reasons[choice.index] = choice.message.content, choice.finish_reason
    assert texts == [echoed("Hello, world.", 33)[first : first + 30] for first in range(4)]
    assert reasons == ["length"] * 4


def test_n_works_for_completions(serve: Serve) -> None:
    answer = serve.client().completions.create(model="echo", prompt="abcdef", max_tokens=6, n=3)
    assert [choice.text for choice in answer.choices] == ["abcdef", "bcdefa", "cdefab"]
    assert answer.usage.completion_tokens == 18


def test_a_completion_of_several_prompts_answers_each(serve: Serve) -> None:
    answer = serve.client().completions.create(model="echo", prompt=["ab", "cd"], max_tokens=4)
    assert [choice.text for choice in answer.choices] == ["abab", "cdcd"]


def test_a_completion_of_tokens_answers(serve: Serve) -> None:
    answer = serve.client().completions.create(model="echo", prompt=[72, 105], max_tokens=4)
    assert answer.choices[0].text == "HiHi"


@tokens_only
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("asked", [0, 3, 20])
def test_chat_logprobs_are_aligned_with_the_tokens(serve: Serve, asked: int, stream: bool) -> None:
    body = {"model": "echo", "messages": HELLO, "max_tokens": 5, "logprobs": True, "top_logprobs": asked}
    client = serve.client()
    if stream:
        chunks = list(client.chat.completions.create(**body, stream=True))
        content = [entry for chunk in chunks for entry in chunk.choices[0].logprobs.content]
    else:
        content = client.chat.completions.create(**body).choices[0].logprobs.content
    assert "".join(entry.token for entry in content) == "Hello"
    assert [entry.logprob for entry in content] == [0.0] * 5
    for entry in content:
        assert [top.logprob for top in entry.top_logprobs] == [-float(rank) for rank in range(asked)]
        assert all(top.token == entry.token for top in entry.top_logprobs[:1])


@tokens_only
def test_logprobs_of_parts_of_a_character_show_the_replacement_character(serve: Serve) -> None:
    # Not the bytes of the token (see docs/known-issues.md).
    choice = (
        serve.client()
        .chat.completions.create(
            model="echo", messages=[{"role": "user", "content": "é"}], max_tokens=2, logprobs=True, top_logprobs=1
        )
        .choices[0]
    )
    assert choice.message.content == "é"
    assert [(entry.token, entry.bytes) for entry in choice.logprobs.content] == [("\ufffd", [239, 191, 189])] * 2


@tokens_only
def test_completion_logprobs_are_aligned_with_the_tokens(serve: Serve) -> None:
    logprobs = (
        serve.client().completions.create(model="echo", prompt="Hello", max_tokens=3, logprobs=2).choices[0].logprobs
    )
    assert logprobs.tokens == ["H", "e", "l"]
    assert logprobs.text_offset == [0, 1, 2]
    assert logprobs.token_logprobs == [0.0] * 3
    assert logprobs.top_logprobs == [{"H": 0.0, "I": -1.0}, {"e": 0.0, "f": -1.0}, {"l": 0.0, "m": -1.0}]


@pytest.mark.parametrize("stream", [False, True])
def test_characters_of_several_tokens_come_out_whole(serve: Serve, stream: bool) -> None:
    messages = [{"role": "user", "content": UNICODE}]
    size = len(UNICODE.encode())
    body = {"model": "echo", "messages": messages, "max_tokens": 3 * size}
    client = serve.client()
    if stream:
        # A token a chunk at most, so that characters are split over chunks.
        chunks = client.chat.completions.create(**body, stream=True)
        text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
    else:
        text = client.chat.completions.create(**body).choices[0].message.content
    assert text == 3 * UNICODE
    assert "\ufffd" not in text


# The text parts of a message are joined with a new line for a template that takes texts.
@pytest.mark.parametrize("serve", ["tokens", "text"], indirect=True)
def test_chat_reads_every_message_and_part(serve: Serve) -> None:
    messages = [
        {"role": "system", "content": "a"},
        {"role": "user", "content": [{"type": "text", "text": "b"}, {"type": "text", "text": "c"}]},
        {"role": "assistant", "content": "d"},
        {"role": "user", "content": "e"},
    ]
    answer = serve.client().chat.completions.create(model="echo", messages=messages)
    assert answer.choices[0].message.content == "a\nb\nc\nd\ne"


def test_the_second_request_for_a_prompt_finds_it_cached(serve: Serve) -> None:
    messages = [{"role": "user", "content": "a prompt that nobody else sends " * 3}]
    client = serve.client()
    counts = [
        client.chat.completions.create(model="echo", messages=messages, max_tokens=1).usage.prompt_tokens_details
        for _ in range(2)
    ]
    assert [count.cached_tokens for count in counts] == [0, 96]


def test_a_stream_is_server_sent_events_that_end_with_done(serve: Serve) -> None:
    status, text = serve.post(
        "/v1/chat/completions", {"model": "echo", "messages": HELLO, "max_tokens": 3, "stream": True}
    )
    assert status == 200
    lines = [line.removeprefix("data: ") for line in text.split("\n\n") if line]
    assert lines[-1] == "[DONE]"
    assert all(json.loads(line)["object"] == "chat.completion.chunk" for line in lines[:-1])
