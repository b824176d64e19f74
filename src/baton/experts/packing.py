"""Copies and bins: the arithmetic under a layout. Knows nothing of nodes, groups or files.

An item is one copy of an owner (an expert); every bin gets the same number of items. Everything here is deterministic:
ties fall to the heavier owner, then to the lower number.
"""

import heapq
import math
from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

_GOOD = 1.01  # as many times the least that the heaviest bin can weigh as is good enough
_GAIN = 1e-9  # share of the heaviest bin below which a swap is rounding, not progress


class Item(NamedTuple):
    """One copy of an owner, with its share of the owner's load."""

    weight: float
    owner: int


def spread(loads: Sequence[float], bins: int, room: int) -> list[list[int]]:
    """Return the owners in each bin, `room` to a bin: each owner somewhere, the heavy ones in several places.

    Two copies of an owner share a bin only if a bin has more room than there are owners. The caller sees to it that
    there are not more owners than room in all bins.
    """
    slots = bins * room
    most = bins * -(-room // len(loads))  # a copy beside another takes no load off their bin
    best: list[list[int]] = []
    lightest = math.inf
    for idle in _idle_copies(slots - len(loads)):
        copies = replicate(loads, slots, most, idle)
        shares = [load / count for load, count in zip(loads, copies, strict=True)]
        packed = pack(loads, copies, bins)
        heaviest = max(sum(shares[owner] for owner in content) for content in packed)
        if heaviest < lightest:
            best, lightest = packed, heaviest
        if lightest <= _GOOD * max(sum(loads) / bins, *shares):
            break
    return best


def _idle_copies(extra: int) -> list[int]:
    """Return how many of the extra copies to waste, in the order to try it."""
    return [0, *(1 << power for power in range(extra.bit_length()) if 1 << power < extra), *([extra] if extra else [])]


def replicate(loads: Sequence[float], slots: int, most: int, idle: int = 0) -> list[int]:
    """Return the copies of each owner, `slots` in all: one each, then always one more where a copy bears the most.

    The last `idle` go where a copy bears the least: where every slot must be filled, two equal loads are better off
    whole, each beside an idle copy, than with one of them halved. No owner gets more than `most`. The caller sees to it
    that len(loads) <= slots <= len(loads) * most.
    """
    copies = [1] * len(loads)
    queue = [(-load, -load, owner) for owner, load in enumerate(loads)] if most > 1 else []
    heapq.heapify(queue)
    for _ in range(slots - len(loads) - idle):
        _, whole, owner = heapq.heappop(queue)
        copies[owner] += 1
        if copies[owner] < most:
            heapq.heappush(queue, (whole / copies[owner], whole, owner))
    for _ in range(idle):
        roomy = (owner for owner, count in enumerate(copies) if count < most)
        copies[min(roomy, key=lambda owner: (loads[owner] / copies[owner], loads[owner], owner))] += 1
    return copies


def pack(loads: Sequence[float], copies: Sequence[int], bins: int) -> list[list[int]]:
    """Return the owners in each bin, sorted; bins hold equally many and are about equally heavy.

    Two copies of an owner share a bin only if some owner has more copies than bins. The caller sees to it that `bins`
    divides the number of copies.
    """
    limit = max(-(-count // bins) for count in copies)
    items = [Item(loads[owner] / copies[owner], owner) for owner in _heaviest_first(loads, copies)]
    packing = _Packing(bins, len(items) // bins, limit)
    packing.fill(items)
    packing.part_copies()
    packing.level()
    return [sorted(item.owner for item in content) for content in packing.contents]


def _heaviest_first(loads: Sequence[float], copies: Sequence[int]) -> list[int]:
    owners = sorted(range(len(loads)), key=lambda owner: (-loads[owner] / copies[owner], -loads[owner], owner))
    return [owner for owner in owners for _ in range(copies[owner])]


class _Packing:
    """Bins while they are being filled. `limit` is how many copies of one owner a bin may hold."""

    def __init__(self, bins: int, room: int, limit: int) -> None:
        self.contents: list[list[Item]] = [[] for _ in range(bins)]
        self._weights = [0.0] * bins
        self._owners: list[Counter[int]] = [Counter() for _ in range(bins)]
        self._room = room
        self._limit = limit

    def fill(self, items: Sequence[Item]) -> None:
        """Put each item into the lightest bin with room, past those that have its owner already if there is another."""
        for item in items:
            open_bins = [at for at, content in enumerate(self.contents) if len(content) < self._room]
            apart = [at for at in open_bins if self._owners[at][item.owner] < self._limit]
            self._add(min(apart or open_bins, key=self._weights.__getitem__), item)

    def part_copies(self) -> None:
        """Undo what `fill` had to do when the only room left was beside another copy.

        Each swap leaves one copy too many less, and there is always one to make: where every owner of `there` is at
        its limit `here` too, `there` has a copy too many itself, being as large.
        """
        for here, owners in enumerate(self._owners):
            while crowded := [item for item in self.contents[here] if owners[item.owner] > self._limit]:
                self._part(here, crowded[0])

    def _part(self, here: int, item: Item) -> None:
        rest = self._weights[here] - item.weight
        choices = [
            (max(rest + other.weight, self._weights[there] - other.weight + item.weight), there, other)
            for there, owners in enumerate(self._owners)
            if owners[item.owner] < self._limit
            for other in self.contents[there]
            if self._owners[here][other.owner] < self._limit or owners[other.owner] > self._limit
        ]
        _, there, other = min(choices, key=lambda choice: choice[0])
        self._swap(here, item, there, other)

    def level(self) -> None:
        """Swap items out of the heaviest bin for lighter ones, as long as the heavier of the two bins gets lighter."""
        while True:
            here = max(range(len(self._weights)), key=self._weights.__getitem__)
            found = self._best_swap(here)
            if found is None:
                return
            self._swap(here, *found)

    def _best_swap(self, here: int) -> tuple[Item, int, Item] | None:
        weight = self._weights[here]
        best, found = weight * (1 - _GAIN), None
        for item in dict.fromkeys(self.contents[here]):
            for there, other_weight in enumerate(self._weights):
                # The heavier bin of the pair gets no lighter than their mean.
                if (
                    there == here
                    or (weight + other_weight) / 2 >= best
                    or self._owners[there][item.owner] >= self._limit
                ):
                    continue
                for other in self.contents[there]:
                    moved = item.weight - other.weight
                    heavier = max(weight - moved, other_weight + moved)
                    if heavier < best and self._owners[here][other.owner] < self._limit:
                        best, found = heavier, (item, there, other)
        return found

    def _swap(self, here: int, item: Item, there: int, other: Item) -> None:
        self._remove(here, item)
        self._remove(there, other)
        self._add(here, other)
        self._add(there, item)

    def _add(self, at: int, item: Item) -> None:
        self.contents[at].append(item)
        self._weights[at] += item.weight
        self._owners[at][item.owner] += 1

    def _remove(self, at: int, item: Item) -> None:
        self.contents[at].remove(item)
        self._weights[at] -= item.weight
        self._owners[at][item.owner] -= 1
