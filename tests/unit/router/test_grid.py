"""Which pool a request goes to: the rules, stated once more in the simplest words, hold for all grids and requests."""

import math
from collections.abc import Sequence
from fractions import Fraction
from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton.router.grid import AXES, Axis, Grid, Point
from baton.router.plan import Override, Part, Pool, Retry
from baton.router.retry import Candidate, choose, retry_order
from baton.router.select import Choice, matching_override, select_pool

# Bounds that lie on quarters, and steps between that do too: then floats are exact, and so is what must come out.
QUARTERS = st.integers(-400, 4000).map(lambda n: n / 4)
TARGETS = st.one_of(st.none(), QUARTERS)
PRIORITIES = st.one_of(st.none(), st.integers(-3, 6))


@st.composite
def axes(draw: st.DrawFn, name: str = "ttft_ms") -> Axis:
    low, step, buckets = draw(QUARTERS), draw(st.integers(1, 400)), draw(st.integers(1, 6))
    return Axis(name, low, low + step * buckets / 4, buckets)  # type: ignore[arg-type]


@st.composite
def parts(draw: st.DrawFn) -> Part:
    count = draw(st.integers(1, 4))
    pools = [Pool(name=f"p{n}", path=f"n.c.e{n}", priority=draw(st.integers(-2, 3))) for n in range(count)]
    names = draw(st.lists(st.sampled_from(AXES), unique=True, max_size=3))
    grid_axes = [draw(axes(name)) for name in names]
    size = math.prod(axis.buckets for axis in grid_axes)
    numbers = st.integers(0, count - 1)
    cells = draw(st.lists(numbers, min_size=size, max_size=size))
    bounds = st.tuples(st.integers(-3, 6), st.integers(-3, 6)).map(sorted)
    overrides = [Override(low, high, draw(numbers)) for low, high in draw(st.lists(bounds, max_size=3))]
    return Part(pools=tuple(pools), grid=Grid(tuple(grid_axes), tuple(cells)), overrides=tuple(overrides))


points = st.builds(Point, length=st.integers(0, 5000), context=st.integers(0, 9000), ttft_ms=TARGETS, itl_ms=TARGETS)


def bucket(axis: Axis, value: float | None) -> int:
    """Return the bucket whose bounds have the value between them, by looking at one after the other."""
    low, high = Fraction(axis.low), Fraction(axis.high)
    exact = (low + high) / 2 if value is None else Fraction(value)
    for n in range(axis.buckets):
        if exact < low + (n + 1) * (high - low) / axis.buckets:
            return n
    return axis.buckets - 1


def nested(cells: Sequence[int], sizes: Sequence[int]) -> object:
    """Return the cells as lists in lists, as a file has them."""
    if not sizes:
        return cells[0]
    share = len(cells) // sizes[0]
    return [nested(cells[n * share : (n + 1) * share], sizes[1:]) for n in range(sizes[0])]


@given(axes(), TARGETS)
def test_a_value_is_in_the_bucket_whose_bounds_have_it_between_them(axis: Axis, value: float | None) -> None:
    assert axis.index(value) == bucket(axis, value)


@given(axes())
def test_a_bucket_has_its_lower_bound_and_not_its_upper_one(axis: Axis) -> None:
    for n in range(axis.buckets):
        low, high = axis.bounds(n)
        assert axis.index(low) == n
        assert axis.index(high - 1 / 1024) == n
    assert axis.bounds(0)[0] == axis.low
    assert axis.bounds(axis.buckets - 1)[1] == axis.high


@given(axes(), st.floats(0, 1e9))
def test_what_lies_outside_is_in_the_first_or_the_last_bucket(axis: Axis, far: float) -> None:
    assert axis.index(axis.low - far) == 0
    assert axis.index(axis.high + far) == axis.buckets - 1


@given(axes(), st.floats())
def test_every_number_there_is_has_a_bucket(axis: Axis, value: float) -> None:
    assert 0 <= axis.index(value) < axis.buckets


@given(st.floats(0, 1e6), st.floats(0.001, 1e6), st.integers(1, 50), st.floats(-0.5, 1.5))
def test_rounding_moves_a_value_no_further_than_to_the_bound_next_to_it(
    low: float, width: float, buckets: int, share: float
) -> None:
    axis = Axis("itl_ms", low, low + width, buckets)
    value = low + width * share
    exact = (Fraction(value) - Fraction(axis.low)) * buckets / (Fraction(axis.high) - Fraction(axis.low))
    index, tolerance = axis.index(value), Fraction(1, 10**6)
    assert index == 0 or exact >= index - tolerance
    assert index == buckets - 1 or exact < index + 1 + tolerance


@given(axes())
def test_without_a_target_it_is_the_middle_bucket_or_the_upper_of_the_two(axis: Axis) -> None:
    assert axis.index(None) == axis.buckets // 2


def test_d33_an_explicit_zero_target_is_a_value() -> None:
    axis = Axis("ttft_ms", 0, 100, 2)
    assert (axis.index(0), axis.index(0.0), axis.index(None)) == (0, 0, 1)
    part = Part(
        pools=(Pool(name="fast", path="a.b.c", priority=0), Pool(name="slow", path="d.b.c", priority=1)),
        grid=Grid((axis,), (0, 1)),
    )
    assert select_pool(part, Point(length=0, context=0, ttft_ms=0)).pool == 0
    assert select_pool(part, Point(length=0, context=0)).pool == 1


@given(parts(), points, PRIORITIES)
def test_the_mapping_is_read_axis_by_axis_and_the_first_override_that_fits_wins(
    part: Part, point: Point, priority: int | None
) -> None:
    cell = tuple(bucket(axis, getattr(point, axis.name)) for axis in part.grid.axes)
    found: object = nested(part.grid.cells, [axis.buckets for axis in part.grid.axes])
    for n in cell:
        assert isinstance(found, list)
        found = found[n]
    fitting = [rule for rule in part.overrides if priority is not None and priority in range(rule.low, rule.high + 1)]
    expected = Choice(fitting[0].pool, "override", cell) if fitting else Choice(found, "grid", cell)  # type: ignore[arg-type]
    assert select_pool(part, point, priority) == expected
    number = matching_override(part, priority)
    assert (None if number is None else part.overrides[number]) == (fitting[0] if fitting else None)


@given(parts())
def test_every_cell_can_be_reached_and_has_its_own_entry(part: Part) -> None:
    cells = list(product(*(range(axis.buckets) for axis in part.grid.axes)))
    assert [part.grid.pool_of(cell) for cell in cells] == list(part.grid.cells)


@given(parts(), st.data(), st.booleans(), st.booleans())
def test_retries_go_to_faster_pools_from_the_next_faster_on_and_then_to_the_others(
    part: Part, data: st.DataObject, faster: bool, others: bool
) -> None:
    selected = data.draw(st.integers(0, len(part.pools) - 1))
    mine = part.pools[selected].priority
    # (kind, how far from ours, place in the plan): the selected one, faster ones, equal and slower ones
    keys = {
        n: (0 if n == selected else 1 if pool.priority < mine else 2, abs(pool.priority - mine), n)
        for n, pool in enumerate(part.pools)
    }
    allowed = {0} | ({1} if faster else set()) | ({2} if others else set())
    expected = sorted((n for n in keys if keys[n][0] in allowed), key=lambda n: keys[n])
    assert list(retry_order(part.pools, selected, Retry(faster=faster, others=others))) == expected


@pytest.mark.parametrize(
    ("priorities", "selected", "order"),
    [
        ([0, 1, 2], 2, [2, 1, 0]),
        ([0, 1, 2], 0, [0]),
        ([5, 0, 10], 2, [2, 0, 1]),
        ([10, 0, 5], 0, [0, 2, 1]),
        ([1, 1, 2, 1], 2, [2, 0, 1, 3]),
        ([1, 1], 1, [1]),
    ],
)
def test_retries_in_examples(priorities: list[int], selected: int, order: list[int]) -> None:
    pools = [Pool(name=str(n), path=str(n), priority=priority) for n, priority in enumerate(priorities)]
    assert list(retry_order(pools, selected, Retry(faster=True))) == order
    assert list(retry_order(pools, selected, Retry())) == [selected]


candidates = st.lists(st.tuples(st.sampled_from([None, "empty", "queue"]), st.booleans()), max_size=6).map(
    lambda pairs: [Candidate(n, skip, meets) for n, (skip, meets) in enumerate(pairs)]
)  # type: ignore[arg-type]


@given(candidates, st.booleans())
def test_no_pool_is_lost_and_none_that_cannot_take_requests_is_tried(given_: list[Candidate], adaptive: bool) -> None:
    order, skipped = choose(given_, adaptive)
    assert sorted(order) == [one.pool for one in given_ if one.skip is None]
    assert [(pool, why) for pool, why in skipped if why != "slow"] == [(c.pool, c.skip) for c in given_ if c.skip]


@given(candidates)
def test_without_adapting_the_order_stays(given_: list[Candidate]) -> None:
    order, skipped = choose(given_, adaptive=False)
    assert order == sorted(order)
    assert all(why != "slow" for _, why in skipped)


@given(candidates)
def test_adapting_puts_pools_that_meet_the_targets_first_and_keeps_the_order_otherwise(given_: list[Candidate]) -> None:
    order, skipped = choose(given_, adaptive=True)
    meets = {one.pool: one.meets for one in given_}
    assert order == sorted(order, key=lambda pool: (not meets[pool], pool))
    # Slow are those that would have come before the pool that is first now, if that meets the targets.
    first = order[0] if order else None
    late = [pool for pool in order if first is not None and meets[first] and pool < first]
    assert [pool for pool, why in skipped if why == "slow"] == late
