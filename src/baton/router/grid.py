"""Grids: each axis is cut into buckets, and each cell, one bucket of every axis, names a pool."""

from typing import Literal

import msgspec

AxisName = Literal["length", "context", "ttft_ms", "itl_ms"]
AXES: tuple[AxisName, ...] = ("length", "context", "ttft_ms", "itl_ms")


class Axis(msgspec.Struct, frozen=True):
    """A range in equal, half-open buckets; what lies outside counts as the first or the last of them.

           low                    high
            │ bucket 0 │ bucket 1 │
    ─ ─ ─ ─ ┴──────────┴──────────┴ ─ ─ ─
    """

    name: AxisName
    low: float
    high: float
    buckets: int

    def index(self, value: float | None) -> int:
        """Return the bucket of `value`; none given is the middle of the range, and 0 is a value."""
        if value is None:
            value = (self.low + self.high) / 2
        place = (value - self.low) / ((self.high - self.low) / self.buckets)
        if place >= self.buckets:
            return self.buckets - 1
        return int(place) if place > 0 else 0

    def bounds(self, index: int) -> tuple[float, float]:
        """Return where bucket `index` begins and where the next one does."""
        step = (self.high - self.low) / self.buckets
        return self.low + index * step, self.low + (index + 1) * step


class Grid(msgspec.Struct, frozen=True):
    """Which pool each cell names. `cells` has the last axis running fastest."""

    axes: tuple[Axis, ...]
    cells: tuple[int, ...]

    def cell_of(self, point: "Point") -> tuple[int, ...]:
        """Return the bucket on every axis."""
        return tuple([axis.index(getattr(point, axis.name)) for axis in self.axes])

    def pool_of(self, cell: tuple[int, ...]) -> int:
        """Return the number of the pool that `cell` names."""
        place = 0
        for axis, index in zip(self.axes, cell, strict=True):
            place = place * axis.buckets + index
        return self.cells[place]


class Point(msgspec.Struct, frozen=True, kw_only=True):
    """What a request says of itself, by the names of the axes. A target that it does not give is None."""

    length: int
    context: int
    ttft_ms: float | None = None
    itl_ms: float | None = None
