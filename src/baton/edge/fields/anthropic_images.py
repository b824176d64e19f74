"""Images in the messages of Anthropic's API. The frontend takes those that are in the request itself, as base64."""

import re

from baton.edge.errors import FieldError
from baton.edge.fields.table import Json, unsupported

_DATA_URL = re.compile(r"data:([^;,]+);base64,(.*)", re.DOTALL)
_ADDRESS = "this route reads no addresses; send the image as base64, or use /v1/chat/completions"


def inline_images(body: Json) -> Json:
    """Return the body with data URLs as base64 sources. Raises FieldError for sources that are not in the request."""
    messages = body["messages"]
    assert isinstance(messages, list)
    read = [_read_blocks(message, f"messages[{number}].content") for number, message in enumerate(messages)]
    return {**body, "messages": read} if read != messages else body


def _read_blocks(holder: object, path: str) -> object:
    """Return a message, or the result of a tool, with the images in its content."""
    content = holder.get("content") if isinstance(holder, dict) else None
    if not isinstance(content, list):
        return holder
    assert isinstance(holder, dict)
    return {**holder, "content": [_read_block(block, f"{path}[{number}]") for number, block in enumerate(content)]}


def _read_block(block: object, path: str) -> object:
    kind = block.get("type") if isinstance(block, dict) else None
    if kind == "tool_result":
        return _read_blocks(block, f"{path}.content")
    if kind != "image":
        return block
    assert isinstance(block, dict)
    return {**block, "source": _source(block.get("source"), f"{path}.source")}


def _source(source: object, path: str) -> Json:
    if not isinstance(source, dict):
        raise FieldError(path, f"Missing required parameter: '{path}'.", code="missing_required_parameter")
    match source.get("type"), source.get("url"):
        case "base64", _:
            return _checked(source, path)
        case "url", str(url) if (found := _DATA_URL.fullmatch(url)) is not None:
            return {"type": "base64", "media_type": found[1], "data": found[2]}
        case "url", _:
            raise unsupported(f"{path}.url", _ADDRESS)
        case _:
            raise unsupported(f"{path}.type", "images are read from `base64` sources, and from `url` with a data URL")


def _checked(source: Json, path: str) -> Json:
    for name in ("media_type", "data"):
        if not isinstance(source.get(name), str):
            raise FieldError(
                f"{path}.{name}", f"Missing required parameter: '{path}.{name}'.", code="missing_required_parameter"
            )
    return source
