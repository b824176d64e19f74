"""Bin packing for expert layouts. Knows nothing about nodes, groups or files.

An item is one copy of an owner (an expert); every bin gets the same number of items, and no bin two of one owner. All
functions are deterministic: ties go to the heavier owner, then to the lower number.
"""

import heapq
from bisect import bisect_left, insort
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from baton.experts.replication import choices

Item = tuple[float, int]
"""The weight of a copy (its share of the owner's load), and its owner."""

# Ratios of the heaviest bin to its lower bound: at which swaps end, and at which no other numbers of copies are tried.
_GOOD = 1.0001
_GOOD_COPIES = 1.0005
_PROMISING = 1.08  # ratio of the heaviest bin before swaps to the best one after swaps, above which swaps are in vain
_GAIN = 1e-9  # relative gain below which a swap is rounding, not progress
_SWAPS_PER_ITEM = 4


class Spread(NamedTuple):
    """The owners in each bin, and the load of the heaviest bin."""

    bins: list[list[int]]
    heaviest: float


def spread(loads: Sequence[float], bins: int, capacity: int) -> Spread:
    """Put `capacity` owners into each bin: every owner at least once, heavy owners several times.

    Two copies of an owner share a bin only if `capacity` exceeds the number of owners. The caller ensures that the
    total capacity is at least the number of owners.
    """
    if capacity >= len(loads):  # equal bins balance exactly
        return Spread([[slot % len(loads) for slot in range(capacity)] for _ in range(bins)], sum(loads) / bins)
    tries = choices(loads, bins * capacity, bins)
    first = next(tries)
    bound = lower_bound(loads, first, bins, capacity)
    best = _filled(loads, first, bins, capacity)
    best.balance(_GOOD * bound)
    while best.heaviest > _GOOD_COPIES * bound and (copies := next(tries, None)):
        other = _filled(loads, copies, bins, capacity)
        if other.heaviest < _PROMISING * best.heaviest:
            other.balance(_GOOD * bound)
            best = min(best, other, key=lambda packing: packing.heaviest)
    return Spread(best.owners, best.heaviest)


def _filled(loads: Sequence[float], copies: Sequence[int], bins: int, capacity: int) -> "Packing":
    packing = Packing(shares_of(loads, copies), bins, capacity)
    packing.fill(copies)
    return packing


def lower_bound(loads: Sequence[float], copies: Sequence[int], bins: int, capacity: int) -> float:
    """Return a weight that the heaviest bin reaches in any packing of these copies: fewer in a bin than owners."""
    shares = sorted(shares_of(loads, copies))
    return max(sum(loads) / bins, shares[-1] + sum(shares[: capacity - 1]))


def shares_of(loads: Sequence[float], copies: Sequence[int]) -> list[float]:
    """Return the load of one copy of each owner."""
    return [load / count for load, count in zip(loads, copies, strict=True)]


class Packing:
    """The items in each bin, by weight. `shares` are the weights of one copy of each owner."""

    def __init__(self, shares: Sequence[float], bins: int, capacity: int) -> None:
        self._shares = shares
        self._capacity = capacity
        self._items: list[list[Item]] = [[] for _ in range(bins)]
        self._held: list[set[int]] = [set() for _ in range(bins)]
        self._weights = [0.0] * bins

    @property
    def heaviest(self) -> float:
        """The weight of the heaviest bin."""
        return max(self._weights)

    @property
    def owners(self) -> list[list[int]]:
        """The owners in each bin, sorted."""
        return [sorted(owner for _, owner in items) for items in self._items]

    def place(self, contents: Sequence[Sequence[int]]) -> None:
        """Put these owners into the bins."""
        for at, owners in enumerate(contents):
            for owner in owners:
                self._add(at, (self._shares[owner], owner))

    def trim(self, copies: Sequence[int]) -> None:
        """Remove the items of each owner beyond its number of copies from the heaviest bins."""
        for owner, (wanted, placed) in enumerate(zip(copies, self._placed(), strict=True)):
            holding = sorted(self._bins_with(owner), key=self._weights.__getitem__, reverse=True)
            for at in holding[: max(0, placed - wanted)]:
                self._remove(at, (self._shares[owner], owner))

    def fill(self, copies: Sequence[int]) -> None:
        """Put each item that is not in a bin yet, the heaviest first, into the lightest open bin without its owner."""
        missing = [wanted - placed for wanted, placed in zip(copies, self._placed(), strict=True)]
        open_bins = [(self._weights[at], at) for at, items in enumerate(self._items) if len(items) < self._capacity]
        heapq.heapify(open_bins)
        for owner in sorted(range(len(copies)), key=lambda owner: (-self._shares[owner], -copies[owner], owner)):
            for _ in range(missing[owner]):
                self._put((self._shares[owner], owner), open_bins)

    def _placed(self) -> list[int]:
        """Return the number of items of each owner in the bins."""
        placed = [0] * len(self._shares)
        for held in self._held:
            for owner in held:
                placed[owner] += 1
        return placed

    def _bins_with(self, owner: int) -> list[int]:
        return [at for at, held in enumerate(self._held) if owner in held]

    def _put(self, item: Item, open_bins: list[tuple[float, int]]) -> None:
        """Put the item into the lightest of the open bins, a heap, or exchange it if all of them hold its owner."""
        passed = []
        while open_bins and item[1] in self._held[open_bins[0][1]]:
            passed.append(heapq.heappop(open_bins))
        if open_bins:
            _, at = heapq.heappop(open_bins)
            self._add(at, item)
        else:
            _, at = passed.pop(0)
            self._put_apart(item, at)
        if len(self._items[at]) < self._capacity:
            heapq.heappush(open_bins, (self._weights[at], at))
        for entry in passed:
            heapq.heappush(open_bins, entry)

    def _put_apart(self, item: Item, at: int) -> None:
        """Put the item into a full bin without its owner, and one of that bin's items into bin `at` instead.

        There are both: an owner has no more copies than there are bins, and a full bin has an item more than `at`
        holds besides the owner.
        """
        _, there, other = min(
            (max(self._weights[at] + other[0], self._weights[there] - other[0] + item[0]), there, other)
            for there, held in enumerate(self._held)
            if item[1] not in held
            for other in self._items[there]
            if other[1] not in self._held[at]
        )
        self._remove(there, other)
        self._add(there, item)
        self._add(at, other)

    def balance(self, enough: float) -> None:
        """Swap items of the heaviest bin for lighter ones, until it is no heavier than `enough` or no swap helps."""
        for _ in range(_SWAPS_PER_ITEM * self._capacity * len(self._items)):
            here = self._weights.index(self.heaviest)
            swap = self._best_swap(here, enough) if self._weights[here] > enough else None
            if swap is None:
                return
            self._swap(here, *swap)

    def _best_swap(self, here: int, enough: float) -> tuple[Item, int, Item] | None:
        """Return the swap that leaves the heavier bin of the pair lightest, or the first that leaves it at `enough`."""
        weight = self._weights[here]
        best, found = weight * (1 - _GAIN), None
        for there in sorted(range(len(self._weights)), key=self._weights.__getitem__):
            # The heavier bin of the pair gets no lighter than their mean.
            if (weight + self._weights[there]) / 2 >= best or best <= enough:
                break
            for heavier, item, other in self._swaps(here, there):
                if heavier < best:
                    best, found = heavier, (item, there, other)
        return found

    def _swaps(self, here: int, there: int) -> Iterator[tuple[float, Item, Item]]:
        """Yield the best swap of each item of `here`, and the weight of the heavier bin after it."""
        weight, held = self._weights[here], self._held[here]
        gap = weight - self._weights[there]
        others = [item for item in self._items[there] if item[1] not in held]
        for item in self._items[here]:
            if item[1] in self._held[there] or item[0] <= others[0][0]:  # nothing lighter to get for it
                continue
            other = _nearest(others, item[0] - gap / 2)
            moved = item[0] - other[0]
            yield (weight - moved if moved < gap / 2 else weight - gap + moved), item, other

    def _swap(self, here: int, item: Item, there: int, other: Item) -> None:
        self._remove(here, item)
        self._remove(there, other)
        self._add(here, other)
        self._add(there, item)

    def _add(self, at: int, item: Item) -> None:
        insort(self._items[at], item)
        self._weights[at] += item[0]
        self._held[at].add(item[1])

    def _remove(self, at: int, item: Item) -> None:
        self._items[at].remove(item)
        self._weights[at] -= item[0]
        self._held[at].remove(item[1])


def _nearest(items: Sequence[Item], weight: float) -> Item:
    """Return the item whose weight is nearest. The items are sorted; there is at least one."""
    at = bisect_left(items, (weight,))
    if at == 0:
        return items[0]
    if at == len(items) or weight - items[at - 1][0] <= items[at][0] - weight:
        return items[at - 1]
    return items[at]
