"""Pool selection and retry order, compared with simple restatements of the rules."""

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton.router.grid import Axis, Grid, Point
from baton.router.plan import Pool, Retry, RolePlan
from baton.router.select import Candidate, Choice, matching_override, rank_candidates, retry_order, select_pool
from tests.unit.router.grid_strategies import PRIORITIES, bucket, points, role_plans


def nested(cells: Sequence[int], sizes: Sequence[int]) -> object:
    """Return the cells as nested lists, as in a file."""
    if not sizes:
        return cells[0]
    share = len(cells) // sizes[0]
    return [nested(cells[n * share : (n + 1) * share], sizes[1:]) for n in range(sizes[0])]


def test_d33_explicit_zero_target_is_a_value() -> None:
    axis = Axis("ttft_ms", 0, 100, 2)
    assert (axis.index(0), axis.index(0.0), axis.index(None)) == (0, 0, 1)
    plan = RolePlan(
        pools=(Pool(name="fast", path="a.b.c", priority=0), Pool(name="slow", path="d.b.c", priority=1)),
        grid=Grid((axis,), (0, 1)),
    )
    assert select_pool(plan, Point(length=0, context=0, ttft_ms=0)).pool == 0
    assert select_pool(plan, Point(length=0, context=0)).pool == 1


@given(role_plans(), points, PRIORITIES)
def test_first_matching_override_takes_precedence_over_the_mapping(
    plan: RolePlan, point: Point, priority: int | None
) -> None:
    cell = tuple(bucket(axis, getattr(point, axis.name)) for axis in plan.grid.axes)
    found: object = nested(plan.grid.cells, [axis.buckets for axis in plan.grid.axes])
    for n in cell:
        assert isinstance(found, list)
        found = found[n]
    fitting = [rule for rule in plan.overrides if priority is not None and priority in range(rule.low, rule.high + 1)]
    expected = Choice(fitting[0].pool, "override", cell) if fitting else Choice(found, "grid", cell)  # type: ignore[arg-type]
    assert select_pool(plan, point, priority) == expected
    number = matching_override(plan, priority)
    assert (None if number is None else plan.overrides[number]) == (fitting[0] if fitting else None)


@given(role_plans(), st.data(), st.booleans(), st.booleans())
def test_retry_order_is_next_faster_pools_and_then_the_others(
    plan: RolePlan, data: st.DataObject, faster: bool, others: bool
) -> None:
    selected = data.draw(st.integers(0, len(plan.pools) - 1))
    rank = plan.pools[selected].priority

    def kind(n: int) -> str:
        if n == selected:
            return "selected"
        return "faster" if plan.pools[n].priority < rank else "others"

    allowed = {"selected": True, "faster": faster, "others": others}
    kinds = list(allowed)
    expected = sorted(
        (n for n in range(len(plan.pools)) if allowed[kind(n)]),
        key=lambda n: (kinds.index(kind(n)), abs(plan.pools[n].priority - rank), n),
    )
    assert list(retry_order(plan.pools, selected, Retry(faster=faster, others=others))) == expected


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
def test_retry_order_of_examples(priorities: list[int], selected: int, order: list[int]) -> None:
    pools = [Pool(name=str(n), path=str(n), priority=priority) for n, priority in enumerate(priorities)]
    assert list(retry_order(pools, selected, Retry(faster=True))) == order
    assert list(retry_order(pools, selected, Retry())) == [selected]


candidates = st.lists(st.tuples(st.sampled_from([None, "empty", "queue"]), st.booleans()), max_size=6).map(
    lambda pairs: [Candidate(n, skip, meets) for n, (skip, meets) in enumerate(pairs)]
)  # type: ignore[arg-type]


@given(candidates, st.booleans())
def test_every_available_pool_is_tried_and_every_other_is_skipped(given_: list[Candidate], adaptive: bool) -> None:
    order, skipped = rank_candidates(given_, adaptive)
    assert sorted(order) == [each.pool for each in given_ if each.skip is None]
    assert [(pool, why) for pool, why in skipped if why != "slow"] == [(c.pool, c.skip) for c in given_ if c.skip]


@given(candidates)
def test_order_does_not_change_unless_adaptive(given_: list[Candidate]) -> None:
    order, skipped = rank_candidates(given_, adaptive=False)
    assert order == sorted(order)
    assert all(why != "slow" for _, why in skipped)


@given(candidates)
def test_adaptive_order_puts_pools_that_meet_the_targets_first(given_: list[Candidate]) -> None:
    order, skipped = rank_candidates(given_, adaptive=True)
    meets = {each.pool: each.meets for each in given_}
    assert order == sorted(order, key=lambda pool: (not meets[pool], pool))
    # A pool is slow if a later pool that meets the targets is tried before it.
    first = order[0] if order else None
    slow = [pool for pool in order if first is not None and meets[first] and pool < first]
    assert [pool for pool, why in skipped if why == "slow"] == slow
