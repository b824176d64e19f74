"""Which pool a request goes to, by the rules alone: a pure function of the plan and of what the request says."""

from typing import Literal

import msgspec

from baton.router.grid import Point
from baton.router.plan import Part

Reason = Literal["grid", "override"]


class Choice(msgspec.Struct, frozen=True):
    """A pool by its number, why it, and the cell of the grid that the request lies in."""

    pool: int
    reason: Reason
    cell: tuple[int, ...]


def select_pool(part: Part, point: Point, priority: int | None = None) -> Choice:
    """Return the pool for a request: that of its cell, unless the first override that has its priority says other."""
    cell = part.grid.cell_of(point)
    number = matching_override(part, priority)
    if number is not None:
        return Choice(part.overrides[number].pool, "override", cell)
    return Choice(part.grid.pool_of(cell), "grid", cell)


def matching_override(part: Part, priority: int | None) -> int | None:
    """Return which override has `priority`, the first of several; None if none has, as for a request without one."""
    if priority is not None:
        for number, override in enumerate(part.overrides):
            if override.low <= priority <= override.high:
                return number
    return None
