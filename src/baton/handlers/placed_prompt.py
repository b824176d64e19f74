"""The prompt of a request with encoded media: placeholders found and expanded, typed ones made ordinary text."""

from collections.abc import Mapping, Sequence

import msgspec

from baton.errors import InvalidRequest, PeerLost
from baton.handlers.placeholders import Messages, as_plain_text, expand, find_placeholders
from baton.ports.engine import MediaInfo
from baton.protocol.media import EncodedItem, MediaEmbedding, PlacedItem
from baton.protocol.requests import GenerateRequest


def place(request: GenerateRequest, items: Sequence[EncodedItem], media: MediaInfo) -> tuple[PlacedItem, ...]:
    """Return the items, each with its placeholder: the first of a modality has the first. Raises InvalidRequest."""
    placed: dict[int, PlacedItem] = {}
    for modality in dict.fromkeys(item.modality for item in items):
        numbers = [number for number, item in enumerate(items) if item.modality == modality]
        indexes = find(request, modality, len(numbers), media)
        for number, index in zip(numbers, indexes, strict=True):
            placed[number] = PlacedItem(item=items[number], index=index)
    return tuple(placed[number] for number in range(len(items)))


def find(request: GenerateRequest, modality: str, count: int, media: MediaInfo) -> list[int]:
    """Return the indexes of the placeholders of `count` items. Raises InvalidRequest."""
    placeholder = media.placeholders.get(modality)
    if placeholder is None:
        raise InvalidRequest(f"multi_modal_data: prompts of this model have no placeholder for {modality}")
    return find_placeholders(request.token_ids, placeholder, modality, count, _messages(request))


def expanded(
    token_ids: Sequence[int], placed: Sequence[PlacedItem], media: MediaInfo
) -> tuple[tuple[int, ...], list[int]]:
    """Return the prompt with every placeholder of `placed` expanded and every other one as ordinary text.

    Returns the tokens, and the position of each item in them. Raises PeerLost for items that have no placeholder there.
    """
    tokens, moved = as_plain_text(token_ids, media.placeholders, [each.index for each in placed])
    special = {placeholder.token for placeholder in media.placeholders.values()}
    for each in placed:
        if each.index not in moved or token_ids[each.index] not in special:
            raise PeerLost(f"the prompt has no placeholder at token {each.index}, where another worker found one")
    return expand(tokens, [msgspec.structs.replace(each, index=moved[each.index]) for each in placed])


def plain_prompt(request: GenerateRequest, media: MediaInfo | None) -> tuple[int, ...]:
    """Return the prompt for an engine that places media itself: placeholders that a client has typed are text.

    It has one placeholder for each item that the request names. It is returned as it is if `media` is None: the
    placeholders of the model are unknown. Raises InvalidRequest.
    """
    if media is None or not has_placeholders(request.token_ids, media):
        return request.token_ids
    counts = {kind.removesuffix("_url"): len(items) for kind, items in (request.media or {}).items()}
    keep: list[int] = []
    for modality, placeholder in media.placeholders.items():
        if placeholder.token in request.token_ids:
            keep += find(request, modality, counts.get(modality, 0), media)
    return as_plain_text(request.token_ids, media.placeholders, keep)[0]


def has_placeholders(token_ids: Sequence[int], media: MediaInfo | None) -> bool:
    """Whether the prompt has any placeholder, typed ones included."""
    return media is not None and any(each.token in token_ids for each in media.placeholders.values())


def embeddings(
    placed: Sequence[PlacedItem], positions: Sequence[int], rows: Sequence[memoryview | None], media: MediaInfo
) -> tuple[MediaEmbedding, ...]:
    """Return the items as the engine takes them."""
    return tuple(
        MediaEmbedding(item=each.item, position=position, dtype=media.shape.dtype, size=media.shape.size, data=data)
        for each, position, data in zip(placed, positions, rows, strict=True)
    )


def _messages(request: GenerateRequest) -> Messages | None:
    messages = (request.extra_args or {}).get("messages")
    if not isinstance(messages, list) or not all(isinstance(message, Mapping) for message in messages):
        return None
    return messages
