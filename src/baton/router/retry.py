"""Which pools may serve a request, best first: by their priorities, then by what they are like now. Pure functions."""

from collections.abc import Sequence
from typing import Literal, NamedTuple

from baton.router.plan import Pool, Retry

Skip = Literal["empty", "queue", "slow"]


def retry_order(pools: Sequence[Pool], selected: int, retry: Retry) -> tuple[int, ...]:
    """Return the pools to try: the selected one, faster ones from the next faster on, then equal and slower ones.

    Of pools with one priority the first in the plan comes first.
    """
    rank = pools[selected].priority
    faster = sorted((n for n, pool in enumerate(pools) if pool.priority < rank), key=lambda n: -pools[n].priority)
    others = sorted(
        (n for n, pool in enumerate(pools) if pool.priority >= rank and n != selected), key=lambda n: pools[n].priority
    )
    return (selected, *(faster if retry.faster else ()), *(others if retry.others else ()))


class Candidate(NamedTuple):
    """A pool as it is now: why it cannot take a request, if it cannot, and whether it meets the request's targets."""

    pool: int
    skip: Skip | None
    meets: bool


def choose(candidates: Sequence[Candidate], adaptive: bool) -> tuple[list[int], list[tuple[int, Skip]]]:
    """Return the pools to try, best first, and those passed over with the reason.

    When adaptive, pools that meet the targets come before those that do not; otherwise the order stays as it is.
    """
    usable = [one for one in candidates if one.skip is None]
    skipped: list[tuple[int, Skip]] = [(one.pool, one.skip) for one in candidates if one.skip is not None]
    if adaptive and any(one.meets for one in usable):
        first = next(place for place, one in enumerate(usable) if one.meets)
        skipped += [(one.pool, "slow") for one in usable[:first]]
        usable.sort(key=lambda one: not one.meets)
    return [one.pool for one in usable], skipped
