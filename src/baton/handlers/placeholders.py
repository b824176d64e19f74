"""Placeholders of media in a prompt: which tokens they are, and their expansion. Pure functions.

A chat template renders one placeholder token for each image or video. A client can type the same text, and the
tokenizer makes the same token of it. The messages of the request decide which are which, by position; typed ones become
ordinary text, so that no engine takes them for media.
"""

from collections.abc import Iterator, Mapping, Sequence
from itertools import chain, repeat

from baton.errors import InvalidRequest
from baton.ports.engine import Placeholder
from baton.protocol.media import EncodedItem, PlacedItem

Messages = Sequence[Mapping[str, object]]


def find_placeholders(
    token_ids: Sequence[int], placeholder: Placeholder, modality: str, count: int, messages: Messages | None
) -> list[int]:
    """Return the indexes of the placeholders of `count` items of `modality`. Raises InvalidRequest."""
    found = [index for index, token in enumerate(token_ids) if token == placeholder.token]
    if len(found) == count:
        return found
    if len(found) > count and messages is not None:
        rendered = list(_rendered(messages, placeholder.text, modality))
        if len(rendered) == len(found) and sum(rendered) == count:
            return [index for index, is_item in zip(found, rendered, strict=True) if is_item]
    raise InvalidRequest(
        f"multi_modal_data: the prompt has {len(found)} placeholders {placeholder.text!r} for {count} items of type"
        f" {modality}"
    )


def _rendered(messages: Messages, text: str, modality: str) -> Iterator[bool]:
    """Yield, for every placeholder in the order of the prompt, whether it is one of an item; others are typed."""
    for message in messages:
        content = message.get("content")
        parts = content if isinstance(content, list) else [{"type": "text", "text": content}]
        for part in parts:
            if not isinstance(part, Mapping):
                continue
            if str(part.get("type")).removesuffix("_url") == modality:
                yield True
            elif isinstance(typed := part.get("text"), str):
                yield from repeat(False, typed.count(text))


def as_plain_text(
    token_ids: Sequence[int], placeholders: Mapping[str, Placeholder], keep: Sequence[int]
) -> tuple[tuple[int, ...], dict[int, int]]:
    """Replace the placeholders that are not at the indexes `keep` by ordinary text.

    Returns the tokens, and the new index of each index in `keep`.
    """
    plain = {placeholder.token: placeholder.as_text for placeholder in placeholders.values()}
    kept = set(keep)
    tokens: list[int] = []
    moved: dict[int, int] = {}
    for index, token in enumerate(token_ids):
        if index in kept:
            moved[index] = len(tokens)
            tokens.append(token)
        else:
            tokens += plain.get(token, (token,))
    return tuple(tokens), moved


def expand(token_ids: Sequence[int], placed: Sequence[PlacedItem]) -> tuple[tuple[int, ...], list[int]]:
    """Replace each placeholder by the expansion of its item.

    Returns the tokens, and the position of each expansion in them, in the order of `placed`.
    """
    tokens: list[int] = []
    positions = [0] * len(placed)
    done = 0
    for number in sorted(range(len(placed)), key=lambda number: placed[number].index):
        item = placed[number]
        tokens += token_ids[done : item.index]
        positions[number] = len(tokens)
        tokens += _expansion(item.item)
        done = item.index + 1
    tokens += token_ids[done:]
    return tuple(tokens), positions


def _expansion(item: EncodedItem) -> Iterator[int]:
    return chain.from_iterable(repeat(token, count) for token, count in item.expansion)
