"""Random axes, plans and requests, and the rules of a grid in exact arithmetic."""

import math
from fractions import Fraction

from hypothesis import strategies as st

from baton.router.grid import AXES, Axis, Grid, Point
from baton.router.plan import Override, Pool, RolePlan

# Bounds and bucket widths are multiples of 1/4, so that float arithmetic is exact.
QUARTERS = st.integers(-400, 4000).map(lambda n: n / 4)
TARGETS = st.one_of(st.none(), QUARTERS)
PRIORITIES = st.one_of(st.none(), st.integers(-3, 6))


@st.composite
def axes(draw: st.DrawFn, name: str = "ttft_ms") -> Axis:
    low, step, buckets = draw(QUARTERS), draw(st.integers(1, 400)), draw(st.integers(1, 6))
    return Axis(name, low, low + step * buckets / 4, buckets)  # type: ignore[arg-type]


@st.composite
def role_plans(draw: st.DrawFn) -> RolePlan:
    count = draw(st.integers(1, 4))
    pools = [Pool(name=f"p{n}", path=f"n.c.e{n}", priority=draw(st.integers(-2, 3))) for n in range(count)]
    names = draw(st.lists(st.sampled_from(AXES), unique=True, max_size=3))
    grid_axes = [draw(axes(name)) for name in names]
    size = math.prod(axis.buckets for axis in grid_axes)
    numbers = st.integers(0, count - 1)
    cells = draw(st.lists(numbers, min_size=size, max_size=size))
    bounds = st.tuples(st.integers(-3, 6), st.integers(-3, 6)).map(sorted)
    overrides = [Override(low, high, draw(numbers)) for low, high in draw(st.lists(bounds, max_size=3))]
    return RolePlan(pools=tuple(pools), grid=Grid(tuple(grid_axes), tuple(cells)), overrides=tuple(overrides))


points = st.builds(Point, length=st.integers(0, 5000), context=st.integers(0, 9000), ttft_ms=TARGETS, itl_ms=TARGETS)


def bucket(axis: Axis, value: float | None) -> int:
    """Return the bucket of a value by linear search over exact bounds."""
    low, high = Fraction(axis.low), Fraction(axis.high)
    exact = (low + high) / 2 if value is None else Fraction(value)
    for n in range(axis.buckets):
        if exact < low + (n + 1) * (high - low) / axis.buckets:
            return n
    return axis.buckets - 1
