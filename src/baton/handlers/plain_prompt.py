"""The prompt of a request for an engine that places media itself: placeholders that a client has typed are text."""

from collections.abc import Mapping

from baton.handlers.placeholders import Messages, as_plain_text, find_placeholders
from baton.ports.engine import MediaInfo
from baton.protocol.requests import GenerateRequest


def plain_prompt(request: GenerateRequest, media: MediaInfo | None) -> tuple[int, ...]:
    """Return the prompt with one placeholder for each item that the request names. Raises InvalidRequest.

    It is returned as it is if `media` is None: the placeholders of the model are unknown.
    """
    if media is None:
        return request.token_ids
    counts = {kind.removesuffix("_url"): len(items) for kind, items in (request.media or {}).items()}
    keep: list[int] = []
    for modality, placeholder in media.placeholders.items():
        if placeholder.token in request.token_ids:
            count = counts.get(modality, 0)
            keep += find_placeholders(request.token_ids, placeholder, modality, count, _messages(request))
    return as_plain_text(request.token_ids, media.placeholders, keep)[0]


def _messages(request: GenerateRequest) -> Messages | None:
    messages = (request.extra_args or {}).get("messages")
    if not isinstance(messages, list) or not all(isinstance(message, Mapping) for message in messages):
        return None
    return messages
