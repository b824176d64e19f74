"""Messages as the frontend passes them to a chat template: texts joined, arguments of tool calls as objects."""

from collections.abc import Sequence

import msgspec

Json = dict[str, object]


def template_messages(messages: Sequence[Json]) -> list[Json]:
    """Return the messages as a template gets them."""
    return [_message(message) for message in messages]


def _message(message: Json) -> Json:
    content, calls = message.get("content"), message.get("tool_calls")
    changed = {name: value for name, value in message.items() if value is not None}
    if isinstance(content, list):
        changed["content"] = _content(content)
    if isinstance(calls, list):
        changed["tool_calls"] = [_call(call) for call in calls]
    return changed


def _content(parts: list[Json]) -> object:
    """Text parts alone are one text; other parts keep their place, without their data."""
    if parts and all(part.get("type") == "text" for part in parts):
        return "\n".join(str(part.get("text")) for part in parts)
    return [part if part.get("type") == "text" else {"type": _kind(part)} for part in parts]


def _kind(part: Json) -> str:
    return str(part.get("type")).removesuffix("_url")


def _call(call: Json) -> Json:
    function = call.get("function")
    if not isinstance(function, dict) or not isinstance(function.get("arguments"), str):
        return call
    try:
        arguments = msgspec.json.decode(function["arguments"])
    except msgspec.DecodeError:
        return call
    return {**call, "type": "function", "function": {**function, "arguments": arguments}}
