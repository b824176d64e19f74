"""Pool selection and retry order: pure functions of the plan, of the request and of the state of the pools."""

from collections.abc import Iterable, Sequence
from typing import Literal, NamedTuple

import msgspec

from baton.router.grid import Point
from baton.router.plan import Pool, Retry, RolePlan

Reason = Literal["grid", "override"]
Skip = Literal["empty", "queue", "slow"]


class Choice(msgspec.Struct, frozen=True):
    """The number of the selected pool, what selected it, and the cell of the request."""

    pool: int
    reason: Reason
    cell: tuple[int, ...]


class Candidate(NamedTuple):
    """The current state of a pool: why it cannot accept a request, if so, and whether it meets the targets."""

    pool: int
    skip: Skip | None
    meets: bool


def select_pool(plan: RolePlan, point: Point, priority: int | None = None) -> Choice:
    """Return the pool of the first override that matches `priority`, or else the pool of the request's cell."""
    cell = plan.grid.cell_of(point)
    number = matching_override(plan, priority)
    if number is not None:
        return Choice(plan.overrides[number].pool, "override", cell)
    return Choice(plan.grid.pool_of(cell), "grid", cell)


def matching_override(plan: RolePlan, priority: int | None) -> int | None:
    """Return the number of the first override that includes `priority`. None matches no override."""
    if priority is not None:
        for number, override in enumerate(plan.overrides):
            if override.low <= priority <= override.high:
                return number
    return None


def retry_order(pools: Sequence[Pool], selected: int, retry: Retry) -> tuple[int, ...]:
    """Return the pools to try: the selected one, faster ones from the next faster on, then equal and slower ones.

    Pools of equal priority keep the order of the plan.
    """
    rank = pools[selected].priority
    order = [selected]
    if retry.faster:
        faster = (n for n, pool in enumerate(pools) if pool.priority < rank)
        order += sorted(faster, key=lambda n: -pools[n].priority)
    if retry.others:
        others = (n for n, pool in enumerate(pools) if pool.priority >= rank and n != selected)
        order += sorted(others, key=lambda n: pools[n].priority)
    return tuple(order)


def rank_candidates(candidates: Iterable[Candidate], adaptive: bool) -> tuple[list[int], list[tuple[int, Skip]]]:
    """Return the pools to try, best first, and the skipped pools with the reason.

    If adaptive, pools that meet the targets come first; otherwise the order does not change.
    """
    usable: list[Candidate] = []
    skipped: list[tuple[int, Skip]] = []
    for candidate in candidates:
        if candidate.skip is None:
            usable.append(candidate)
        else:
            skipped.append((candidate.pool, candidate.skip))
    if adaptive:
        first = next((index for index, candidate in enumerate(usable) if candidate.meets), 0)
        skipped += [(candidate.pool, "slow") for candidate in usable[:first]]
        usable.sort(key=lambda candidate: not candidate.meets)
    return [candidate.pool for candidate in usable], skipped
