"""The media of a chat, in the order of its messages, and the messages without their data. Pure functions."""

from collections.abc import Iterator, Mapping, Sequence

from baton.errors import InvalidRequest, Unsupported
from baton.protocol.media import MediaItem

Messages = Sequence[Mapping[str, object]]

MEDIA_TYPES = ("image_url", "video_url", "audio_url")


def media_of(messages: Messages) -> dict[str, tuple[MediaItem, ...]]:
    """Return the media of each type, in the order of the messages.

    Raises InvalidRequest for a part without a URL, and Unsupported for a type that is neither text nor media.
    """
    found: dict[str, tuple[MediaItem, ...]] = {}
    for place, part in _parts(messages):
        kind = str(part.get("type"))
        if kind == "input_audio":
            kind, url = "audio_url", _recording(part, place)
        elif kind in MEDIA_TYPES:
            url = _url(part, kind, place)
        else:
            raise Unsupported(
                f"{place}.type: no part of type {kind}; use text, {', '.join(MEDIA_TYPES)} or input_audio"
            )
        found[kind] = (*found.get(kind, ()), MediaItem(url=url))
    return found


def without_data(messages: Messages) -> list[dict[str, object]]:
    """Return the messages with parts of media reduced to the types of `media_of`: they say where media are."""
    return [{**message, "content": _reduced(message.get("content"))} for message in messages]


def _parts(messages: Messages) -> Iterator[tuple[str, Mapping[str, object]]]:
    """Yield the parts that are not text, with their paths in the request."""
    for number, message in enumerate(messages):
        content = message.get("content")
        for position, part in enumerate(content if isinstance(content, list) else ()):
            if isinstance(part, Mapping) and part.get("type") != "text":
                yield f"messages[{number}].content[{position}]", part


def _reduced(content: object) -> object:
    if not isinstance(content, list):
        return content
    parts = [part for part in content if isinstance(part, Mapping)]
    return [part if part.get("type") == "text" else {"type": _kind(part)} for part in parts]


def _kind(part: Mapping[str, object]) -> str:
    return "audio_url" if part.get("type") == "input_audio" else str(part.get("type"))


def _url(part: Mapping[str, object], kind: str, place: str) -> str:
    named = part.get(kind)
    url = named.get("url") if isinstance(named, Mapping) else named
    if not isinstance(url, str) or not url:
        raise InvalidRequest(f"{place}.{kind}.url: a URL is expected")
    return url


def _recording(part: Mapping[str, object], place: str) -> str:
    """Return audio that is inside the request as a data URL."""
    match part.get("input_audio"):
        case {"data": str(data), "format": str(name)} if name.isalnum():
            return f"data:audio/{name};base64,{data}"
        case _:
            raise InvalidRequest(f"{place}.input_audio: base64 data and a format are expected")
