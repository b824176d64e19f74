"""Grids: the bucket of a value and the pool of a cell, compared with exact arithmetic."""

from fractions import Fraction
from itertools import product

from hypothesis import given
from hypothesis import strategies as st

from baton.router.grid import Axis
from baton.router.plan import RolePlan
from tests.unit.router.grid_strategies import TARGETS, axes, bucket, role_plans


@given(axes(), TARGETS)
def test_value_is_in_the_bucket_whose_bounds_enclose_it(axis: Axis, value: float | None) -> None:
    assert axis.index(value) == bucket(axis, value)


@given(axes())
def test_bucket_includes_its_lower_bound_and_excludes_its_upper_bound(axis: Axis) -> None:
    for n in range(axis.buckets):
        low, high = axis.bounds(n)
        assert axis.index(low) == n
        assert axis.index(high - 1 / 1024) == n
    assert axis.bounds(0)[0] == axis.low
    assert axis.bounds(axis.buckets - 1)[1] == axis.high


@given(axes(), st.floats(0, 1e9))
def test_value_outside_the_axis_is_in_the_first_or_last_bucket(axis: Axis, far: float) -> None:
    assert axis.index(axis.low - far) == 0
    assert axis.index(axis.high + far) == axis.buckets - 1


@given(axes(), st.floats())
def test_every_float_has_a_bucket(axis: Axis, value: float) -> None:
    assert 0 <= axis.index(value) < axis.buckets


@given(st.floats(0, 1e6), st.floats(0.001, 1e6), st.integers(1, 50), st.floats(-0.5, 1.5))
def test_rounding_error_stays_within_the_nearest_bound(low: float, width: float, buckets: int, share: float) -> None:
    axis = Axis("itl_ms", low, low + width, buckets)
    value = low + width * share
    exact = (Fraction(value) - Fraction(axis.low)) * buckets / (Fraction(axis.high) - Fraction(axis.low))
    index, tolerance = axis.index(value), Fraction(1, 10**6)
    assert index == 0 or exact >= index - tolerance
    assert index == buckets - 1 or exact < index + 1 + tolerance


@given(axes())
def test_missing_target_is_in_the_middle_bucket_or_the_upper_of_two(axis: Axis) -> None:
    assert axis.index(None) == axis.buckets // 2


@given(role_plans())
def test_every_cell_has_its_own_entry(plan: RolePlan) -> None:
    cells = list(product(*(range(axis.buckets) for axis in plan.grid.axes)))
    assert [plan.grid.pool_of(cell) for cell in cells] == list(plan.grid.cells)
