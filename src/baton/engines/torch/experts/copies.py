"""Which slot is copied where when a layer's experts change places, and in which order. Pure.

A slot may be read by several copies and written by one. A copy is done when nothing needs the old content of its
target any more; where slots wait for each other in a circle, the content of one is set aside first.
"""

from collections import Counter
from typing import NamedTuple

from baton.experts.placement import Row

ASIDE = -1
"""The place outside all slots."""


class Copy(NamedTuple):
    """Copy the weights in slot `source` to slot `target`; either may be `ASIDE`."""

    source: int
    target: int


def order_copies(current: Row, wanted: Row, size: int) -> list[Copy]:
    """Return the copies that turn `current` into `wanted`, to be done in this order. Ranks have `size` slots.

    Every expert of `wanted` is in `current`, and both have the same length.
    """
    sources = _sources(current, wanted, size)
    readers = Counter(sources.values())
    ready = [target for target in sources if not readers[target]]
    copies: list[Copy] = []
    while sources:
        if not ready:
            circle = next(iter(sources))  # all that is left are circles, in which each slot has one reader
            copies.append(Copy(circle, ASIDE))
            reader = next(target for target, source in sources.items() if source == circle)
            sources[reader] = ASIDE
            ready.append(circle)
        target = ready.pop()
        source = sources.pop(target)
        copies.append(Copy(source, target))
        readers[source] -= 1
        if source in sources and not readers[source]:
            ready.append(source)
    return copies


def _sources(current: Row, wanted: Row, size: int) -> dict[int, int]:
    """Return for each slot that changes where its new expert is now: if possible in a slot that keeps it, or near."""
    homes: dict[int, list[int]] = {}
    for slot, expert in enumerate(current):
        homes.setdefault(expert, []).append(slot)
    return {
        target: min(
            homes[expert],
            key=lambda slot: (current[slot] != wanted[slot], slot // size != target // size, slot),
        )
        for target, expert in enumerate(wanted)
        if current[target] != expert
    }
