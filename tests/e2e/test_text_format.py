"""What is different for workers that accept text; what is the same is in `test_openai.py`."""

from collections.abc import Callable, Iterator
from typing import Any

import openai
import pytest

from tests.e2e.harness import Serve, error_in, eventually

pytestmark = pytest.mark.e2e

SERVE = ("--model-input", "text", "--echo-context", "4096", "--echo-pace-ms", "1")
CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
HELLO = [{"role": "user", "content": "Hello, world."}]


def test_a_stop_string_ends_the_request_at_the_engine(serve: Serve) -> None:
    # To the limit it would take four seconds.
    answer = serve.client().chat.completions.create(model="echo", messages=HELLO, max_tokens=4000, stop="wor")
    assert (answer.choices[0].message.content, answer.choices[0].finish_reason) == ("Hello, ", "stop")
    serve.assert_quiet(3)


def test_a_message_with_null_content_is_rendered(serve: Serve) -> None:
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    messages: Any = [*HELLO, {"role": "assistant", "content": None, "tool_calls": [call]}, *HELLO]
    answer = serve.client().chat.completions.create(model="echo", messages=messages, max_tokens=28)
    assert answer.choices[0].message.content == "Hello, world.\n\nHello, world."


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
def test_leaving_frees_every_block(serve: Serve, stream: bool) -> None:
    before = serve.ended("cancelled")
    asked = {"model": "echo", "messages": HELLO, "max_tokens": 4000, "stream": stream}
    with serve.open(CHAT, asked):
        eventually(lambda: serve.load()["running"] == 1, what="the request runs")
    serve.assert_quiet()
    assert serve.ended("cancelled") == before + 1


WRONG = [
    (CHAT, {"max_tokens": 0}, "Max tokens"),
    (CHAT, {"max_tokens": 5000}, "max_tokens"),
    (CHAT, {"n": 17}, "n: "),
    (CHAT, {"temperature": -1}, "Temperature"),
    (CHAT, {"min_tokens": 9}, "min_tokens"),
    (CHAT, {"messages": []}, "messages"),
    (CHAT, {"messages": [{"role": "user", "content": ""}]}, "empty"),
    (CHAT, {"messages": [{"role": "user", "content": "x" * 4096}]}, "4096 tokens"),
    (CHAT, {"logprobs": True}, "logprobs"),
    (CHAT, {"response_format": {"type": "json_object"}}, "response_format"),
    (CHAT, {"tools": [{"type": "function", "function": {"name": "f"}}]}, "tools"),
    (CHAT, {"frobnicate": 1}, "frobnicate"),
    (CHAT, {"logit_bias": {"5": 1}}, "logit_bias"),
    (COMPLETIONS, {"prompt": ""}, "Prompt"),
    (COMPLETIONS, {"prompt": [258]}, "258"),
    (COMPLETIONS, {"prompt": "x" * 4096}, "4096 tokens"),
    (COMPLETIONS, {"logprobs": 2}, "logprobs"),
    (COMPLETIONS, {"logprobs": 0}, "logprobs"),
    (COMPLETIONS, {"best_of": 3}, "best_of"),
    (COMPLETIONS, {"echo": True}, "echo"),
    (COMPLETIONS, {"suffix": "x"}, "suffix"),
]
IGNORED = [
    (CHAT, {"guided_json": {"type": "object"}}, "guided_json"),
    (CHAT, {"guided_regex": "a+"}, "guided_regex"),
    (CHAT, {"guided_choice": ["a"]}, "guided_choice"),
    (CHAT, {"prompt_logprobs": 1}, "prompt_logprobs"),
    (
        CHAT,
        {
            "messages": [
                {
                    "role": "user",
                    "content": [
                        {"type": "text", "text": "Hello"},
                        {"type": "image_url", "image_url": {"url": "data:image/png;base64,AA"}},
                    ],
                }
            ]
        },
        "image_url",
    ),
]


def refused(serve: Serve, path: str, change: dict[str, object], word: str, stream: bool) -> None:
    good = {"messages": HELLO} if path == CHAT else {"prompt": "Hello"}
    status, text = serve.post(path, {"model": "echo", "max_tokens": 4, "stream": stream, **good, **change})
    assert status == 400, text
    assert word.lower() in error_in(text)["message"].lower()


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
@pytest.mark.parametrize(("path", "change", "word"), WRONG, ids=lambda value: str(value)[:40])
def test_what_is_wrong_is_refused_by_name(
    serve: Serve, path: str, change: dict[str, object], word: str, stream: bool
) -> None:
    refused(serve, path, change, word, stream)


@pytest.mark.parametrize(("path", "change", "word"), IGNORED, ids=lambda value: str(value)[:40])
def test_what_is_not_served_is_refused_and_not_ignored(
    serve: Serve, path: str, change: dict[str, object], word: str
) -> None:
    refused(serve, path, change, word, stream=False)


def test_a_plain_text_response_format_is_served(serve: Serve) -> None:
    answer = serve.client().chat.completions.create(
        model="echo", messages=HELLO, max_tokens=4, response_format={"type": "text"}
    )
    assert answer.choices[0].message.content == "Hell"


@pytest.fixture(scope="module")
def faulty(start_shared: Callable[..., Serve]) -> Iterator[Serve]:
    """Two workers that obey the faults in their prompts and give requests two seconds."""
    serve = start_shared(
        Serve, "--model-input", "text", "--echo-faults", "--echo-pace-ms", "5", "--request-timeout-s", "2", workers=2
    )
    yield serve
    serve.stop()


def test_a_request_that_the_engine_fails_is_an_error(faulty: Serve) -> None:
    body = {"model": "echo", "messages": [{"role": "user", "content": "[[fail:5]] please"}], "max_tokens": 20}
    status, text = faulty.post(CHAT, body)
    assert (status, error_in(text)["type"]) == (500, "server_error")
    with pytest.raises(openai.APIError):
        list(faulty.client().chat.completions.create(**body, stream=True))
    faulty.assert_quiet()


def test_a_request_past_its_deadline_is_an_error(faulty: Serve) -> None:
    body = {"model": "echo", "messages": HELLO, "max_tokens": 10_000}
    status, text = faulty.post(CHAT, body)
    assert (status, error_in(text)["type"]) == (503, "server_error")
    with pytest.raises(openai.APIError):
        list(faulty.client().chat.completions.create(**body, stream=True))
    faulty.assert_quiet()


def test_a_stream_whose_worker_dies_ends_in_an_error(faulty: Serve) -> None:
    # The frontend cannot move it: it has no tokens to hand to another worker.
    stream = faulty.client().chat.completions.create(model="echo", messages=HELLO, max_tokens=390, stream=True)
    next(iter(stream))
    loads = [faulty.load(number)["in_flight"] for number in range(2)]
    faulty.worker(loads.index(1)).kill()
    with pytest.raises(openai.APIError):
        list(stream)
    for number in range(2):
        eventually(lambda n=number: faulty.health(n) == 200, 30, "both workers are healthy")
    assert faulty.post(CHAT, {"model": "echo", "messages": HELLO, "max_tokens": 4})[0] == 200
