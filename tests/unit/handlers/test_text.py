"""The text format: the worker renders the template, tokenises, matches stop strings and counts tokens."""

import asyncio
import json
from collections.abc import Mapping, Sequence
from contextlib import aclosing, suppress
from pathlib import Path
from typing import Any

import msgspec
import pytest

from baton.config.engines import EchoOptions
from baton.engines.echo import EchoEngine
from baton.engines.echo.engine import MODEL_DIR
from baton.errors import BatonError, Cancelled, ContextTooLong, InvalidRequest, Unsupported
from baton.handlers.text import TextHandler
from baton.models.tokenizer import HubTokenizer
from baton.ports.engine import Capabilities
from baton.ports.tokenizer import Tokenizer
from baton.protocol.codec import DecodeError
from baton.protocol.lifecycle import State
from baton.protocol.outputs import Finished, FinishReason, TokenDelta
from baton.protocol.text import decode_text, encode_text
from baton.request.gate import Gate
from baton.request.tracker import RequestLimits, RequestTracker
from baton.testing import RecordingObserver, ScriptedEngine, eventually, run_bounded, running
from baton.testing.bounded import measure_lag
from baton.testing.fakes import SCRIPTED_INFO, Step
from baton.testing.memory_runtime import MemoryContext

INFO = msgspec.structs.replace(SCRIPTED_INFO, context_length=4096)


class Letters:
    """A tokenizer with one token for each letter."""

    def encode(self, text: str) -> list[int]:
        return [ord(letter) for letter in text]

    def decoder(self) -> "Letters":
        return self

    def push(self, token_ids: Sequence[int]) -> str:
        return "".join(map(chr, token_ids))

    def flush(self) -> str:
        return ""

    def render_chat(self, messages: Sequence[dict[str, object]], variables: Mapping[str, object] | None = None) -> str:
        return "".join(f"<{message['role']}>{message['content']}" for message in messages)


def spell(text: str, index: int = 0) -> list[Step]:
    """Return a script that generates `text` letter by letter."""
    return [TokenDelta([ord(letter)], index) for letter in text]


class TextHarness:
    """A text worker around an engine, without a runtime."""

    def __init__(self, engine: Any, info: Any = INFO, tokenizer: Tokenizer | None = None) -> None:
        self.engine = engine
        self.observer = RecordingObserver()
        self.gate = Gate(4)
        self.context = MemoryContext("me")
        tracker = RequestTracker(
            self.gate, RequestLimits(flush_interval_s=0.0), self.observer, "aggregated", lambda error: None
        )
        self.handler = TextHandler(engine, info, tracker, tokenizer or Letters())

    async def chunks(self, **body: Any) -> list[dict[str, Any]]:
        async with aclosing(self.handler.generate(decode_text(body), self.context)) as chunks:
            return [encode_text(chunk) async for chunk in chunks]


def answer(script: list[Step], can: Capabilities | None = None, **body: Any) -> list[dict[str, Any]]:
    """Return the chunks that a body gets from an engine that plays `script`."""
    body.setdefault("model", "m")
    if "messages" not in body:
        body.setdefault("prompt", "hi")
    return run_bounded(TextHarness(ScriptedEngine(script, capabilities=can)).chunks(**body))


def text_of(chunks: list[dict[str, Any]], index: int = 0) -> str:
    choices = [choice for chunk in chunks for choice in chunk["choices"] if choice["index"] == index]
    return "".join(choice["text"] if "text" in choice else choice["delta"].get("content", "") for choice in choices)


def reasons(chunks: list[dict[str, Any]]) -> list[str | None]:
    return [choice["finish_reason"] for chunk in chunks for choice in chunk["choices"]]


END = Finished(FinishReason.EOS)


def test_a_completion_returns_text_then_usage() -> None:
    chunks = answer([*spell("hello"), END])
    assert text_of(chunks) == "hello"
    assert reasons(chunks)[-1] == "stop"
    assert chunks[-1]["choices"] == []
    assert chunks[-1]["usage"]["prompt_tokens"] == 2
    assert chunks[-1]["usage"]["completion_tokens"] == 5
    assert chunks[-1]["usage"]["total_tokens"] == 7
    assert {chunk["object"] for chunk in chunks} == {"text_completion"}
    assert {chunk["id"] for chunk in chunks} == {"cmpl-me"}


def test_a_chat_is_rendered_by_the_template_and_its_role_sent_once() -> None:
    engine = ScriptedEngine([*spell("a"), 0.01, *spell("b"), 0.01, END])
    messages = [{"role": "system", "content": "S"}, {"role": "user", "content": "U"}]
    chunks = run_bounded(TextHarness(engine).chunks(model="m", messages=messages, stream=True))
    assert "".join(map(chr, engine.submitted[0].token_ids)) == "<system>S<user>U"
    assert text_of(chunks) == "ab"
    roles = [choice["delta"].get("role") for chunk in chunks for choice in chunk["choices"]]
    assert roles == ["assistant", None, None]
    assert {chunk["object"] for chunk in chunks} == {"chat.completion.chunk"}


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        ({}, True),
        ({"stream": False}, True),
        ({"stream": True}, False),
        ({"stream": True, "stream_options": {"include_usage": True}}, True),
        ({"stream": True, "stream_options": {"include_usage": False}}, False),
    ],
)
def test_usage_is_sent_unless_a_stream_does_not_ask_for_it(body: dict[str, Any], expected: bool) -> None:
    chunks = answer([*spell("a"), END], **body)
    assert any("usage" in chunk for chunk in chunks) is expected


def test_a_stop_string_ends_the_answer_and_is_not_sent() -> None:
    engine = ScriptedEngine(spell("one END two"))
    harness = TextHarness(engine)
    chunks = run_bounded(harness.chunks(model="m", prompt="hi", stop=["END", "never"]))
    assert text_of(chunks) == "one "
    assert reasons(chunks)[-1] == "stop"
    assert chunks[-1]["usage"]["completion_tokens"] == len("one END")
    assert engine.aborted == [engine.submitted[0].request_id]
    assert [record.state for record in harness.observer.records] == [State.COMPLETED]


def test_a_partial_stop_string_is_sent_at_the_end() -> None:
    chunks = answer([*spell("the EN"), END], stop="END")
    assert text_of(chunks) == "the EN"


def test_stop_strings_end_each_choice_separately() -> None:
    script = [*spell("abX", 0), *spell("abc", 1), 0.01, *spell("dX", 1), 0.01, *spell("more", 0)]
    chunks = answer(script, Capabilities(max_choices=2), n=2, stop="X")
    assert [text_of(chunks, index) for index in (0, 1)] == ["ab", "abcd"]
    assert reasons(chunks).count("stop") == 2
    assert sum("usage" in chunk for chunk in chunks) == 1


@pytest.mark.parametrize(
    ("reason", "openai"),
    [
        (FinishReason.EOS, "stop"),
        (FinishReason.STOP, "stop"),
        (FinishReason.LENGTH, "length"),
        (FinishReason.CONTENT_FILTER, "content_filter"),
    ],
)
def test_finish_reasons_are_those_of_openai(reason: FinishReason, openai: str) -> None:
    assert reasons(answer([*spell("a"), Finished(reason)]))[-1] == openai


def test_options_reach_the_engine() -> None:
    engine = ScriptedEngine([END])
    body = {"max_tokens": 9, "temperature": 0.5, "seed": 3, "top_k": 4, "min_p": 0.1, "presence_penalty": 1.0}
    run_bounded(TextHarness(engine).chunks(model="m", prompt="hi", min_tokens=2, ignore_eos=True, **body))
    [work] = engine.submitted
    assert (work.max_tokens, work.stop.min_tokens, work.stop.ignore_eos) == (9, 2, True)
    assert (work.sampling.temperature, work.sampling.seed, work.sampling.top_k) == (0.5, 3, 4)
    assert (work.sampling.min_p, work.sampling.presence_penalty) == (0.1, 1.0)


def test_max_completion_tokens_overrides_max_tokens() -> None:
    engine = ScriptedEngine([END])
    run_bounded(TextHarness(engine).chunks(model="m", prompt="hi", max_tokens=9, max_completion_tokens=4))
    assert engine.submitted[0].max_tokens == 4


@pytest.mark.parametrize("prompt", ["hi", ["hi"], [104, 105]])
def test_a_prompt_is_one_text_or_one_list_of_tokens(prompt: object) -> None:
    engine = ScriptedEngine([END])
    run_bounded(TextHarness(engine).chunks(model="m", prompt=prompt))
    assert engine.submitted[0].token_ids == (104, 105)


@pytest.mark.parametrize(
    ("body", "error", "field"),
    [
        ({"prompt": ""}, InvalidRequest, "prompt"),
        ({"prompt": []}, InvalidRequest, "prompt"),
        ({"prompt": ["a", "b"]}, InvalidRequest, "prompt"),
        ({"prompt": [1, "b"]}, InvalidRequest, "prompt"),
        ({"messages": []}, InvalidRequest, "messages"),
        ({"prompt": "hi", "logprobs": 1}, Unsupported, "logprobs"),
        ({"prompt": "hi", "logprobs": True}, Unsupported, "logprobs"),
        ({"prompt": "hi", "tools": [{}]}, Unsupported, "tools"),
        ({"prompt": "hi", "response_format": {"type": "json_object"}}, Unsupported, "response_format"),
        ({"prompt": "hi", "logit_bias": {"5": 1.0}}, Unsupported, "logit_bias"),
        ({"prompt": "hi", "n": 2}, Unsupported, "n:"),
        ({"prompt": "hi", "frobnicate": 0}, Unsupported, "frobnicate"),
        ({"prompt": "hi", "include_stop_str_in_output": True}, Unsupported, "include_stop_str_in_output"),
        ({"prompt": "hi", "skip_special_tokens": False}, Unsupported, "skip_special_tokens"),
        ({"prompt": "hi", "tool_choice": "required"}, Unsupported, "tool_choice"),
        ({"prompt": "hi", "modalities": ["audio"]}, Unsupported, "modalities"),
        ({"prompt": "hi", "length_penalty": 2.0}, Unsupported, "length_penalty"),
        ({"prompt": "hi", "unknown": ["x"]}, Unsupported, "unknown"),
    ],
)
def test_an_unsupported_request_is_refused_by_field(body: dict[str, Any], error: type[BatonError], field: str) -> None:
    engine = ScriptedEngine([END])
    harness = TextHarness(engine)
    with pytest.raises(error) as refusal:
        run_bounded(harness.chunks(model="m", **body))
    assert field in refusal.value.message
    assert engine.submitted == []
    assert [record.state for record in harness.observer.records] == [State.REFUSED]


@pytest.mark.parametrize(
    ("body", "field"),
    [
        ({"prompt": "hi"}, "model"),
        ({"model": "m"}, "messages"),
        ({"model": "m", "prompt": "hi", "messages": []}, "messages"),
        ({"model": "m", "prompt": {}}, "prompt"),
        ({"model": "m", "prompt": [-1]}, "prompt"),
        ({"model": "m", "prompt": "hi", "max_tokens": 0}, "max_tokens"),
        ({"model": "m", "prompt": "hi", "temperature": "hot"}, "temperature"),
        ({"model": "m", "messages": "hi"}, "messages"),
        ({"model": "m", "prompt": "hi", "stop": ["x"] * 65}, "stop"),
        ({"model": "m", "prompt": "hi", "stop": "x" * 1025}, "stop"),
    ],
)
def test_a_body_that_does_not_decode_names_the_field(body: dict[str, Any], field: str) -> None:
    with pytest.raises(DecodeError, match=field):
        decode_text(body)


@pytest.mark.parametrize("body", [None, [], "text", 5])
def test_a_body_that_is_no_object_is_refused(body: object) -> None:
    with pytest.raises(DecodeError, match="Expected `object`"):
        decode_text(body)


def test_fields_that_change_no_text_are_accepted() -> None:
    information = {"user": "u", "metadata": {}, "store": False, "service_tier": "auto", "parallel_tool_calls": True}
    assert text_of(answer([*spell("abc"), END], **information, tool_choice="none", frobnicate=None)) == "abc"


def test_template_variables_stop_tokens_and_the_cache_salt_are_applied() -> None:
    class Template(Letters):
        def render_chat(
            self, messages: Sequence[dict[str, object]], variables: Mapping[str, object] | None = None
        ) -> str:
            return json.dumps(variables)

    async def body() -> None:
        engine = ScriptedEngine([END])
        harness = TextHarness(engine, tokenizer=Template())
        chat = {"messages": [{"role": "user", "content": "hi"}], "stop_token_ids": [7], "nvext": {"cache_salt": "a"}}
        await harness.chunks(model="m", chat_template_args={"x": 1}, **chat)
        await harness.chunks(model="m", chat_template_kwargs={"y": 2}, cache_salt="b", **chat)
        prompts = ["".join(map(chr, work.token_ids)) for work in engine.submitted]
        assert prompts == ['{"x": 1}', '{"y": 2}']
        assert [work.stop.stop_token_ids for work in engine.submitted] == [(7,), (7,)]
        assert [work.cache_salt for work in engine.submitted] == ["a", "b"]

    run_bounded(body())


def test_the_priority_reaches_the_engine() -> None:
    async def body() -> None:
        engine = ScriptedEngine([END])
        await TextHarness(engine).chunks(model="m", prompt="hi", nvext={"agent_hints": {"priority": 5}})
        assert [work.priority for work in engine.submitted] == [5]

    run_bounded(body())


def test_empty_stop_strings_are_ignored() -> None:
    assert text_of(answer([*spell("abc"), END], stop=["", ""])) == "abc"
    assert text_of(answer([*spell("abc"), END], stop="")) == "abc"


def test_cancellation_aborts_the_answer() -> None:
    async def body() -> None:
        engine = ScriptedEngine(spell("a"))
        harness = TextHarness(engine)
        reading = asyncio.create_task(harness.chunks(model="m", prompt="hi"))
        await eventually(lambda: len(engine.submitted) == 1)
        harness.context.cancel()
        with pytest.raises(Cancelled):
            await reading
        assert engine.aborted == [engine.submitted[0].request_id]
        assert harness.gate.in_flight == 0

    run_bounded(body())


@pytest.mark.parametrize("text", ["plain", "naïve ☃ snow", "👩‍👩‍👧 family", "🎉" * 5])
def test_the_bundled_tokenizer_round_trips_any_text(text: str) -> None:
    async def body() -> None:
        engine = EchoEngine()
        async with running(engine) as info:
            harness = TextHarness(engine, info, HubTokenizer(MODEL_DIR))
            chunks = await harness.chunks(model="echo", prompt=text)
            assert text_of(chunks) == text
            assert "\ufffd" not in "".join(json.dumps(chunk, ensure_ascii=False) for chunk in chunks)

    run_bounded(body())


def test_tokenising_a_long_text_does_not_block_the_event_loop() -> None:
    async def body() -> None:
        engine, clock = EchoEngine(EchoOptions(context=1000)), asyncio.get_running_loop().time
        async with running(engine) as info:
            harness = TextHarness(engine, info, HubTokenizer(MODEL_DIR))
            measuring, begun = asyncio.create_task(measure_lag()), clock()
            with pytest.raises(ContextTooLong):
                await harness.chunks(model="echo", prompt="as long as a book " * 200_000)
            took = clock() - begun
            measuring.cancel()
            assert await measuring < took / 2

    run_bounded(body(), 60)


@pytest.mark.parametrize(
    "messages",
    [
        [{"role": "user"}],
        [{"role": "user", "content": None}],
        [{"role": "user", "content": [{"type": "text", "text": "hi"}]}],
        [{"content": "hi"}],
        [{}],
    ],
)
def test_messages_of_any_shape_are_answered_or_invalid(messages: list[dict[str, Any]]) -> None:
    async def body() -> None:
        engine = EchoEngine()
        async with running(engine) as info:
            harness = TextHarness(engine, info, HubTokenizer(MODEL_DIR))
            with suppress(InvalidRequest):
                await harness.chunks(model="echo", messages=messages)

    run_bounded(body())


@pytest.mark.parametrize(
    "template",
    [
        "{{ raise_exception('only one turn') }}",
        "{{ messages[0]['content'] + 1 }}",
        "{{ messages[5]['content']['text'] }}",
        "{{ ''.__class__.__mro__ }}",
        "{% for i in range(99999999) %}{{ 1 // 0 }}{% endfor %}",
    ],
)
def test_a_template_that_fails_on_the_messages_is_an_invalid_request(template: str, tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_bytes((MODEL_DIR / "tokenizer.json").read_bytes())
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": template}))
    with pytest.raises(InvalidRequest, match="messages"):
        HubTokenizer(tmp_path).render_chat([{"role": "user", "content": "hi"}])


def test_a_model_without_a_template_refuses_chats(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_bytes((MODEL_DIR / "tokenizer.json").read_bytes())
    (tmp_path / "tokenizer_config.json").write_text("{}")
    with pytest.raises(InvalidRequest, match="no chat template"):
        HubTokenizer(tmp_path).render_chat([{"role": "user", "content": "hi"}])


def test_a_model_that_is_an_adapter_selects_it() -> None:
    async def body() -> None:
        engine = ScriptedEngine([Finished(FinishReason.LENGTH)], capabilities=Capabilities(lora=True))
        harness = TextHarness(engine)
        for model in (INFO.model_name, "fine"):
            await harness.chunks(model=model, prompt="hi", max_tokens=1)
        assert [work.lora_name for work in engine.submitted] == [None, "fine"]

    run_bounded(body())
