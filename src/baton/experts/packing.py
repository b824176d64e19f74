"""Replication and bin packing for expert layouts. Knows nothing about nodes, groups or files.

An item is one copy of an owner (an expert); every bin gets the same number of items. All functions are deterministic:
ties go to the heavier owner, then to the lower number.
"""

import heapq
import math
from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

_GOOD = 1.01  # ratio of the heaviest bin to its lower bound that is good enough
_GAIN = 1e-9  # relative gain below which a swap is rounding, not progress


class Item(NamedTuple):
    """One copy of an owner, with its share of the owner's load."""

    weight: float
    owner: int


def spread(loads: Sequence[float], bins: int, capacity: int) -> list[list[int]]:
    """Return the owners in each bin, `capacity` per bin: every owner at least once, heavy owners several times.

    Two copies of an owner share a bin only if `capacity` exceeds the number of owners. The caller ensures that the
    total capacity is at least the number of owners.
    """
    slots = bins * capacity
    max_copies = bins * -(-capacity // len(loads))  # a second copy in a bin does not reduce its load
    best: list[list[int]] = []
    lightest = math.inf
    for idle in _idle_copies(slots - len(loads)):
        copies = replicate(loads, slots, max_copies, idle)
        shares = [load / count for load, count in zip(loads, copies, strict=True)]
        packed = pack(loads, copies, bins)
        heaviest = max(sum(shares[owner] for owner in content) for content in packed)
        if heaviest < lightest:
            best, lightest = packed, heaviest
        if lightest <= _GOOD * max(sum(loads) / bins, *shares):
            break
    return best


def _idle_copies(extra: int) -> list[int]:
    """Return the numbers of extra copies to leave idle, in the order to try them."""
    return [0, *(1 << power for power in range(extra.bit_length()) if 1 << power < extra), *([extra] if extra else [])]


def replicate(loads: Sequence[float], slots: int, max_copies: int, idle: int = 0) -> list[int]:
    """Return the number of copies of each owner, `slots` in total: each next copy goes where a copy has the most load.

    The last `idle` copies go where a copy has the least load: since every slot must be filled, two equal loads, each
    beside an idle copy, can balance better than one of them halved. No owner gets more than `max_copies`. The caller
    ensures that len(loads) <= slots <= len(loads) * max_copies.
    """
    copies = [1] * len(loads)
    queue = [(-load, -load, owner) for owner, load in enumerate(loads)] if max_copies > 1 else []
    heapq.heapify(queue)
    for _ in range(slots - len(loads) - idle):
        _, load, owner = heapq.heappop(queue)
        copies[owner] += 1
        if copies[owner] < max_copies:
            heapq.heappush(queue, (load / copies[owner], load, owner))
    for _ in range(idle):
        open_owners = (owner for owner, count in enumerate(copies) if count < max_copies)
        copies[min(open_owners, key=lambda owner: (loads[owner] / copies[owner], loads[owner], owner))] += 1
    return copies


def pack(loads: Sequence[float], copies: Sequence[int], bins: int) -> list[list[int]]:
    """Return the owners in each bin, sorted. Bins have the same number of items and about the same weight.

    Two copies of an owner share a bin only if some owner has more copies than bins. The caller ensures that `bins`
    divides the number of copies.
    """
    limit = max(-(-count // bins) for count in copies)
    items = [Item(loads[owner] / copies[owner], owner) for owner in _heaviest_first(loads, copies)]
    packing = _Packing(bins, len(items) // bins, limit)
    packing.fill(items)
    packing.separate_copies()
    packing.balance()
    return [sorted(item.owner for item in content) for content in packing.contents]


def _heaviest_first(loads: Sequence[float], copies: Sequence[int]) -> list[int]:
    owners = sorted(range(len(loads)), key=lambda owner: (-loads[owner] / copies[owner], -loads[owner], owner))
    return [owner for owner in owners for _ in range(copies[owner])]


class _Packing:
    """The state of the bins. `limit` is the number of copies of one owner that a bin may hold."""

    def __init__(self, bins: int, capacity: int, limit: int) -> None:
        self.contents: list[list[Item]] = [[] for _ in range(bins)]
        self._weights = [0.0] * bins
        self._owners: list[Counter[int]] = [Counter() for _ in range(bins)]
        self._capacity = capacity
        self._limit = limit

    def fill(self, items: Sequence[Item]) -> None:
        """Put each item into the lightest open bin, if possible one that is below the limit for its owner."""
        for item in items:
            open_bins = [at for at, content in enumerate(self.contents) if len(content) < self._capacity]
            apart = [at for at in open_bins if self._owners[at][item.owner] < self._limit]
            self._add(min(apart or open_bins, key=self._weights.__getitem__), item)

    def separate_copies(self) -> None:
        """Swap items until no bin exceeds the limit, which `fill` does if only such bins are open.

        Each swap removes one excess copy, and there is always one: if every owner of `there` is at its limit `here`
        too, then `there`, having as many items, has an excess copy itself.
        """
        for here, owners in enumerate(self._owners):
            while excess := [item for item in self.contents[here] if owners[item.owner] > self._limit]:
                self._separate(here, excess[0])

    def _separate(self, here: int, item: Item) -> None:
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

    def balance(self) -> None:
        """Swap items of the heaviest bin for lighter ones, as long as the heavier bin of the pair gets lighter."""
        while True:
            here = max(range(len(self._weights)), key=self._weights.__getitem__)
            swap = self._best_swap(here)
            if swap is None:
                return
            self._swap(here, *swap)

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
