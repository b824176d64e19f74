"""Answers of the frontend, held to OpenAI's schema: the types of the official client say what is valid."""

import copy
import json

import msgspec
import pytest
from openai.types import Completion
from openai.types.chat import ChatCompletion

from baton.edge.answers import (
    has_chat_content,
    normalise_chat,
    normalise_completion,
    normalise_completion_events,
    normalise_message_events,
)
from baton.edge.prompt_requests import CHAT
from baton.edge.public_routes import public_routes
from tests.unit.edge.stage import answering, on_uvloop, post, stage, whole

COMPLETION: dict[str, object] = {
    "id": "cmpl-1",
    "created": 1,
    "model": "m",
    "object": "text_completion",
    "system_fingerprint": None,
}


def chat(**message: object) -> dict[str, object]:
    """Return a chat answer as the frontend sends it."""
    return {
        "id": "chatcmpl-1",
        "choices": [
            {
                "index": 0,
                "message": {"refusal": None, "role": "assistant", **message},
                "finish_reason": "stop",
                "logprobs": None,
            }
        ],
        "created": 1,
        "model": "m",
        "object": "chat.completion",
    }


def message_of(answer: dict[str, object]) -> object:
    """Return the message of a valid chat answer."""
    return ChatCompletion.model_validate(normalise_chat("", answer), strict=True).choices[0].message


def test_an_empty_chat_answer_is_an_empty_text() -> None:
    assert message_of(chat(content=None)).content == ""
    assert message_of(chat(content="Hello")).content == "Hello"


def test_an_answer_with_tool_calls_has_no_content() -> None:
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    assert message_of(chat(content=None, tool_calls=[call])).content is None


@pytest.mark.parametrize(
    ("messages", "passes"),
    [
        ([{"content": "Hello"}], True),
        ([{"content": ""}, {"content": "b"}], True),
        ([{"content": '"message":{"content":"a'}], True),
        ([{"content": None}], False),
        ([{}], False),
        ([{"content": "a"}, {}], False),
        ([{"content": '"message":{"content":"'}, {}], False),
        ([], False),
    ],
)
def test_a_chat_answer_passes_unchanged_if_each_message_has_a_text(
    messages: list[dict[str, object]], passes: bool
) -> None:
    rest = {"refusal": None, "role": "assistant"}
    choices = [{"index": index, "message": {**each, **rest}} for index, each in enumerate(messages)]
    answer = {**chat(), "choices": choices}
    assert has_chat_content(msgspec.json.encode(answer)) is passes
    if passes:
        assert normalise_chat("", copy.deepcopy(answer)) == answer


@on_uvloop
async def test_the_bytes_of_a_chat_answer_are_those_of_the_frontend() -> None:
    async with stage(routes=public_routes({})) as s:
        client = await s.connect()
        body = msgspec.json.encode({"model": "m", "messages": [{"role": "user", "content": "a"}]})
        for sent, expected in (
            (b'{"choices":[{"message":{"content":"a"},"logprobs":1.50}]}', None),
            (b'{"choices":[{"message":{"role":"b"},"logprobs":1.50}]}', b'{"role":"b","content":""}'),
        ):
            s.frontend.reply = answering(whole(200, sent))
            client.send(post(CHAT, body))
            status, _, answer = await client.answer()
            assert status == 200
            assert answer == sent if expected is None else expected in answer


def test_a_completion_has_every_field_of_its_choices() -> None:
    answer = {**COMPLETION, "choices": [{"text": "Hello", "index": 0, "finish_reason": "stop"}], "usage": None}
    valid = normalise_completion("", answer)
    assert valid["choices"] == [{"text": "Hello", "index": 0, "finish_reason": "stop", "logprobs": None}]
    assert not {"system_fingerprint", "usage"} & valid.keys()
    Completion.model_validate(valid, strict=True)


def test_a_chunk_of_a_completion_has_every_field_and_other_events_are_not_changed() -> None:
    chunk = {**COMPLETION, "choices": [{"text": "é\n\n", "index": 0}], "usage": None}
    error = b'data: {"error": {"message": "x"}}\n\n'
    events = b"data: " + json.dumps(chunk).encode() + b"\n\n: alive\n\n" + error + b"data: [DONE]\n\n"
    first, _, rest = normalise_completion_events("", events).partition(b"\n\n")
    assert json.loads(first.removeprefix(b"data: "))["choices"] == [
        {"text": "é\n\n", "index": 0, "logprobs": None, "finish_reason": None}
    ]
    assert rest == b": alive\n\n" + error + b"data: [DONE]\n\n"


def test_the_usage_of_a_stream_is_kept() -> None:
    usage = {"prompt_tokens": 1, "completion_tokens": 1, "total_tokens": 2}
    events = b"data: " + json.dumps({**COMPLETION, "choices": [], "usage": usage}).encode() + b"\n\n"
    assert json.loads(normalise_completion_events("", events)[6:])["usage"] == usage


def test_log_probabilities_have_offsets() -> None:
    logprobs = {"tokens": ["ab", "c"], "token_logprobs": [0.0, 0.0], "top_logprobs": [], "text_offset": []}
    answer = {**COMPLETION, "choices": [{"text": "abc", "index": 0, "logprobs": logprobs, "finish_reason": "stop"}]}
    assert normalise_completion("", answer)["choices"][0]["logprobs"]["text_offset"] == [0, 2]  # type: ignore[index]


def test_the_stream_of_a_message_ends_as_anthropics_does() -> None:
    stop = b'event: message_stop\ndata: {"type":"message_stop"}\n\n'
    events = (
        b'event: message_delta\ndata: {"type":"message_delta","delta":{"stop_reason":"end_turn"},"usage":{}}\n\n' + stop
    )
    whole = normalise_message_events("", events + b"data: [DONE]\n\n")
    assert whole == events.replace(b'"end_turn"', b'"end_turn","stop_sequence":null')
    given = events.replace(b'"end_turn"', b'"stop_sequence","stop_sequence":"x"')
    assert normalise_message_events("", given) == given
