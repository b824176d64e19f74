"""Numbers of copies for expert layouts. Knows nothing about bins, nodes, groups or files.

All functions are deterministic: ties go to the heavier owner (an expert), then to the lower number.
"""

import heapq
from collections.abc import Iterator, Sequence

_HEAVY = (0.5, 0.25)  # shares of the heaviest copy from which on a copy counts as heavy
_FEW = (1, 2, 4, 8)


def replicate(loads: Sequence[float], slots: int, max_copies: int, idle: int = 0) -> list[int]:
    """Return the number of copies of each owner, `slots` in total: each next copy goes where a copy has the most load.

    The last `idle` copies go where a copy has the least load: since every slot must be filled, two equal loads, each
    beside an idle copy, can balance better than one of them halved. No owner gets more than `max_copies`. The caller
    ensures that len(loads) <= slots <= len(loads) * max_copies.
    """
    copies = [1] * len(loads)
    if max_copies > 1:
        _add_copies(loads, copies, slots - len(loads) - idle, max_copies, heaviest=True)
        _add_copies(loads, copies, idle, max_copies, heaviest=False)
    return copies


def _add_copies(loads: Sequence[float], copies: list[int], count: int, max_copies: int, *, heaviest: bool) -> None:
    if not count:
        return
    sign = -1 if heaviest else 1
    queue = [
        (sign * load / copies[owner], sign * load, owner)
        for owner, load in enumerate(loads)
        if copies[owner] < max_copies
    ]
    heapq.heapify(queue)
    for _ in range(count):
        _, load, owner = heapq.heappop(queue)
        copies[owner] += 1
        if copies[owner] < max_copies:
            heapq.heappush(queue, (load / copies[owner], load, owner))


def choices(loads: Sequence[float], slots: int, bins: int) -> Iterator[list[int]]:
    """Yield numbers of copies to try, `slots` in total and at most one for each bin, the most promising first."""
    first = replicate(loads, slots, bins)
    yield first
    for idle in _idle_copies(loads, first, slots - len(loads), bins):
        yield replicate(loads, slots, bins, idle)


def _idle_copies(loads: Sequence[float], copies: Sequence[int], extra: int, bins: int) -> list[int]:
    """Return numbers of extra copies to leave idle.

    Heavy copies balance if every bin gets the same number of them: the first to try are their numbers beyond that. A
    few idle copies also make a different packing, which may be a better one.
    """
    shares = [load / count for load, count in zip(loads, copies, strict=True)]
    beyond = [
        sum(count for share, count in zip(shares, copies, strict=True) if share >= part * max(shares)) % bins
        for part in _HEAVY
    ]
    return [idle for idle in dict.fromkeys([*beyond, *_FEW]) if 0 < idle <= extra]
