"""Holds answers to OpenAI's and Anthropic's schemas where the frontend's differ. Pure functions.

Streams of chats pass unchanged: they are valid, apart from an empty answer, whose deltas have no content at all.
"""

import re
from typing import cast

import msgspec

Json = dict[str, object]

_EVENT_END = b"\n\n"
_CHUNK = b"data: {"
_DONE = b"data: [DONE]\n\n"
# Quotes within strings are escaped, so text cannot look like these.
_MESSAGE_DELTA = b'"type":"message_delta"'
_MESSAGE = b'"message":{'
_MESSAGE_WITH_TEXT = b'"message":{"content":"'
_WITHOUT_SEQUENCE = re.compile(rb'("delta":\{"stop_reason":(?:"\w+"|null))\}')
_OPTIONAL = ("system_fingerprint", "usage")
"""Fields of a completion that may be absent, but not null."""

_decode = msgspec.json.Decoder(Json).decode
_encode = msgspec.json.Encoder().encode


def normalise_chat(path: str, answer: Json) -> Json:
    """Return a whole chat answer: the content of an empty one is a text, as long as there are no tool calls."""
    for choice in _choices(answer):
        message = choice.get("message")
        if isinstance(message, dict) and message.get("content") is None and not message.get("tool_calls"):
            message["content"] = ""
    return answer


def has_chat_content(answer: bytes) -> bool:
    """Whether `normalise_chat` certainly changes nothing. The frontend begins a message with its text if it has one."""
    messages = answer.count(_MESSAGE)
    return messages > 0 and messages == answer.count(_MESSAGE_WITH_TEXT)


def normalise_completion(path: str, answer: Json) -> Json:
    """Return a whole completion: its choices have all of their fields, and their tokens have offsets."""
    for choice in _choices(answer):
        logprobs = choice.get("logprobs")
        if isinstance(logprobs, dict):
            _add_offsets(logprobs)
    return _complete(answer)


def normalise_completion_events(path: str, events: bytes) -> bytes:
    """Return whole events of a completion's stream: each chunk has all fields of a choice."""
    return _EVENT_END.join([_normalise_event(event) for event in events.split(_EVENT_END)])


def normalise_message_events(path: str, events: bytes) -> bytes:
    """Return whole events of an Anthropic message: `stop_sequence` is always there, and `message_stop` is the last."""
    if _MESSAGE_DELTA in events:
        events = _WITHOUT_SEQUENCE.sub(rb'\1,"stop_sequence":null}', events)
    return events.removesuffix(_DONE)


def _normalise_event(event: bytes) -> bytes:
    if not event.startswith(_CHUNK):
        return event
    chunk = _decode(memoryview(event)[6:])
    return event if "error" in chunk else b"data: " + _encode(_complete(chunk))


def _complete(answer: Json) -> Json:
    """Add the fields that a completion, or a chunk of one, must have, and leave out those that must not be null."""
    for choice in _choices(answer):
        choice.setdefault("logprobs", None)
        choice.setdefault("finish_reason", None)
    for name in _OPTIONAL:
        if answer.get(name, ()) is None:
            del answer[name]
    if (usage := answer.get("usage")) is not None:
        _drop_unknown_counts(cast("Json", usage))
    return answer


def _drop_unknown_counts(usage: Json) -> None:
    """Leave out details that are null: they are numbers, or absent."""
    for name, details in usage.items():
        if isinstance(details, dict):
            usage[name] = {kind: count for kind, count in details.items() if count is not None}


def _choices(answer: Json) -> list[Json]:
    choices = answer.get("choices")
    return choices if isinstance(choices, list) else []


def _add_offsets(logprobs: Json) -> None:
    """Set where each token begins in the text of the answer; the frontend returns an empty list."""
    tokens = cast("list[str]", logprobs.get("tokens") or [])
    if logprobs.get("text_offset") or not tokens:
        return
    offsets, end = [], 0
    for token in tokens:
        offsets.append(end)
        end += len(token)
    logprobs["text_offset"] = offsets
