"""Grids: each axis is divided into buckets, and each cell (one bucket of every axis) selects a pool."""

from typing import Literal

import msgspec

AxisName = Literal["length", "context", "ttft_ms", "itl_ms"]
AXES: tuple[AxisName, ...] = ("length", "context", "ttft_ms", "itl_ms")


class Axis(msgspec.Struct, frozen=True):
    """A range in equal, half-open buckets. Values outside belong to the first or the last bucket.

           low                    high
            │ bucket 0 │ bucket 1 │
    ─ ─ ─ ─ ┴──────────┴──────────┴ ─ ─ ─
    """

    name: AxisName
    low: float
    high: float
    buckets: int

    def index(self, value: float | None) -> int:
        """Return the bucket of `value`. None counts as the middle of the range; 0 is a value like any other."""
        if value is None:
            value = (self.low + self.high) / 2
        position = (value - self.low) / ((self.high - self.low) / self.buckets)
        if position >= self.buckets:
            return self.buckets - 1
        return int(position) if position > 0 else 0

    def bounds(self, index: int) -> tuple[float, float]:
        """Return the lower and the upper bound of bucket `index`."""
        step = (self.high - self.low) / self.buckets
        return self.low + index * step, self.low + (index + 1) * step


class Grid(msgspec.Struct, frozen=True):
    """The pool of each cell, in row-major order: the last axis varies fastest."""

    axes: tuple[Axis, ...]
    cells: tuple[int, ...]

    def cell_of(self, point: "Point") -> tuple[int, ...]:
        """Return the bucket on every axis."""
        return tuple([axis.index(getattr(point, axis.name)) for axis in self.axes])

    def pool_of(self, cell: tuple[int, ...]) -> int:
        """Return the number of the pool of `cell`."""
        offset = 0
        for axis, index in zip(self.axes, cell, strict=True):
            offset = offset * axis.buckets + index
        return self.cells[offset]


class Point(msgspec.Struct, frozen=True, kw_only=True):
    """The values of a request on the axes, by axis name. None is a target that the request does not set."""

    length: int
    context: int
    ttft_ms: float | None = None
    itl_ms: float | None = None
