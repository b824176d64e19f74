"""Layouts planned with a previous one: the same promises as without, and few slots that change."""

import itertools
import random
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton.errors import ConfigError
from baton.experts.moves import assign, keep_in_place, moved
from baton.experts.placement import Algorithm, Layout, Shape, plan, resolve, trivial
from tests.unit.experts.test_placement import Counts, busiest, cases, ranks_of, splits_groups

ALGORITHMS: list[Algorithm] = ["auto", "global", "hierarchical"]


@st.composite
def replanned(draw: st.DrawFn) -> tuple[Shape, Counts, Layout]:
    """A shape, counts, and a layout for other counts: planned, or the trivial one, or experts in any order."""
    shape, counts = draw(cases())
    kind = draw(st.sampled_from(["global", "hierarchical", "trivial", "shuffled"]))
    if kind == "trivial":
        return shape, counts, [trivial(shape) for _ in counts]
    if kind == "shuffled":
        return shape, counts, [draw(st.permutations(trivial(shape))) for _ in counts]
    load = st.integers(0, 1000).map(float)
    row = st.lists(load, min_size=shape.experts, max_size=shape.experts)
    other = draw(st.lists(row, min_size=len(counts), max_size=len(counts)))
    return shape, counts, plan(other, shape, "global" if kind == "global" else "hierarchical")


@pytest.mark.parametrize("algorithm", ALGORITHMS)
@given(case=replanned())
def test_no_more_slots_change_than_without_the_previous_layout(
    algorithm: Algorithm, case: tuple[Shape, Counts, Layout]
) -> None:
    shape, counts, previous = case
    with_it, without = plan(counts, shape, algorithm, previous), plan(counts, shape, algorithm)
    for loads, row, fresh, old in zip(counts, with_it, without, previous, strict=True):
        assert moved(row, old) <= moved(fresh, old)
        if any(loads):
            assert busiest(loads, row, shape) <= 1.001 * busiest(loads, fresh, shape)
            if algorithm != "hierarchical":
                assert busiest(loads, row, shape) <= busiest(loads, trivial(shape), shape)


@pytest.mark.parametrize("algorithm", ALGORITHMS)
@given(case=replanned())
def test_every_expert_has_a_slot_and_copies_are_on_different_ranks(
    algorithm: Algorithm, case: tuple[Shape, Counts, Layout]
) -> None:
    shape, counts, previous = case
    experts = shape.experts if resolve(shape, algorithm) == "global" else shape.experts // shape.nodes
    for loads, row in zip(counts, plan(counts, shape, algorithm, previous), strict=True):
        assert len(row) == shape.physical
        assert set(row) == set(range(shape.experts))
        if any(loads) and shape.size <= experts:
            assert all(max(Counter(rank).values()) == 1 for rank in ranks_of(row, shape))


@given(case=replanned())
def test_hierarchical_keeps_each_group_on_one_node(case: tuple[Shape, Counts, Layout]) -> None:
    shape, counts, previous = case
    for loads, row in zip(counts, plan(counts, shape, "hierarchical", previous), strict=True):
        if any(loads):
            assert not splits_groups(row, shape)


@pytest.mark.parametrize("algorithm", ALGORITHMS)
@given(case=cases())
def test_nothing_moves_if_the_counts_are_the_same(algorithm: Algorithm, case: tuple[Shape, Counts]) -> None:
    shape, counts = case
    layout = plan(counts, shape, algorithm)
    assert plan(counts, shape, algorithm, layout) == layout


@given(case=cases(), data=st.data())
def test_a_layout_with_ranks_and_slots_exchanged_is_recognized(case: tuple[Shape, Counts], data: st.DataObject) -> None:
    shape, counts = case
    [row] = plan(counts[:1], shape, "global")
    contents = [data.draw(st.permutations(rank)) for rank in ranks_of(row, shape)]
    previous = [expert for rank in data.draw(st.permutations(contents)) for expert in rank]
    assert keep_in_place(row, previous, shape.ranks, 1) == previous


def test_layer_without_load_stays_as_it_is() -> None:
    shape = Shape(experts=4, redundant=2, ranks=3)
    previous = [[3, 2, 1, 0, 2, 1]]
    assert plan([[0, 0, 0, 0]], shape, previous=previous) == previous


def test_small_changes_of_the_counts_move_few_experts() -> None:
    shape = Shape(experts=64, redundant=16, ranks=8)
    random_loads = random.Random(16)
    counts = [[1000.0 / (1 + expert) for expert in range(64)]]
    previous = plan(counts, shape)
    changed = [[load * random_loads.uniform(0.95, 1.05) for load in counts[0]]]
    with_it, without = plan(changed, shape, previous=previous), plan(changed, shape)
    assert 0 < moved(with_it[0], previous[0]) < moved(without[0], previous[0]) / 4


def test_moved_experts_take_the_slots_of_those_that_left() -> None:
    # Only 0 and 4 change ranks; every other expert keeps its slot.
    assert keep_in_place([4, 1, 2, 3, 0, 5, 6, 7], [3, 2, 1, 0, 7, 6, 5, 4], 2, 1) == [3, 2, 1, 4, 7, 6, 5, 0]


@given(
    matrix=st.integers(1, 5).flatmap(
        lambda size: st.lists(st.lists(st.integers(0, 6), min_size=size, max_size=size), min_size=size, max_size=size)
    )
)
def test_assignment_has_the_largest_sum(matrix: list[list[int]]) -> None:
    columns = assign(matrix)
    assert sorted(columns) == list(range(len(matrix)))
    best = max(
        sum(line[column] for line, column in zip(matrix, order, strict=True))
        for order in itertools.permutations(range(len(matrix)))
    )
    assert sum(line[column] for line, column in zip(matrix, columns, strict=True)) == best


@pytest.mark.parametrize(
    ("previous", "message"),
    [
        ([], "has 0 layers, and the counts have 1"),
        ([[0, 1, 2, 3, 0]], "layer 0 of the previous layout is not one of 4 experts in 6 slots"),
        ([[0, 1, 2, 2, 0, 1]], "layer 0 of the previous layout is not one of 4 experts"),
    ],
)
def test_previous_layout_of_another_shape_is_refused(previous: Layout, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        plan([[1.0, 2, 3, 4]], Shape(experts=4, redundant=2, ranks=3), previous=previous)
