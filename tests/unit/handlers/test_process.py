"""The process role: a chat becomes a request for tokens, and the chunks of language workers become text."""

import asyncio
import json
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from tokenizers import decoders, models, pre_tokenizers

from baton.errors import (
    BatonError,
    Cancelled,
    DeadlineExceeded,
    EngineDead,
    EngineFailed,
    InvalidRequest,
    PeerLost,
    Unsupported,
)
from baton.handlers.placeholders import find_placeholders
from baton.handlers.process import ProcessHandler
from baton.models.tokenizer import HubTokenizer, HubTokenTexts
from baton.ports.engine import Placeholder
from baton.ports.runtime import Context, ModelCard, Wire
from baton.protocol.codec import DecodeError, decode_request, encode_request
from baton.protocol.lifecycle import State
from baton.protocol.requests import GenerateRequest
from baton.protocol.text import decode_text, encode_text
from baton.request.gate import Gate
from baton.request.tracker import RequestLimits, RequestTracker
from baton.router.request_view import view_request
from baton.testing import RecordingObserver, run_bounded
from baton.testing.memory_runtime import MemoryContext

IMAGE_TOKEN = "<image>"
TEMPLATE = (
    "{% for tool in tools or [] %}{{ tool.function.name }};{% endfor %}{{ mood or '' }}"
    "{% for message in messages %}{{ message.role[0] }}:{% if message.content is string %}{{ message.content }}"
    "{% else %}{% for part in message.content %}{% if part.type == 'text' %}{{ part.text }}"
    "{% else %}<{{ part.type }}>{% endif %}{% endfor %}{% endif %}|{% endfor %}"
)
Reply = Wire | BatonError


class Workers:
    """A ModelClient whose workers send `replies`, once `at_once` calls have come; an error is raised in its place."""

    def __init__(self, *replies: Reply) -> None:
        self.replies = replies
        self.requests: list[GenerateRequest] = []
        self.parents: list[Context] = []
        self.closed = 0
        self.at_once = 1
        self._enough = asyncio.Event()

    async def start(self) -> None: ...

    async def ready(self, timeout_s: float) -> ModelCard:
        raise NotImplementedError

    def close(self) -> None: ...

    async def call(self, request: Wire, parent: Context) -> AsyncGenerator[Wire, None]:
        self.requests.append(decode_request(request))
        self.parents.append(parent)
        if len(self.requests) >= self.at_once:
            self._enough.set()
        await self._enough.wait()
        try:
            for reply in self.replies:
                await asyncio.sleep(0)  # calls at the same time take turns
                if isinstance(reply, BatonError):
                    raise reply
                yield reply
        finally:
            self.closed += 1


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model with a token for each byte, and one for images."""
    path = tmp_path_factory.mktemp("model")
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = tokenizers.Tokenizer(models.BPE({letter: number for number, letter in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([IMAGE_TOKEN, "<video>"])
    tokenizer.save(str(path / "tokenizer.json"))
    (path / "tokenizer_config.json").write_text(json.dumps({"chat_template": TEMPLATE}))
    return path


class Front:
    """A process worker without a runtime."""

    def __init__(self, directory: Path, *replies: Reply) -> None:
        self.tokenizer = HubTokenizer(directory)
        self.workers = Workers(*replies)
        self.observer = RecordingObserver()
        self.context = MemoryContext("me", {"traceparent": "00-aa-bb-01"})
        self.fatal: list[BatonError] = []
        tracker = RequestTracker(Gate(4), RequestLimits(), self.observer, "process", self.fatal.append)
        self.handler = ProcessHandler(self.workers, tracker, self.tokenizer, HubTokenTexts(directory))

    async def chunks(self, **body: Any) -> list[dict[str, Any]]:
        request = decode_text({"model": "m", **body})
        async with aclosing(self.handler.generate(request, self.context)) as chunks:
            return [encode_text(chunk) async for chunk in chunks]

    def answer(self, content: object = "hi", **body: Any) -> list[dict[str, Any]]:
        if "messages" not in body and "prompt" not in body:
            body["messages"] = [{"role": "user", "content": content}]
        return run_bounded(self.chunks(**body))

    @property
    def sent(self) -> GenerateRequest:
        (request,) = self.workers.requests
        return request

    @property
    def prompt(self) -> str:
        return self.tokenizer.decode(self.sent.token_ids)

    def spell(self, text: str, **more: object) -> Wire:
        return {"token_ids": self.tokenizer.encode(text), "index": 0, **more}


def usage(prompt: int, completion: int, cached: int | None = None) -> Wire:
    details = None if cached is None else {"cached_tokens": cached}
    return {"prompt_tokens": prompt, "completion_tokens": completion, "prompt_tokens_details": details}


END: Wire = {"token_ids": [], "finish_reason": "eos", "completion_usage": usage(3, 0)}


def text_of(chunks: Sequence[dict[str, Any]], index: int = 0) -> str:
    choices = [choice for chunk in chunks for choice in chunk["choices"] if choice["index"] == index]
    return "".join(choice["text"] if "text" in choice else choice["delta"].get("content", "") for choice in choices)


def reasons(chunks: Sequence[dict[str, Any]]) -> list[str]:
    found = [choice["finish_reason"] for chunk in chunks for choice in chunk["choices"]]
    return [reason for reason in found if reason is not None]


def text(words: str) -> dict[str, object]:
    return {"type": "text", "text": words}


def image(name: str) -> dict[str, object]:
    return {"type": "image_url", "image_url": {"url": f"https://example.com/{name}.png", "detail": "low"}}


def video(name: str) -> dict[str, object]:
    return {"type": "video_url", "video_url": {"url": f"https://example.com/{name}.mp4"}}


def urls(request: GenerateRequest) -> dict[str, list[str | None]]:
    return {kind: [item.url for item in items] for kind, items in (request.media or {}).items()}


def test_d22_every_role_takes_texts_and_parts(directory: Path) -> None:
    front = Front(directory, END)
    front.answer(
        messages=[
            {"role": "system", "content": [text("be "), text("short")]},
            {"role": "user", "content": "hello"},
            {"role": "assistant", "content": [text("hi")]},
            {"role": "user", "content": "bye"},
        ]
    )
    assert front.prompt == "s:be \nshort|u:hello|a:hi|u:bye|"
    assert front.sent.media is None


def test_d22_all_images_and_videos_are_sent_in_order(directory: Path) -> None:
    front = Front(directory, END)
    first = {"role": "user", "content": [image("a"), text("and"), video("b"), image("c")]}
    second = {"role": "user", "content": [text("or"), image("d")]}
    front.answer(messages=[first, {"role": "assistant", "content": "yes"}, second])
    assert front.prompt == "u:<image>and<video><image>|a:yes|u:or<image>|"
    assert urls(front.sent) == {
        "image_url": [f"https://example.com/{name}.png" for name in "acd"],
        "video_url": ["https://example.com/b.mp4"],
    }


@pytest.mark.parametrize("temperature", [0, 0.0, 0.7, None])
def test_d22_the_temperature_is_the_clients(directory: Path, temperature: float | None) -> None:
    front = Front(directory, END)
    front.answer(temperature=temperature)
    assert front.sent.sampling.temperature == temperature


def test_d22_usage_is_what_the_language_worker_counts(directory: Path) -> None:
    begin = {"completion_usage": usage(1203, 0, 64)}
    front = Front(directory, {"token_ids": [40], **begin}, {"token_ids": [41], "finish_reason": "stop", **begin})
    chunks = front.answer([text("what is this?"), image("a")])
    assert chunks[-1]["usage"]["prompt_tokens"] == 1203
    assert chunks[-1]["usage"]["completion_tokens"] == 2
    assert chunks[-1]["usage"]["prompt_tokens_details"] == {"cached_tokens": 64}
    (record,) = front.observer.records
    assert (record.prompt_tokens, record.cached_tokens, record.completion_tokens) == (1203, 64, 2)


def test_usage_of_a_request_that_moved_counts_every_token_once(directory: Path) -> None:
    front = Front(
        directory,
        {"token_ids": [40, 41], "completion_usage": usage(10, 0, 0)},
        {"token_ids": [42], "completion_usage": usage(12, 0, 8)},  # of the worker that took over
        {"token_ids": [43], "finish_reason": "length", "completion_usage": usage(12, 2, 8)},
    )
    used = front.answer()[-1]["usage"]
    assert (used["prompt_tokens"], used["completion_tokens"], used["total_tokens"]) == (10, 4, 14)


ERRORS = [
    InvalidRequest("multi_modal_data.image_url[0]: it is not an image"),
    EngineFailed("out of memory"),
    PeerLost("the worker is gone"),
    DeadlineExceeded("too late"),
]


@pytest.mark.parametrize("error", ERRORS, ids=lambda error: error.code)
@pytest.mark.parametrize("after", [0, 1], ids=["first", "later"])
def test_d22_errors_are_errors_with_the_type_that_the_language_worker_raised(
    directory: Path, error: BatonError, after: int
) -> None:
    front = Front(directory, *[{"token_ids": [40]}] * after, error)
    with pytest.raises(type(error), match=error.message.split("[")[0]):
        front.answer()
    assert front.workers.closed == 1
    assert front.fatal == []


def test_d22_a_chunk_that_reports_a_failure_is_an_error(directory: Path) -> None:
    front = Front(directory, {"token_ids": [], "finish_reason": {"error": "out of memory"}})
    with pytest.raises(EngineFailed, match="out of memory"):
        front.answer()


def test_a_dead_engine_of_another_process_does_not_end_this_one(directory: Path) -> None:
    front = Front(directory, EngineDead("segmentation fault"))
    with pytest.raises(PeerLost, match="segmentation fault"):
        front.answer()
    assert front.fatal == []


def test_a_stream_without_an_end_is_an_error(directory: Path) -> None:
    front = Front(directory, {"token_ids": [40]})
    with pytest.raises(PeerLost, match="without a finish reason"):
        front.answer()


def test_d23_any_model_directory_with_a_tokenizer_is_served(directory: Path) -> None:
    # Neither weights nor code of the model are there: the worker reads a tokenizer and a template.
    assert {path.name for path in directory.iterdir()} == {"tokenizer.json", "tokenizer_config.json"}
    front = Front(directory)
    front.workers.replies = (front.spell("fine"), END)
    assert text_of(front.answer()) == "fine"


def test_d24_answers_at_the_same_time_do_not_mix(directory: Path) -> None:
    front = Front(directory)
    first, second = front.tokenizer.encode("é")
    front.workers.replies = ({"token_ids": [first]}, {"token_ids": [second], "finish_reason": "eos"})
    front.workers.at_once = 2

    async def both() -> list[list[dict[str, Any]]]:
        return await asyncio.gather(front.chunks(prompt="a"), front.chunks(prompt="b"))

    assert [text_of(chunks) for chunks in run_bounded(both())] == ["é", "é"]


def test_d24_a_text_is_not_read_letter_by_letter(directory: Path) -> None:
    front = Front(directory, END)
    front.answer("hello")
    assert front.prompt == "u:hello|"


def test_d26_a_placeholder_that_a_client_types_moves_no_image(directory: Path) -> None:
    front = Front(directory, END)
    typed = {"role": "system", "content": f"never say {IMAGE_TOKEN}"}
    asked = {"role": "user", "content": [text(f"is {IMAGE_TOKEN} this?"), image("a"), text(f"or {IMAGE_TOKEN}")]}
    front.answer(messages=[typed, asked])
    (token,) = front.tokenizer.encode(IMAGE_TOKEN)
    placeholder = Placeholder(token=token, text=IMAGE_TOKEN, as_text=(0,))
    messages: Any = (front.sent.extra_args or {})["messages"]
    (index,) = find_placeholders(front.sent.token_ids, placeholder, "image", 1, messages)
    assert front.tokenizer.decode(front.sent.token_ids[:index]) == "s:never say <image>|u:is <image> this?"


def test_media_travel_once(directory: Path) -> None:
    front = Front(directory, END)
    front.answer([text("see"), image("a")])
    assert "example.com" not in json.dumps(front.sent.extra_args)


def test_tools_and_variables_reach_the_template(directory: Path) -> None:
    tools = [{"type": "function", "function": {"name": "weather"}}]
    for choice, expected in (("auto", "weather;happy"), ("none", "happy")):
        front = Front(directory, END)
        front.answer(tools=tools, tool_choice=choice, chat_template_kwargs={"mood": "happy"})
        assert front.prompt == f"{expected}u:hi|"


def test_every_option_reaches_the_language_worker(directory: Path) -> None:
    front = Front(directory, END)
    front.answer(
        max_completion_tokens=7,
        min_tokens=2,
        ignore_eos=True,
        stop_token_ids=[5],
        top_p=0.5,
        top_k=4,
        seed=3,
        logit_bias={"5": 1.0},
        logprobs=True,
        top_logprobs=3,
        cache_salt="tenant",
        response_format={"type": "json_schema", "json_schema": {"name": "n", "schema": {"type": "array"}}},
    )
    sent = front.sent
    assert (sent.stop.max_tokens, sent.stop.min_tokens, sent.stop.ignore_eos) == (7, 2, True)
    assert sent.stop.stop_token_ids == (5,)
    assert (sent.sampling.top_p, sent.sampling.top_k, sent.sampling.seed) == (0.5, 4, 3)
    assert sent.sampling.logit_bias == {"5": 1.0}
    assert sent.sampling.guided_decoding is not None
    assert sent.sampling.guided_decoding.json == {"type": "array"}
    assert sent.output.logprobs == 3
    assert sent.cache_salt == "tenant"


def test_the_extensions_of_a_request_reach_routers_and_engines(directory: Path) -> None:
    targets = {"ttft_target": 200.0}
    constraints = {"required_taints": ["tenant-a"]}
    front = Front(directory, END)
    front.answer(
        nvext={
            "agent_hints": {"priority": 5, "strict_priority": 2, "osl": 30},
            "router": targets,
            "routing_constraints": constraints,
            "cache_salt": "tenant",
            "decode_worker_id": 7,
            "dp_rank": 1,
            "max_thinking_tokens": 9,
        }
    )
    sent, routing = front.sent, front.sent.routing
    assert routing is not None
    assert (routing.priority, routing.expected_output_tokens, routing.cache_salt) == (5, 30, "tenant")
    assert (routing.decode_worker_id, routing.dp_rank) == (7, 1)
    assert routing.extra == {"priority_jump": 5.0, "strict_priority": 2, "routing_constraints": constraints}
    assert sent.stop.max_thinking_tokens == 9
    assert sent.extra == {"router": targets}
    assert view_request(encode_request(sent)).point.ttft_ms == 200


def test_an_extension_that_cannot_be_read_is_refused_with_its_path() -> None:
    with pytest.raises(DecodeError, match=r"\$\.nvext\.agent_hints\.priority"):
        decode_text({"model": "m", "prompt": "a", "nvext": {"agent_hints": {"priority": "high"}}})


@pytest.mark.parametrize(
    ("body", "word"),
    [
        ({"echo": True, "prompt": "a"}, "echo"),
        ({"prompt_logprobs": 1}, "prompt_logprobs"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"frobnicate": 1}, "frobnicate"),
        ({"content": [{"type": "file", "file": {}}]}, r"messages\[0\].content\[0\].type: no part of type file"),
    ],
    ids=lambda value: str(value)[:30],
)
def test_what_nothing_applies_is_refused_by_name(directory: Path, body: dict[str, Any], word: str) -> None:
    front = Front(directory, END)
    with pytest.raises(Unsupported, match=word):
        front.answer(**body)
    assert front.workers.requests == []


@pytest.mark.parametrize(
    "part",
    [
        {"type": "image_url"},
        {"type": "image_url", "image_url": {}},
        {"type": "video_url", "video_url": {"url": 3}},
        {"type": "input_audio", "input_audio": {"data": "AAAA"}},
    ],
    ids=lambda part: str(part),
)
def test_media_without_a_source_are_refused(directory: Path, part: dict[str, object]) -> None:
    with pytest.raises(InvalidRequest, match=r"messages\[0\].content\[1\]"):
        Front(directory, END).answer([text("a"), part])


def test_audio_in_the_request_becomes_a_data_url(directory: Path) -> None:
    front = Front(directory, END)
    front.answer([{"type": "input_audio", "input_audio": {"data": "AAAA", "format": "wav"}}])
    assert urls(front.sent) == {"audio_url": ["data:audio/wav;base64,AAAA"]}


@pytest.mark.parametrize("size", [1, 2, 3, 5])
def test_characters_of_several_tokens_are_never_split(directory: Path, size: int) -> None:
    wanted = "aé → 你好 👩‍👩‍👧 ok"
    front = Front(directory)
    tokens = front.tokenizer.encode(wanted)
    assert len(tokens) == len(wanted.encode())
    pieces: list[Reply] = [{"token_ids": tokens[at : at + size]} for at in range(0, len(tokens), size)]
    front.workers.replies = (*pieces, END)
    chunks = front.answer(stream=True)
    assert text_of(chunks) == wanted
    assert all("�" not in choice["delta"]["content"] for chunk in chunks for choice in chunk["choices"])


@pytest.mark.parametrize(("tokens", "expected"), [(3, "aé"), (4, "aé�"), (5, "aé�"), (6, "aé→")])
def test_a_character_that_the_limit_cuts_is_shown_as_cut(directory: Path, tokens: int, expected: str) -> None:
    front = Front(directory)
    made = front.tokenizer.encode("aé→")[:tokens]
    front.workers.replies = ({"token_ids": made}, {"token_ids": [], "finish_reason": "length"})
    assert text_of(front.answer()) == expected


def test_a_stop_string_across_chunks_ends_the_answer_and_the_request(directory: Path) -> None:
    front = Front(directory)
    front.workers.replies = tuple(front.spell(piece) for piece in ("one E", "N", "D two", "never"))
    chunks = front.answer(stop=["END"])
    assert text_of(chunks) == "one "
    assert reasons(chunks) == ["stop"]
    assert chunks[-1]["usage"]["completion_tokens"] == len("one END")
    assert front.workers.closed == 1
    assert [record.state for record in front.observer.records] == [State.COMPLETED]


def test_text_that_only_looks_like_a_stop_string_is_sent(directory: Path) -> None:
    front = Front(directory)
    front.workers.replies = (front.spell("one EN"), front.spell("Q E"), END)
    assert text_of(front.answer(stop=["END"])) == "one ENQ E"


@pytest.mark.parametrize(
    ("reason", "expected"),
    [("eos", "stop"), ("stop", "stop"), ("length", "length"), ("content_filter", "content_filter")],
)
def test_finish_reasons_are_openais(directory: Path, reason: str, expected: str) -> None:
    assert reasons(Front(directory, {"token_ids": [40], "finish_reason": reason}).answer()) == [expected]


def test_choices_have_texts_of_their_own(directory: Path) -> None:
    front = Front(directory)
    front.workers.replies = (
        front.spell("aa"),
        {**front.spell("b"), "index": 1},
        {**front.spell("b"), "index": 1, "finish_reason": "length"},
        {"token_ids": [], "index": 0, "finish_reason": "eos"},
    )
    chunks = front.answer(n=2)
    assert (text_of(chunks, 0), text_of(chunks, 1)) == ("aa", "bb")
    assert front.sent.sampling.n == 2
    assert chunks[-1]["usage"]["completion_tokens"] == 4


def scored(front: Front, word: str) -> Wire:
    tokens = front.tokenizer.encode(word)
    top = [[{"rank": 1, "token_id": token, "token": None, "logprob": -0.5}] for token in tokens]
    return {"token_ids": tokens, "log_probs": [-0.5] * len(tokens), "top_logprobs": top}


def test_log_probabilities_come_with_the_tokens(directory: Path) -> None:
    front = Front(directory)
    front.workers.replies = (scored(front, "a"), scored(front, "é"), END)
    chunks = front.answer(logprobs=True, top_logprobs=1)
    logprobs = [choice["logprobs"] for chunk in chunks for choice in chunk["choices"] if choice["logprobs"]]
    entries = [entry for each in logprobs for entry in each["content"]]
    assert [entry["token"] for entry in entries] == ["a", "�", "�"]
    assert entries[0]["bytes"] == [97]
    assert entries[0]["top_logprobs"] == [{"token": "a", "logprob": -0.5, "bytes": [97]}]


def test_a_special_token_has_a_log_probability_and_no_text(directory: Path) -> None:
    front = Front(directory)
    front.workers.replies = (scored(front, "a<video>b"), END)
    chunks = front.answer(logprobs=True)
    content = chunks[0]["choices"][0]["logprobs"]["content"]
    assert [entry["token"] for entry in content] == ["a", "", "b"]
    assert text_of(chunks) == "ab"


def test_log_probabilities_of_a_completion_have_offsets(directory: Path) -> None:
    front = Front(directory)
    front.workers.replies = (scored(front, "ab"), END)
    chunks = front.answer(prompt="x", logprobs=1)
    assert chunks[0]["choices"][0]["logprobs"] == {
        "tokens": ["a", "b"],
        "token_logprobs": [-0.5, -0.5],
        "top_logprobs": [{"a": -0.5}, {"b": -0.5}],
        "text_offset": [0, 1],
    }


def test_the_trace_and_the_cancellation_of_the_client_reach_the_language_worker(directory: Path) -> None:
    front = Front(directory, {"token_ids": [40]}, Cancelled("the caller disconnected"))

    async def leave() -> list[str]:
        stopped: list[str] = []
        answer = front.handler.generate(decode_text({"model": "m", "prompt": "a"}), front.context)
        await anext(answer)
        (parent,) = front.workers.parents
        assert parent.trace_headers == {"traceparent": "00-aa-bb-01"}
        parent.on_cancel(lambda: stopped.append("stopped"))
        front.context.cancel()
        with pytest.raises(Cancelled, match="client"):
            await anext(answer)
        return stopped

    assert run_bounded(leave()) == ["stopped"]
    assert [record.state for record in front.observer.records] == [State.CANCELLED]


def test_closing_the_answer_closes_the_call(directory: Path) -> None:
    front = Front(directory, {"token_ids": [40]}, {"token_ids": [41]})

    async def leave() -> None:
        answer = front.handler.generate(decode_text({"model": "m", "prompt": "a"}), front.context)
        await anext(answer)
        await answer.aclose()

    run_bounded(leave())
    assert front.workers.closed == 1
