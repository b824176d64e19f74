"""Layouts near a previous one: adapted to new loads by few changes. Knows nothing about groups or files."""

from collections import Counter
from collections.abc import Iterator, Sequence

from baton.experts.packing import Packing, shares_of
from baton.experts.replication import replicate


def adapted(
    previous: Sequence[int], fresh: Sequence[int], loads: Sequence[float], ranks: int, nodes: int, limit: float
) -> Iterator[list[int]]:
    """Yield rows that come from `previous` by swaps within a node, until no rank is busier than `limit`, if that works.

    First with the copies of `previous`, then with those of `fresh`, a row that was planned for these loads. The caller
    ensures that no rank of `previous` has two copies of an expert, and no two nodes have copies of the same expert.
    """
    per_node = len(previous) // nodes
    parts = [previous[start : start + per_node] for start in range(0, len(previous), per_node)]
    for source in (previous, fresh):
        copies = Counter(source)
        nodes_adapted = [_adapted_node(part, copies, loads, ranks // nodes, limit) for part in parts]
        row = [expert for node in nodes_adapted if node is not None for expert in node]
        if len(row) == len(previous):
            yield row


def _adapted_node(
    slots: Sequence[int], copies: Counter[int], loads: Sequence[float], ranks: int, limit: float
) -> list[int] | None:
    """Return the slots of one node after the swaps, or None if a rank is still busier than `limit`."""
    experts = sorted(set(slots))
    number = {expert: owner for owner, expert in enumerate(experts)}
    size = len(slots) // ranks
    own_loads = [loads[expert] for expert in experts]
    own_copies = [copies[expert] for expert in experts]
    if sum(own_copies) != len(slots):  # `fresh` has other experts on this node
        own_copies = replicate(own_loads, len(slots), ranks)
    packing = Packing(shares_of(own_loads, own_copies), ranks, size)
    packing.place([[number[expert] for expert in slots[at : at + size]] for at in range(0, len(slots), size)])
    packing.trim(own_copies)
    packing.fill(own_copies)
    packing.balance(limit)
    if packing.heaviest > limit:
        return None
    return [experts[owner] for owners in packing.owners for owner in owners]
