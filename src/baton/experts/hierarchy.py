"""Hierarchical layouts: the experts of a group stay on one node. Knows nothing about previous layouts or files."""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from baton.experts.packing import Packing, lower_bound, spread
from baton.experts.replication import replicate

Groups = tuple[int, ...]
"""The groups of one node, in order."""

# Exchanges of groups between nodes: how many are made, and of how many the bounds are computed and the layouts planned.
_EXCHANGES = 8
_BOUNDED = 24
_PLANNED = 4
_GAIN = 1.001  # ratio of the busiest rank to its bound after an exchange that is worth planning


class NodePlan(NamedTuple):
    """The experts of each rank of a node, and the load of its busiest rank."""

    ranks: list[list[int]]
    busiest: float


class Exchange(NamedTuple):
    """A group of the busiest node for one of another node. `bound` is a lower bound for the busiest rank of both."""

    bound: float
    there: int
    new_here: Groups
    new_there: Groups


class Hierarchy:
    """Assigns groups to nodes, and plans each node on its own: `ranks` ranks of `size` slots each."""

    def __init__(self, loads: Sequence[float], groups: int, nodes: int, ranks: int, size: int) -> None:
        self._loads = loads
        self._per_group = len(loads) // groups
        self._weights = [sum(loads[start : start + self._per_group]) for start in range(0, len(loads), self._per_group)]
        self._nodes = nodes
        self._ranks = ranks
        self._size = size
        self._plans: dict[Groups, NodePlan] = {}

    def row(self) -> list[int]:
        """Return the expert in each slot, node by node."""
        best = min(self._assignments(), key=self._busiest)
        for _ in range(_EXCHANGES):
            better = self._exchange(best)
            if better is None:
                break
            best = better
        return [expert for groups in best for rank in self._plan(groups).ranks for expert in rank]

    def _assignments(self) -> Iterator[list[Groups]]:
        """Yield the groups of each node: by greedy packing, and the same after swaps that balance the nodes.

        The second is not always better: the busiest rank may be so because of one expert, whatever its node's load is.
        """
        packing = Packing(self._weights, self._nodes, len(self._weights) // self._nodes)
        packing.fill([1] * len(self._weights))
        yield [tuple(groups) for groups in packing.owners]
        packing.balance(0.0)
        yield [tuple(groups) for groups in packing.owners]

    def _exchange(self, nodes: list[Groups]) -> list[Groups] | None:
        """Return the groups of each node after an exchange that relieves the busiest node, if one is found."""
        here = max(range(len(nodes)), key=lambda node: self._plan(nodes[node]).busiest)
        busiest = self._plan(nodes[here]).busiest
        by_load = sorted(each for each in self._exchanges(nodes, here) if each.bound * _GAIN < busiest)
        bounded = sorted(self._bounded(each) for each in by_load[:_BOUNDED])
        for each in [each for each in bounded if each.bound * _GAIN < busiest][:_PLANNED]:
            if self._busiest([each.new_here, each.new_there]) < busiest:
                exchanged = list(nodes)
                exchanged[here], exchanged[each.there] = each.new_here, each.new_there
                return exchanged
        return None

    def _exchanges(self, nodes: list[Groups], here: int) -> Iterator[Exchange]:
        """Yield every exchange, bounded by the load of the two nodes."""
        totals = [sum(self._weights[group] for group in groups) for groups in nodes]
        for there, groups in enumerate(nodes):
            for one in nodes[here] if there != here else ():
                for other in groups:
                    moved = self._weights[one] - self._weights[other]
                    bound = max(totals[here] - moved, totals[there] + moved) / self._ranks
                    yield Exchange(bound, there, _replaced(nodes[here], one, other), _replaced(groups, other, one))

    def _bounded(self, exchange: Exchange) -> Exchange:
        """Return the exchange with a bound that takes single experts into account."""
        return exchange._replace(bound=max(self._bound(exchange.new_here), self._bound(exchange.new_there)))

    def _bound(self, groups: Groups) -> float:
        loads = [self._loads[expert] for expert in self._experts(groups)]
        slots = self._ranks * self._size
        if self._size >= len(loads):
            return sum(loads) / self._ranks
        return lower_bound(loads, replicate(loads, slots, self._ranks), self._ranks, self._size)

    def _busiest(self, nodes: Sequence[Groups]) -> float:
        return max(self._plan(groups).busiest for groups in nodes)

    def _plan(self, groups: Groups) -> NodePlan:
        if groups not in self._plans:
            self._plans[groups] = self._planned(groups)
        return self._plans[groups]

    def _planned(self, groups: Groups) -> NodePlan:
        experts = self._experts(groups)
        bins, heaviest = spread([self._loads[expert] for expert in experts], self._ranks, self._size)
        return NodePlan([[experts[owner] for owner in owners] for owners in bins], heaviest)

    def _experts(self, groups: Groups) -> list[int]:
        return [expert for group in groups for expert in range(group * self._per_group, (group + 1) * self._per_group)]


def _replaced(groups: Groups, old: int, new: int) -> Groups:
    return tuple(sorted(new if group == old else group for group in groups))
