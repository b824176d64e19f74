"""The built-in engine through the whole system: a real chat model from PyPI, asked with the official client."""

import json
import re
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import openai
import pytest

pytest.importorskip("torch")

from baton.config.directories import cache_directory
from baton.config.settings import Settings
from baton.errors import ConfigError
from baton.models.demo import DEMOS, prepare_demo
from tests.e2e.harness import Serve

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(300)]

JAPAN = [{"role": "user", "content": "What is the capital of Japan?"}]
STORY = [{"role": "user", "content": "Tell me a long story about a fox and a river."}]
SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 20}, "age": {"type": "integer", "maximum": 120}},
    "required": ["name", "age"],
}


@pytest.fixture(scope="module")
def serve(start_shared: Callable[..., Serve]) -> Iterator[Serve]:
    try:
        prepare_demo(DEMOS["smollm2"], cache_directory(Settings()) / "models")
    except ConfigError as error:
        pytest.skip(error.message)
    serve = start_shared(Serve, engine="torch")
    yield serve
    serve.stop()


def chat(serve: Serve, messages: list[dict[str, str]], **options: Any) -> Any:
    defaults: dict[str, Any] = {"temperature": 0.0, "max_tokens": 48}
    return serve.client().chat.completions.create(model="smollm2", messages=messages, **(defaults | options))


def test_it_knows_the_capital_of_japan(serve: Serve) -> None:
    answer = chat(serve, JAPAN)
    assert "Tokyo" in answer.choices[0].message.content
    assert answer.choices[0].finish_reason == "stop"
    assert answer.usage.completion_tokens < 20


def test_a_stream_says_the_same(serve: Serve) -> None:
    whole = chat(serve, JAPAN).choices[0].message.content
    parts = [chunk.choices[0].delta.content or "" for chunk in chat(serve, JAPAN, stream=True) if chunk.choices]
    assert "".join(parts) == whole
    assert len(parts) > 3


def test_a_prompt_that_was_here_before_is_cached(serve: Serve) -> None:
    messages = [{"role": "user", "content": "Remember these words: " + "apple pear plum " * 20}]
    first, second = chat(serve, messages, max_tokens=4), chat(serve, messages, max_tokens=4)
    assert second.usage.prompt_tokens_details.cached_tokens >= first.usage.prompt_tokens - 16
    assert first.choices[0].message.content == second.choices[0].message.content


def test_many_at_once_get_their_own_answers(serve: Serve) -> None:
    countries = {"Japan": "Tokyo", "Germany": "Berlin", "England": "London", "Egypt": "Cairo"}
    asked = [country for country in countries for _ in range(4)]
    with ThreadPoolExecutor(len(asked)) as pool:
        questions = [[{"role": "user", "content": f"What is the capital of {country}?"}] for country in asked]
        answers = list(pool.map(lambda messages: chat(serve, messages), questions))
    texts = [answer.choices[0].message.content for answer in answers]
    for country in countries:
        assert len({text for text, of in zip(texts, asked, strict=True) if of == country}) == 1
        assert any(countries[country] in text for text, of in zip(texts, asked, strict=True) if of == country)


def test_a_seed_repeats_and_choices_differ(serve: Serve) -> None:
    options: dict[str, Any] = {"n": 3, "seed": 7, "temperature": 1.0, "max_tokens": 24}
    first, second = (chat(serve, STORY, **options) for _ in range(2))
    texts = [choice.message.content for choice in first.choices]
    assert texts == [choice.message.content for choice in second.choices]
    assert len(set(texts)) == 3


def test_a_json_schema_is_kept(serve: Serve) -> None:
    messages = [{"role": "user", "content": "Invent a person."}]
    form = {"type": "json_schema", "json_schema": {"name": "person", "schema": SCHEMA, "strict": True}}
    for seed in range(3):
        answer = chat(serve, messages, response_format=form, temperature=1.0, seed=seed, max_tokens=100)
        person = json.loads(answer.choices[0].message.content)
        assert person.keys() == {"name", "age"}
        assert isinstance(person["age"], int)


@pytest.mark.parametrize(
    ("guided", "shape"),
    [
        ({"guided_regex": "[A-Z][a-z]{2,9}-[0-9]{3}"}, r"[A-Z][a-z]{2,9}-[0-9]{3}"),
        ({"guided_choice": ["maybe", "certainly"]}, r"maybe|certainly"),
    ],
)
def test_a_guide_is_kept(serve: Serve, guided: dict[str, Any], shape: str) -> None:
    answer = chat(serve, STORY, temperature=1.0, extra_body=guided)
    assert re.fullmatch(shape, answer.choices[0].message.content)


def test_log_probabilities_come_with_every_token(serve: Serve) -> None:
    answer = chat(serve, JAPAN, logprobs=True, top_logprobs=3)
    content = answer.choices[0].logprobs.content
    assert len(content) == answer.usage.completion_tokens
    assert all(len(entry.top_logprobs) == 3 for entry in content)
    assert all(entry.logprob == pytest.approx(entry.top_logprobs[0].logprob, abs=1e-6) for entry in content)


def test_penalties_and_stop_strings(serve: Serve) -> None:
    plain = chat(serve, JAPAN, logprobs=True)
    assert (
        chat(serve, JAPAN, stop=["Tokyo"]).choices[0].message.content
        == plain.choices[0].message.content.split("Tokyo")[0]
    )
    plain_story, varied_story = (
        chat(serve, STORY, max_tokens=96, extra_body={"repetition_penalty": 1.0}, **penalties)
        for penalties in ({}, {"frequency_penalty": 1.5, "presence_penalty": 1.0})
    )
    repeated, varied = plain_story.choices[0].message.content, varied_story.choices[0].message.content
    assert len(set(varied.split())) / len(varied.split()) > len(set(repeated.split())) / len(repeated.split())


def test_in_text_format_it_takes_a_bias(start_shared: Callable[..., Serve], serve: Serve) -> None:
    # In token format the frontend drops it.
    text = start_shared(Serve, "--model-input", "text", engine="torch")
    try:
        assert "Tokyo" in chat(text, JAPAN).choices[0].message.content
        stuck = chat(text, JAPAN, logit_bias={"42": 100}, max_tokens=5).choices[0].message.content
        assert stuck
        assert stuck == stuck[: len(stuck) // 5] * 5
        with pytest.raises(openai.BadRequestError, match="logit_bias"):
            chat(text, JAPAN, logit_bias={"99999999": 1})
    finally:
        text.stop()


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        ({"max_tokens": 100_000}, "context"),
        ({"messages": [{"role": "user", "content": "long " * 9000}]}, "context"),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "nonsense"}}}},
            "json",
        ),
        ({"extra_body": {"guided_regex": "(unclosed"}}, "regex"),
    ],
)
def test_bad_input_gets_a_clear_400_and_harms_nobody(serve: Serve, options: dict[str, Any], complaint: str) -> None:
    with pytest.raises(openai.BadRequestError) as failure:
        chat(serve, **({"messages": JAPAN} | options))
    assert complaint in str(failure.value).lower()
    assert "Tokyo" in chat(serve, JAPAN).choices[0].message.content


def test_a_client_that_leaves_frees_its_blocks(serve: Serve) -> None:
    for _ in range(3):
        stream = chat(serve, STORY, stream=True, max_tokens=4000, extra_body={"ignore_eos": True})
        for _, _chunk in zip(range(5), stream, strict=False):
            pass
        stream.close()
    serve.assert_quiet()


def test_the_worker_answers_its_probes_while_it_computes(serve: Serve) -> None:
    with ThreadPoolExecutor(8) as pool:
        asked = [pool.submit(chat, serve, STORY, max_tokens=150) for _ in range(8)]
        probes = 0
        while not all(one.done() for one in asked):
            status, _ = serve.system("/live")
            assert status == 200
            probes += 1
            time.sleep(0.05)
        assert all(one.result().usage.completion_tokens > 0 for one in asked)
    assert probes > 1


def test_the_demo_model_answers_well_without_options(serve: Serve) -> None:
    countries = {"Japan": "Tokyo", "Germany": "Berlin", "France": "Paris", "Egypt": "Cairo"}
    for country, capital in countries.items():
        messages = [{"role": "user", "content": f"What is the capital of {country}?"}]
        answers = chat(serve, messages, temperature=None, n=4, seed=1, max_tokens=32).choices
        assert all(capital in answer.message.content for answer in answers), country
    words = chat(serve, STORY, temperature=None, seed=1, max_tokens=160).choices[0].message.content.split()
    phrases = Counter(zip(*(words[start:] for start in range(6)), strict=False))
    assert max(phrases.values()) < 4, "the story is a loop"


def test_a_greedy_request_has_equal_choices(serve: Serve) -> None:
    choices = chat(serve, STORY, n=3, temperature=None, max_tokens=12, extra_body={"top_k": 1}).choices
    assert {choice.message.content for choice in choices} == {
        chat(serve, STORY, max_tokens=12).choices[0].message.content
    }


def test_a_tool_loop_of_two_turns_ends_in_an_answer(serve: Serve) -> None:
    parameters = {"type": "object", "properties": {"city": {"enum": ["Tokyo"]}}, "required": ["city"]}
    tools: list[Any] = [{"type": "function", "function": {"name": "get_weather", "parameters": parameters}}]
    messages: list[Any] = [{"role": "user", "content": "What is the weather in Tokyo?"}]
    one: dict[str, Any] = {"tool_choice": "required", "parallel_tool_calls": False}
    called = chat(serve, messages, tools=tools, max_tokens=100, **one).choices[0].message
    assert called.content is None
    messages += [called, {"role": "tool", "tool_call_id": called.tool_calls[0].id, "content": "It is 21 degrees."}]
    answer = chat(serve, messages, tools=tools)
    assert "21" in answer.choices[0].message.content


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "note"}}], ids=str)
def test_a_forced_tool_call_that_is_cut_by_length_is_returned_as_far_as_it_goes(serve: Serve, choice: Any) -> None:
    parameters = {"type": "object", "properties": {"text": {"type": "string", "minLength": 200}}, "required": ["text"]}
    tools = [{"type": "function", "function": {"name": "note", "parameters": parameters}}]
    answer = chat(serve, STORY, tools=tools, tool_choice=choice, max_tokens=32)
    (call,) = answer.choices[0].message.tool_calls or []
    assert call.type == "function"
    assert (call.function.name, answer.choices[0].finish_reason) == ("note", "length")
    assert re.match(r'\{\s*"text"\s*:\s*"\w', call.function.arguments)
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 32


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "get_weather"}}], ids=str)
@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
def test_a_forced_tool_call_follows_the_schema_of_the_tool(serve: Serve, choice: Any, stream: bool) -> None:
    parameters = {
        "type": "object",
        "properties": {"city": {"type": "string", "enum": ["Tokyo", "Paris"]}},
        "required": ["city"],
    }
    tools = [{"type": "function", "function": {"name": "get_weather", "parameters": parameters}}]
    answer = chat(serve, JAPAN, tools=tools, tool_choice=choice, max_tokens=200, stream=stream)
    choices = [each.choices[0] for each in answer] if stream else answer.choices
    calls = [call for each in choices for call in (each.delta if stream else each.message).tool_calls or []]
    assert {call.function.name for call in calls if call.function.name} == {"get_weather"}
    arguments = "".join(call.function.arguments for call in calls if not stream or call.index == 0)
    assert json.loads(arguments if stream else calls[0].function.arguments) in ({"city": "Tokyo"}, {"city": "Paris"})
    assert choices[-1].finish_reason == "tool_calls"
