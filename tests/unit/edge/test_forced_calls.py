"""A forced tool call that was cut by length is returned as far as it goes."""

import json
from typing import Any

import pytest

from baton.edge.forced_calls import as_stream, joined_answer

HEAD = {"id": "chatcmpl-1", "object": "chat.completion.chunk", "created": 7, "model": "m"}
NAMED = {"type": "function", "function": {"name": "f"}}


def stream(*chunks: dict[str, Any]) -> bytes:
    events = [json.dumps({**HEAD, **chunk}) for chunk in chunks]
    return "".join(f"data: {event}\n\n" for event in [*events, "[DONE]"]).encode()


def piece(finish_reason: str | None = None, index: int = 0, logprobs: object = None, **delta: object) -> dict[str, Any]:
    return {"choices": [{"index": index, "delta": delta, "finish_reason": finish_reason, "logprobs": logprobs}]}


def call(arguments: str, index: int = 0, **more: object) -> list[dict[str, Any]]:
    name = {"name": more.pop("name")} if "name" in more else {}
    return [{"index": index, **more, "function": {**name, "arguments": arguments}}]


def test_a_call_that_was_cut_is_returned_as_far_as_it_goes() -> None:
    usage = {"prompt_tokens": 3, "completion_tokens": 4, "total_tokens": 7}
    answer = joined_answer(
        stream(
            piece(role="assistant", content="", tool_calls=call("{", id="call-1", type="function", name="f")),
            piece(content="", tool_calls=call('"city": "To')),
            piece("length"),
            {"choices": [], "usage": usage},
        )
    )
    function = {"name": "f", "arguments": '{"city": "To'}
    assert answer == {
        **HEAD,
        "object": "chat.completion",
        "choices": [
            {
                "index": 0,
                "message": {
                    "role": "assistant",
                    "content": None,
                    "tool_calls": [{"id": "call-1", "type": "function", "function": function}],
                },
                "finish_reason": "length",
                "logprobs": None,
            }
        ],
        "usage": usage,
    }


def test_several_calls_choices_and_logprobs_are_kept_apart() -> None:
    answer: Any = joined_answer(
        stream(
            piece(tool_calls=call("{}", id="a", name="f"), reasoning_content="So"),
            piece(index=1, content="[{", logprobs={"content": [{"token": "["}]}),
            piece(tool_calls=call("{", index=1, id="b", name="g"), reasoning_content=" be it"),
            piece("tool_calls", tool_calls=call("}", index=1)),
            piece("length", index=1, content='"', logprobs={"content": [{"token": '"'}]}),
        )
    )
    first, second = answer["choices"]
    calls = [
        (each["id"], each["function"]["name"], each["function"]["arguments"]) for each in first["message"]["tool_calls"]
    ]
    assert calls == [("a", "f", "{}"), ("b", "g", "{}")]
    assert (first["message"]["reasoning_content"], first["finish_reason"]) == ("So be it", "tool_calls")
    assert (second["message"]["content"], second["finish_reason"]) == ('[{"', "length")
    assert second["logprobs"] == {"content": [{"token": "["}, {"token": '"'}]}


def test_an_error_in_the_stream_is_the_answer() -> None:
    error = {"message": "gone", "code": 503}
    assert joined_answer(stream(piece(content="x"), {"error": error})) == {"error": error}


@pytest.mark.parametrize(
    ("body", "forced"),
    [
        ({"tool_choice": "required"}, True),
        ({"tool_choice": NAMED, "stream": False}, True),
        ({"tool_choice": "required", "stream": True}, False),
        ({"tool_choice": "auto"}, False),
        ({"tool_choice": "none"}, False),
        ({}, False),
    ],
    ids=str,
)
def test_only_whole_answers_with_a_forced_call_are_joined(body: dict[str, Any], forced: bool) -> None:
    stream = {**body, "stream": True, "stream_options": {"include_usage": True}}
    assert as_stream(body) == (stream if forced else None)


def test_a_stream_that_ends_early_is_an_error() -> None:
    events = stream(piece(content="x")).removesuffix(b"data: [DONE]\n\n")
    error: Any = joined_answer(events)["error"]
    assert error["code"] == 503
