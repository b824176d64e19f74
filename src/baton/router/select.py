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
    if priority is not None:
        for override in part.overrides:
            if override.low <= priority <= override.high:
                return Choice(override.pool, "override", cell)
    return Choice(part.grid.pool_of(cell), "grid", cell)
