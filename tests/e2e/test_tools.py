"""Tool calls, reasoning and chat templates with the official client, on an engine that writes the family's format."""

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import openai
import pytest

from baton.engines.echo.engine import MODEL_DIR
from tests.doubles.chat_model import make_chat_model
from tests.e2e.harness import Process, Serve

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(120)]

MODEL = "qwen"
WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}
NAMED = {"type": "function", "function": {"name": "get_weather"}}


def call(city: str) -> str:
    return f'<tool_call>\n{{"name": "get_weather", "arguments": {{"city": "{city}"}}}}\n</tool_call>'


SCRIPT = {
    "21 degrees": "It is 21 degrees in Paris.",
    "one city": call("Paris"),
    "two cities": call("Paris") + "\n" + call("Rome"),
    "think and call": "<think>It is about Paris.</think>Let me look." + call("Paris"),
    "think": "<think>Two and two.</think>Four.",
}


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("chat")
    make_chat_model(directory / MODEL)
    (directory / "script.yaml").write_text(json.dumps(SCRIPT))
    return directory


@pytest.fixture(scope="module")
def serve(start_shared: Callable[..., Serve], files: Path) -> Iterator[Serve]:
    serve = start_shared(Serve, "--model", str(files / MODEL), "--echo-script", str(files / "script.yaml"))
    yield serve
    serve.stop()


@pytest.fixture(scope="module")
def plain(start_shared: Callable[..., Serve], files: Path) -> Iterator[Serve]:
    """A model that has no parser, and a chat template of the user's."""
    template = files / "template.jinja"
    template.write_text("{% for message in messages %}<{{ message.role }}>{{ message.content }}{% endfor %}")
    serve = start_shared(Serve, "--tool-call-parser", "none", "--chat-template", str(template))
    yield serve
    serve.stop()


def ask(serve: Serve, text: str, model: str = MODEL, **options: Any) -> Any:
    messages = [{"role": "user", "content": text}]
    return serve.client(strict=False).chat.completions.create(model=model, messages=messages, **options)


def cities(message: Any) -> list[str]:
    calls = message.tool_calls or []
    assert all(each.function.name == "get_weather" and each.id for each in calls)
    return [json.loads(each.function.arguments)["city"] for each in calls]


def test_a_call_is_returned_as_a_call(serve: Serve) -> None:
    (choice,) = ask(serve, "one city", tools=[WEATHER], tool_choice="auto").choices
    assert (cities(choice.message), choice.finish_reason, choice.message.content) == (["Paris"], "tool_calls", None)


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
def test_a_tool_loop_of_two_turns_ends_in_an_answer(serve: Serve, stream: bool) -> None:
    client = serve.client(strict=False)
    messages: list[Any] = [{"role": "user", "content": "one city"}]
    first = client.chat.completions.create(model=MODEL, messages=messages, tools=[WEATHER]).choices[0].message
    assert first.content is None
    (asked,) = first.tool_calls
    messages += [first, {"role": "tool", "tool_call_id": asked.id, "content": "21 degrees"}]
    answer = client.chat.completions.create(model=MODEL, messages=messages, tools=[WEATHER], stream=stream)
    said = [chunk.choices[0].delta.content or "" for chunk in answer] if stream else [answer.choices[0].message.content]
    assert "".join(said) == SCRIPT["21 degrees"]


def test_parallel_calls_are_returned_unless_the_client_takes_one(serve: Serve) -> None:
    assert cities(ask(serve, "two cities", tools=[WEATHER]).choices[0].message) == ["Paris", "Rome"]
    one = ask(serve, "two cities", tools=[WEATHER], parallel_tool_calls=False)
    assert cities(one.choices[0].message) == ["Paris"]


def test_calls_are_streamed(serve: Serve) -> None:
    chunks = [chunk.choices[0] for chunk in ask(serve, "two cities", tools=[WEATHER], stream=True)]
    deltas = [delta for chunk in chunks for delta in chunk.delta.tool_calls or []]
    arguments = ["".join(d.function.arguments or "" for d in deltas if d.index == index) for index in (0, 1)]
    assert [json.loads(each) for each in arguments] == [{"city": "Paris"}, {"city": "Rome"}]
    assert [chunk.finish_reason for chunk in chunks if chunk.finish_reason] == ["tool_calls"]
    assert "tool_call" not in "".join(chunk.delta.content or "" for chunk in chunks)


def test_with_tool_choice_none_the_model_sees_no_tools_and_its_text_is_not_parsed(serve: Serve) -> None:
    answer = ask(serve, "one city", tools=[WEATHER], tool_choice="none")
    assert answer.choices[0].message.tool_calls is None
    assert answer.choices[0].message.content == SCRIPT["one city"]
    with_tools = ask(serve, "one city", tools=[WEATHER])
    assert answer.usage.prompt_tokens < with_tools.usage.prompt_tokens


@pytest.mark.parametrize("choice", ["required", NAMED], ids=["required", "named"])
def test_a_forced_call_is_refused_by_name_without_guided_decoding(serve: Serve, choice: Any) -> None:
    with pytest.raises(openai.BadRequestError, match="tool_choice"):
        ask(serve, "one city", tools=[WEATHER], tool_choice=choice)


def test_reasoning_is_returned_apart_from_the_content(serve: Serve) -> None:
    message = ask(serve, "think").choices[0].message
    assert (message.reasoning_content, message.content) == ("Two and two.", "Four.")
    message = ask(serve, "think and call", tools=[WEATHER]).choices[0].message
    assert (message.reasoning_content, cities(message)) == ("It is about Paris.", ["Paris"])


def test_reasoning_is_streamed_apart_from_the_content(serve: Serve) -> None:
    deltas = [chunk.choices[0].delta for chunk in ask(serve, "think", stream=True)]
    assert "".join(getattr(delta, "reasoning_content", None) or "" for delta in deltas) == "Two and two."
    assert "".join(delta.content or "" for delta in deltas) == "Four."


@pytest.mark.parametrize("options", [{}, {"tool_choice": "required"}, {"stream": True}], ids=str)
def test_tools_are_refused_by_name_without_a_parser(plain: Serve, options: dict[str, Any]) -> None:
    with pytest.raises(openai.BadRequestError, match=r"tools: .*--tool-call-parser"):
        ask(plain, "hi", "echo", tools=[WEATHER], **options)


def test_capabilities_of_a_model_without_a_parser_lack_tools(serve: Serve, plain: Serve) -> None:
    found = [json.loads(each.get("/v1/models")[1])["data"][0]["capabilities"]["tools"] for each in (serve, plain)]
    assert found == [True, False]


def test_without_a_parser_tools_that_the_model_may_not_call_are_accepted(plain: Serve) -> None:
    answer = ask(plain, "hi", "echo", tools=[WEATHER], tool_choice="none")
    assert answer.choices[0].message.content == "<user>hi"


def test_a_chat_template_of_the_user_replaces_that_of_the_model(plain: Serve) -> None:
    assert ask(plain, "<tool_call>", "echo").choices[0].message.content == "<user><tool_call>"


@pytest.mark.parametrize(
    ("flags", "named"),
    [
        (["--tool-call-parser", "nonsense"], "hermes"),
        (["--reasoning-parser", "nonsense"], "deepseek_r1"),
        (["--chat-template", "/nonexistent.jinja"], "/nonexistent.jinja"),
        (["--chat-template", str(MODEL_DIR / "config.json")], "messages"),
        (["--echo-script", "/nonexistent.yaml"], "/nonexistent.yaml"),
    ],
    ids=str,
)
def test_settings_that_make_no_sense_end_the_start(flags: list[str], named: str, tmp_path: Path) -> None:
    process = Process(["serve", "--engine", "echo", *flags], tmp_path / "serve.log")
    assert process.wait() == 2
    assert named in process.output.read_text()
