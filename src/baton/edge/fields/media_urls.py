"""URLs of media in messages, marked so that the frontend does not fetch them: that is the workers' task.

The frontend reads the first bytes of images, by rules of its own.
Images in data URLs are left to it: it routes by them.
"""

import operator

from baton.edge.fields.table import Json
from baton.protocol.media import UNFETCHED

_KEYS = ("image_url", "video_url", "audio_url")
_READ_BY_FRONTEND = "data:image/"


def with_marked_urls(body: Json, field: str) -> Json:
    """Return the body with the URLs in the messages of `field` marked; the same object if there are none."""
    messages = body[field]
    if not isinstance(messages, list):
        return body
    marked = [_marked_message(message) for message in messages]
    return body if all(map(operator.is_, marked, messages)) else {**body, field: marked}


def _marked_message(message: Json) -> Json:
    content = message.get("content")
    if not isinstance(content, list):
        return message
    parts = [_marked_part(part) if isinstance(part, dict) else part for part in content]
    return message if all(map(operator.is_, parts, content)) else {**message, "content": parts}


def _marked_part(part: Json) -> Json:
    """Return a part of a message. Its URL is a text in responses, and in an object in chats."""
    for key in _KEYS:
        match part.get(key):
            case str(url) if _is_fetched(url):
                return {**part, key: UNFETCHED + url}
            case {"url": str(url), **others} if _is_fetched(url):
                return {**part, key: {"url": UNFETCHED + url, **others}}
    return part


def _is_fetched(url: str) -> bool:
    return not url[: len(_READ_BY_FRONTEND)].lower().startswith(_READ_BY_FRONTEND)
