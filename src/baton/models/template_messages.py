"""Messages as chat templates take them: content as text or as parts, arguments of tool calls as objects.

Templates differ in what they do with content. Some print it, so it has to be a text. Some go through its parts. Some do
both. A text for a template that takes parts would be read letter by letter, and parts for one that prints would be
printed as code.
"""

import enum
from collections.abc import Mapping, Sequence

import msgspec

from baton.errors import InvalidRequest, Unsupported

Json = dict[str, object]


class ContentFormat(enum.Enum):
    """What a template takes as the content of a message."""

    TEXT = "text"
    PARTS = "parts"
    BOTH = "both"


def template_messages(messages: Sequence[Mapping[str, object]], takes: ContentFormat) -> list[Json]:
    """Return the messages for a template that `takes` such content.

    Parts of media keep their place, without their data. Raises InvalidRequest for parts that are none, and Unsupported
    for media where the template has no place for them.
    """
    return [_message(message, takes, f"messages[{number}]") for number, message in enumerate(messages)]


def _message(message: Mapping[str, object], takes: ContentFormat, place: str) -> Json:
    content, calls = message.get("content"), message.get("tool_calls")
    changed = {name: value for name, value in message.items() if value is not None}
    if isinstance(content, list):
        changed["content"] = _from_parts(content, takes, f"{place}.content")
    elif isinstance(content, str) and takes is ContentFormat.PARTS:
        changed["content"] = [{"type": "text", "text": content}]
    if isinstance(calls, list):
        changed["tool_calls"] = [_call(call) for call in calls]
    return changed


def _from_parts(parts: Sequence[object], takes: ContentFormat, place: str) -> object:
    """Text parts alone are one text where the template takes a text; parts of media keep their place."""
    shaped = [_part(part, f"{place}[{number}]") for number, part in enumerate(parts)]
    media = [str(part["type"]) for part in shaped if part["type"] != "text"]
    if takes is ContentFormat.TEXT and media:
        raise Unsupported(f"{place}: the chat template of this model has no place for parts of type {media[0]}")
    if media or not shaped or takes is ContentFormat.PARTS:
        return shaped
    return "\n".join(str(part["text"]) for part in shaped)


def _part(part: object, place: str) -> Json:
    if not isinstance(part, dict) or not isinstance(part.get("type"), str):
        raise InvalidRequest(f"{place}: a part of content is an object with a type")
    if part["type"] != "text":
        return {"type": part["type"].removesuffix("_url").removeprefix("input_")}
    if not isinstance(part.get("text"), str):
        raise InvalidRequest(f"{place}.text: a text is expected")
    return part


def _call(call: object) -> object:
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(call, dict) or not isinstance(function, dict) or not isinstance(function.get("arguments"), str):
        return call
    try:
        arguments = msgspec.json.decode(function["arguments"])
    except msgspec.DecodeError:
        return call
    return {**call, "type": "function", "function": {**function, "arguments": arguments}}
