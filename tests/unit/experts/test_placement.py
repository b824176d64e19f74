"""Expert layouts: invariants, small examples, and the distance from the optimum."""

import itertools
from collections import Counter
from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton.errors import ConfigError
from baton.experts.packing import spread
from baton.experts.placement import Algorithm, Shape, measure, plan, rank_loads, resolve, trivial
from baton.experts.replication import replicate

Counts = list[list[float]]


@st.composite
def shapes(draw: st.DrawFn) -> Shape:
    """Any shape that divides: experts in equal groups, nodes among the divisors of groups."""
    nodes = draw(st.integers(1, 3))
    groups = nodes * draw(st.integers(1, 3))
    ranks = nodes * draw(st.integers(1, 3))
    experts = groups * draw(st.integers(1, 5))
    redundant = -experts % ranks + ranks * draw(st.integers(0, 3))
    return Shape(experts=experts, redundant=redundant, ranks=ranks, nodes=nodes, groups=groups)


@st.composite
def cases(draw: st.DrawFn) -> tuple[Shape, Counts]:
    shape = draw(shapes())
    load = st.one_of(st.integers(0, 3), st.integers(0, 10**9), st.floats(0, 1e6, allow_subnormal=False))
    row = st.lists(load.map(float), min_size=shape.experts, max_size=shape.experts)
    return shape, draw(st.lists(row, min_size=1, max_size=3))


def busiest(loads: list[float], row: list[int], shape: Shape) -> float:
    return max(rank_loads(loads, row, shape.ranks))


def ranks_of(row: list[int], shape: Shape) -> Iterator[list[int]]:
    for rank in range(shape.ranks):
        yield row[rank * shape.size : (rank + 1) * shape.size]


def splits_groups(row: list[int], shape: Shape) -> bool:
    homes: dict[int, set[int]] = {}
    for slot, expert in enumerate(row):
        group = expert * shape.groups // shape.experts
        homes.setdefault(group, set()).add(slot * shape.nodes // shape.physical)
    return any(len(nodes) > 1 for nodes in homes.values())


@pytest.mark.parametrize("algorithm", ["auto", "global", "hierarchical"])
@given(case=cases())
def test_every_expert_has_a_slot_and_every_slot_an_expert(algorithm: Algorithm, case: tuple[Shape, Counts]) -> None:
    shape, counts = case
    layout = plan(counts, shape, algorithm)
    assert len(layout) == len(counts)
    for row in layout:
        assert len(row) == shape.physical == shape.ranks * shape.size
        assert set(row) == set(range(shape.experts))


@pytest.mark.parametrize("algorithm", ["auto", "global", "hierarchical"])
@given(case=cases())
def test_copies_of_an_expert_are_on_different_ranks_if_possible(
    algorithm: Algorithm, case: tuple[Shape, Counts]
) -> None:
    shape, counts = case
    # Hierarchical layouts use the experts of one node only; a rank with more slots than experts must repeat some.
    experts = shape.experts if resolve(shape, algorithm) == "global" else shape.experts // shape.nodes
    if shape.size <= experts:
        for row in plan(counts, shape, algorithm):
            assert all(max(Counter(rank).values()) == 1 for rank in ranks_of(row, shape))


@pytest.mark.parametrize("algorithm", ["auto", "global"])
@given(case=cases())
def test_no_layer_is_worse_than_the_trivial_layout(algorithm: Algorithm, case: tuple[Shape, Counts]) -> None:
    shape, counts = case
    for loads, row in zip(counts, plan(counts, shape, algorithm), strict=True):
        assert busiest(loads, row, shape) <= busiest(loads, trivial(shape), shape)


@given(case=cases())
def test_hierarchical_keeps_each_group_on_one_node(case: tuple[Shape, Counts]) -> None:
    shape, counts = case
    for loads, row in zip(counts, plan(counts, shape, "hierarchical"), strict=True):
        if any(loads):
            assert not splits_groups(row, shape)


@given(case=cases())
def test_hierarchical_is_worse_than_trivial_only_if_trivial_splits_groups(case: tuple[Shape, Counts]) -> None:
    shape, counts = case
    for loads, row in zip(counts, plan(counts, shape, "hierarchical"), strict=True):
        start = trivial(shape)
        assert splits_groups(start, shape) or busiest(loads, row, shape) <= busiest(loads, start, shape)


@given(case=cases())
def test_plan_is_deterministic_and_independent_per_layer(case: tuple[Shape, Counts]) -> None:
    shape, counts = case
    layout = plan(counts, shape)
    assert plan(counts, shape) == layout
    assert plan([list(row) for row in reversed(counts)], shape) == layout[::-1]


@given(case=cases(), data=st.data())
def test_balance_does_not_depend_on_the_order_of_experts(case: tuple[Shape, Counts], data: st.DataObject) -> None:
    shape, counts = case
    loads = counts[0]
    order = data.draw(st.permutations(range(shape.experts)))
    one = spread(loads, shape.ranks, shape.size)
    other = spread([loads[expert] for expert in order], shape.ranks, shape.size)
    assert one.heaviest == pytest.approx(other.heaviest)


@pytest.mark.parametrize("algorithm", ["global", "hierarchical"])
@given(case=cases())
def test_no_layer_is_worse_than_greedy_packing_of_greedy_copies(
    algorithm: Algorithm, case: tuple[Shape, Counts]
) -> None:
    shape, counts = case
    for loads, row in zip(counts, plan(counts, shape, algorithm), strict=True):
        greedy = greedy_row(loads, shape) if algorithm == "global" else greedy_hierarchical_row(loads, shape)
        if any(loads) and all(max(Counter(rank).values()) == 1 for rank in ranks_of(greedy, shape)):
            assert busiest(loads, row, shape) <= busiest(loads, greedy, shape) * (1 + 1e-9)


def greedy_row(loads: list[float], shape: Shape) -> list[int]:
    """Copy the expert with the heaviest copies until all slots are used; put each copy into the lightest open rank."""
    copies = [1] * shape.experts
    while sum(copies) < shape.physical:
        copies[max(range(shape.experts), key=lambda expert: loads[expert] / copies[expert])] += 1
    shares = [load / count for load, count in zip(loads, copies, strict=True)]
    packed = greedy_packing([share for share, count in zip(shares, copies, strict=True) for _ in range(count)], shape)
    owners = [expert for expert, count in enumerate(copies) for _ in range(count)]
    return [owners[item] for rank in packed for item in rank]


def greedy_hierarchical_row(loads: list[float], shape: Shape) -> list[int]:
    """Put each group onto the lightest open node; then copy and pack the experts of each node."""
    size = shape.experts // shape.groups
    groups = [sum(loads[group * size : (group + 1) * size]) for group in range(shape.groups)]
    row = []
    for members in greedy_packing(groups, Shape(experts=shape.groups, ranks=shape.nodes)):
        experts = [group * size + member for group in members for member in range(size)]
        ranks = shape.ranks // shape.nodes
        node = Shape(experts=len(experts), redundant=ranks * shape.size - len(experts), ranks=ranks)
        row += [experts[owner] for owner in greedy_row([loads[expert] for expert in experts], node)]
    return row


def greedy_packing(weights: list[float], shape: Shape) -> list[list[int]]:
    """Return the items of each rank: each item, the heaviest first, goes to the lightest open rank."""
    ranks: list[list[int]] = [[] for _ in range(shape.ranks)]
    totals = [0.0] * shape.ranks
    for item in sorted(range(len(weights)), key=lambda item: -weights[item]):
        open_ranks = [rank for rank, content in enumerate(ranks) if len(content) < shape.size]
        lightest = min(open_ranks, key=totals.__getitem__)
        ranks[lightest].append(item)
        totals[lightest] += weights[item]
    return ranks


@given(
    loads=st.lists(st.integers(0, 100).map(float), min_size=1, max_size=8),
    extra=st.integers(0, 8),
    max_copies=st.integers(1, 6),
)
def test_replication_minimizes_the_heaviest_copy(loads: list[float], extra: int, max_copies: int) -> None:
    slots = min(len(loads) + extra, len(loads) * max_copies)
    copies = replicate(loads, slots, max_copies)
    assert sum(copies) == slots
    assert all(1 <= count <= max_copies for count in copies)
    heaviest = max(load / count for load, count in zip(loads, copies, strict=True))
    # Lighter copies would need more slots in total, or more copies of one owner than allowed.
    needed = [next((n for n in range(1, max_copies + 1) if load / n < heaviest), max_copies + 1) for load in loads]
    assert heaviest == 0 or sum(needed) > slots or max(needed) > max_copies


def best_possible(loads: list[float], shape: Shape) -> float:
    """Return the load of the busiest rank in the best layout, by brute force."""
    best = float("inf")
    choices = itertools.product(range(1, shape.ranks + 1), repeat=shape.experts)
    for copies in (choice for choice in choices if sum(choice) == shape.physical):
        shares = [load / count for load, count in zip(loads, copies, strict=True)]
        best = min(best, _best_packing(shares, list(copies), shape.ranks, shape.size, best))
    return best


def _best_packing(shares: list[float], left: list[int], ranks: int, size: int, bound: float) -> float:
    if ranks == 0:
        return 0.0
    best = bound
    for content in itertools.combinations([expert for expert, count in enumerate(left) if count], size):
        weight = sum(shares[expert] for expert in content)
        if weight < best:
            rest = [count - (expert in content) for expert, count in enumerate(left)]
            best = min(best, max(weight, _best_packing(shares, rest, ranks - 1, size, best)))
    return best


TINY = [
    Shape(experts=experts, redundant=redundant, ranks=ranks)
    for experts, redundant, ranks in [
        (4, 0, 2),
        (6, 0, 2),
        (6, 0, 3),
        (3, 1, 2),
        (5, 1, 2),
        (5, 1, 3),
        (4, 2, 3),
        (4, 2, 2),
    ]
]


@given(shape=st.sampled_from(TINY), data=st.data())
def test_busiest_rank_is_within_a_third_of_the_optimum(shape: Shape, data: st.DataObject) -> None:
    loads = data.draw(st.lists(st.integers(0, 50).map(float), min_size=shape.experts, max_size=shape.experts))
    [row] = plan([loads], shape)
    assert busiest(loads, row, shape) <= 4 / 3 * best_possible(loads, shape) + 1e-9


def test_hottest_expert_gets_the_extra_copy() -> None:
    # 90 becomes 45 and 45, on different ranks; 15 goes beside one and 10 beside the other.
    shape = Shape(experts=3, redundant=1, ranks=2)
    [row] = plan([[10, 90, 15]], shape)
    assert row == [1, 2, 0, 1]
    assert rank_loads([10, 90, 15], row, 2) == [60, 55]


def test_heaviest_expert_goes_to_the_lightest_rank() -> None:
    # 8 | 7, then 6 beside 7, then 5 beside 8: 13 and 13.
    shape = Shape(experts=4, ranks=2)
    [row] = plan([[8, 7, 6, 5]], shape)
    assert row == [0, 3, 1, 2]
    assert measure([[8, 7, 6, 5]], [row], 2).balancedness == 1.0


def test_swaps_improve_the_greedy_packing() -> None:
    # Greedy packing ends with 3 2 2 and 3 2 0; swapping a 3 and a 2 gives 2 2 2 and 3 3 0.
    shape = Shape(experts=6, ranks=2)
    [row] = plan([[3, 3, 2, 2, 2, 0]], shape)
    assert row == [2, 3, 4, 0, 1, 5]


def test_extra_copy_may_stay_idle() -> None:
    # Halving a 3 gives 3 + 1.5 and 1.5 + 0; copying the idle expert gives 3 + 0 twice.
    shape = Shape(experts=3, redundant=1, ranks=2)
    [row] = plan([[3, 0, 3]], shape)
    assert rank_loads([3, 0, 3], row, 2) == [3, 3]


def test_every_rank_gets_the_same_number_of_hot_copies() -> None:
    # 16 more copies of the hot experts make 21: 3 on some ranks and 2 on others, at least 8/5 + 8/4 + 8/4. With 5 of
    # the copies idle each rank has 2.
    loads = [8.0] * 5 + [0.0] * 27
    shape = Shape(experts=32, redundant=16, ranks=8)
    [row] = plan([loads], shape)
    assert {sum(expert < 5 for expert in rank) for rank in ranks_of(row, shape)} == {2}
    assert busiest(loads, row, shape) == pytest.approx(8 / 3 + 8 / 3)


def test_hot_groups_go_to_different_nodes() -> None:
    # Groups {0,1} and {2,3} are hot, {4,5} and {6,7} are not: each node gets one of either kind.
    loads = [50.0, 50, 40, 40, 1, 1, 2, 2]
    shape = Shape(experts=8, ranks=4, nodes=2, groups=4)
    [row] = plan([loads], shape)
    assert {expert // 2 for expert in row[:4]} == {0, 2}
    assert {expert // 2 for expert in row[4:]} == {1, 3}


def test_layer_without_load_keeps_the_trivial_layout() -> None:
    shape = Shape(experts=4, redundant=2, ranks=3, nodes=1)
    layout = plan([[0, 0, 0, 0], [9, 1, 1, 1]], shape)
    assert layout[0] == trivial(shape) == [0, 1, 2, 3, 0, 1]
    assert layout[1].count(0) == 3
    assert measure([[0, 0, 0, 0], [9, 1, 1, 1]], layout, 3).worst_layer == 1


def test_balancedness_is_mean_by_busiest_rank_averaged_over_layers() -> None:
    shape = Shape(experts=4, ranks=2)
    balance = measure([[3, 3, 1, 1], [1, 1, 1, 1]], [trivial(shape)] * 2, 2)
    assert balance.balancedness == pytest.approx((4 / 6 + 1) / 2)
    assert balance.peak == pytest.approx((6 / 4 + 1) / 2)
    assert (balance.worst, balance.worst_layer) == (pytest.approx(4 / 6), 0)


@pytest.mark.parametrize(
    ("nodes", "groups", "algorithm"),
    [(1, 4, "global"), (2, 4, "hierarchical"), (2, 3, "global"), (2, 0, "global")],
)
def test_auto_is_hierarchical_if_several_nodes_divide_the_groups(nodes: int, groups: int, algorithm: str) -> None:
    assert resolve(Shape(experts=12, ranks=4, nodes=nodes, groups=groups), "auto") == algorithm


@pytest.mark.parametrize(
    ("shape", "algorithm", "message"),
    [
        (Shape(experts=8, redundant=1, ranks=4), "auto", "use 0, 4, ... redundant"),
        (Shape(experts=8, ranks=4, nodes=3), "auto", "4 ranks cannot be divided over 3 nodes"),
        (Shape(experts=8, ranks=4, groups=3), "auto", "8 experts cannot be divided into 3 groups"),
        (Shape(experts=8, ranks=4, nodes=2), "hierarchical", "number of expert groups"),
        (
            Shape(experts=12, ranks=4, nodes=2, groups=3),
            "hierarchical",
            "3 expert groups cannot be divided over 2 nodes",
        ),
    ],
)
def test_impossible_shape_is_refused(shape: Shape, algorithm: Algorithm, message: str) -> None:
    with pytest.raises(ConfigError, match=message.replace(".", r"\.")):
        plan([[1.0] * shape.experts], shape, algorithm)
