"""The balancer without a model: when it moves experts, which, and what it reports."""

from collections.abc import Iterator

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from baton.engines.torch.experts.balancer import ExpertBalancer, Rebalance
from baton.engines.torch.experts.counting import PassCounts, SlotCounter
from baton.engines.torch.experts.limits import BalancerOptions
from baton.experts.placement import Layout, Row, Shape, trivial

SHAPE = Shape(experts=8, redundant=2, ranks=2)
LAYERS = 3


class Slots:
    """A placement that only remembers its layout, and each move."""

    def __init__(self, shape: Shape = SHAPE) -> None:
        self.layout: Layout = [trivial(shape) for _ in range(LAYERS)]
        self.placed: list[int] = []

    def place(self, layer: int, row: Row) -> None:
        self.layout[layer] = list(row)
        self.placed.append(layer)


class Driven:
    """A balancer whose passes use the experts that a test wants."""

    def __init__(self, options: BalancerOptions, shape: Shape = SHAPE) -> None:
        self.slots = Slots(shape)
        self.done: list[Rebalance] = []
        self.counted = 0
        self._shape = shape
        self._balancer = ExpertBalancer(self.slots, shape, options, self.done.append, iter_clock().__next__)

    def run(self, experts: list[int], passes: int = 1) -> None:
        """Run passes in which each layer uses these experts, in their first slots."""
        for _ in range(passes):
            counts = self._count(experts) if self._balancer.wants() else None
            self.counted += counts is not None
            self._balancer.after_pass(counts)

    def _count(self, experts: list[int]) -> PassCounts:
        chosen = [[[row.index(expert)] for expert in experts] for row in self.slots.layout]
        return SlotCounter(self.slots.layout, self._shape).count(torch.tensor(chosen, dtype=torch.int32))


def iter_clock() -> Iterator[float]:
    seconds = 0.0
    while True:
        yield seconds
        seconds += 1.0


SKEWED = [0, 1, 2, 3] * 4 + [5]


def test_experts_move_after_interval_passes_and_balance_better() -> None:
    driven = Driven(BalancerOptions(interval=4, window=4))
    driven.run(SKEWED, 3)
    assert driven.done == []
    driven.run(SKEWED)
    (done,) = driven.done
    assert driven.slots.placed == [0, 1, 2]
    assert done.after.balancedness > done.before.balancedness
    assert (done.skipped, done.seconds) == (False, 1.0)
    assert done.moved > 0
    driven.run(SKEWED, 4)
    assert len(driven.done) == 2
    assert driven.done[1].moved == 0


def test_layers_move_in_chunks_one_after_each_pass() -> None:
    driven = Driven(BalancerOptions(interval=2, window=2, layers_per_chunk=1))
    driven.run(SKEWED, 2)
    assert driven.slots.placed == [0]
    driven.run(SKEWED)
    assert driven.slots.placed == [0, 1]
    assert driven.done == []
    driven.run(SKEWED)
    assert driven.slots.placed == [0, 1, 2]
    assert len(driven.done) == 1
    assert driven.counted == 2


def test_only_the_window_before_a_rebalance_counts() -> None:
    driven = Driven(BalancerOptions(interval=10, window=2))
    driven.run([7], 8)
    assert driven.counted == 0
    driven.run(SKEWED, 2)
    assert driven.counted == 2
    assert driven.done[0].moved > 0


def test_a_well_used_layout_stays_above_the_threshold() -> None:
    driven = Driven(BalancerOptions(interval=2, window=2, utilization_threshold=0.4))
    driven.run(SKEWED, 2)
    (done,) = driven.done
    assert (done.skipped, done.moved, driven.slots.placed) == (True, 0, [])
    assert done.before == done.after
    strict = Driven(BalancerOptions(interval=2, window=2, utilization_threshold=0.9))
    strict.run(SKEWED, 2)
    assert not strict.done[0].skipped


def test_passes_without_load_change_nothing() -> None:
    driven = Driven(BalancerOptions(interval=1, window=1))
    driven.run([])
    assert driven.done[0].skipped
    assert driven.slots.placed == []


def test_approximate_counts_see_one_pass_in_eight_and_the_last() -> None:
    driven = Driven(BalancerOptions(interval=20, window=20, approximate=True))
    driven.run(SKEWED, 20)
    assert driven.counted == 3
    assert driven.done[0].moved > 0


@pytest.mark.parametrize("algorithm", ["auto", "hierarchical"])
def test_hierarchical_keeps_groups_on_a_node(algorithm: str) -> None:
    shape = Shape(experts=8, ranks=4, nodes=2, groups=4)
    driven = Driven(BalancerOptions(interval=1, window=1, algorithm=algorithm), shape)  # type: ignore[arg-type]
    driven.run([0, 0, 1, 1, 2, 4, 6])
    for row in driven.slots.layout:
        for group in range(4):
            members = {row.index(expert) * 2 // 8 for expert in (2 * group, 2 * group + 1)}
            assert len(members) == 1
    assert driven.done[0].after.balancedness > driven.done[0].before.balancedness


@given(
    st.lists(st.lists(st.integers(0, 7), max_size=12), min_size=1, max_size=12),
    st.integers(1, 3),
    st.integers(0, 3),
)
def test_any_traffic_leaves_every_expert_placed_and_no_layout_worse(
    passes: list[list[int]], interval: int, chunk: int
) -> None:
    driven = Driven(BalancerOptions(interval=interval, window=interval, layers_per_chunk=chunk))
    for experts in passes:
        driven.run(experts)
        for row in driven.slots.layout:
            assert set(row) == set(range(8))
            assert len(row) == SHAPE.physical
    for done in driven.done:
        assert done.after.worst >= done.before.worst - 1e-9
