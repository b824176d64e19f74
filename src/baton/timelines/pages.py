"""The page of timelines that a query string asks for."""

from collections.abc import Mapping
from typing import NamedTuple

from baton.errors import InvalidRequest
from baton.timelines.ring import MAX_PAGE


class Page(NamedTuple):
    """See `TimelineRing.page`."""

    after: int
    limit: int


def page_of(query: Mapping[str, str]) -> Page:
    """Return the page of `after` and `limit` in `query`. Raises InvalidRequest."""
    return Page(
        _number(query, "after", 0, 0, (1 << 63) - 1),
        _number(query, "limit", MAX_PAGE, 0, MAX_PAGE),
    )


def _number(query: Mapping[str, str], name: str, default: int, least: int, most: int) -> int:
    text = query.get(name)
    if text is None:
        return default
    if not (text.isascii() and text.isdigit() and len(text) < 20 and least <= int(text) <= most):
        raise InvalidRequest(f"{name}: expected a whole number from {least} to {most}, got {text[:40]!r}")
    return int(text)
