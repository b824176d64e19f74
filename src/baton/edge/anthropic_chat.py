"""A request to count the tokens of an Anthropic message, as a chat."""

from collections.abc import Iterator

import msgspec

from baton.edge.errors import FieldError
from baton.edge.routes import Json

Blocks = list[dict[str, object]]


class AnthropicMessage(msgspec.Struct):
    """A message: a text or blocks."""

    role: str
    content: str | Blocks


class CountTokensRequest(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """What a message would be created from."""

    model: str
    messages: list[AnthropicMessage]
    system: str | Blocks | None = None
    tools: Blocks | None = None
    tool_choice: dict[str, object] | None = None
    thinking: dict[str, object] | None = None
    output_config: dict[str, object] | None = None

    def functions(self) -> Blocks | None:
        """Return the tools in OpenAI's format."""
        return None if self.tools is None else [_function(tool) for tool in self.tools]


def as_chat(request: CountTokensRequest) -> list[Json]:
    """Return the messages in OpenAI's format. Raises FieldError."""
    system: list[Json] = [] if request.system is None else [{"role": "system", "content": _text(request.system)}]
    return system + [each for message in request.messages for each in _messages(message)]


def _messages(message: AnthropicMessage) -> Iterator[Json]:
    """Yield the results of tools, then the rest: they are messages of their own in a chat."""
    if isinstance(message.content, str):
        yield {"role": message.role, "content": message.content}
        return
    for block in _of_type(message.content, "tool_result"):
        yield {"role": "tool", "tool_call_id": block.get("tool_use_id"), "content": _text(block.get("content"))}
    calls = [_call(block) for block in _of_type(message.content, "tool_use")]
    images: list[Json] = [{"type": "image_url"} for _ in _of_type(message.content, "image")]
    text = _text(message.content)
    if images:
        yield {"role": message.role, "content": [*images, {"type": "text", "text": text}]}
    elif text or calls:
        yield {"role": message.role, "content": text, **({"tool_calls": calls} if calls else {})}


def _of_type(blocks: Blocks, kind: str) -> Blocks:
    return [block for block in blocks if block.get("type") == kind]


def _text(content: object) -> str:
    """Return the text of a content; the frontend joins its blocks without anything between them. Raises FieldError."""
    if not isinstance(content, list):
        return str(content or "")
    if not all(isinstance(block, dict) for block in content):
        raise FieldError("messages", "Invalid 'messages': the blocks of a content are objects.", code="invalid_type")
    return "".join(str(block.get("text", "")) for block in content if block.get("type") == "text")


def _call(block: Json) -> Json:
    return {
        "id": block.get("id"),
        "type": "function",
        "function": {"name": block.get("name"), "arguments": block.get("input") or {}},
    }


def _function(tool: Json) -> Json:
    function = {
        "name": tool.get("name"),
        "description": tool.get("description") or "",
        "parameters": tool.get("input_schema"),
    }
    return {"type": "function", "function": function}
