"""Plans expert layouts from use counts. Pure Python: no files, no tensors.

A layout has a row per layer and a column per physical slot: slots [r * size, (r + 1) * size) belong to rank r, and
ranks [n * ranks / nodes, (n + 1) * ranks / nodes) to node n. A cell is the logical expert in that slot.
"""

import math
from collections.abc import Sequence
from typing import Literal

import msgspec

from baton.errors import ConfigError
from baton.experts.hierarchy import Hierarchy
from baton.experts.moves import keep_in_place, moved
from baton.experts.packing import spread
from baton.experts.replanning import adapted

Algorithm = Literal["auto", "global", "hierarchical"]
Row = list[int]
Layout = list[Row]
Loads = Sequence[float]

_STAY = 1.001  # how much busier the busiest rank may be than in a new layout, so that fewer experts move


class Shape(msgspec.Struct, frozen=True, kw_only=True):
    """The numbers of experts, copies, ranks and nodes. `groups` is 0 if the model does not group experts."""

    experts: int
    redundant: int = 0
    ranks: int
    nodes: int = 1
    groups: int = 0

    @property
    def physical(self) -> int:
        """Slots of all ranks."""
        return self.experts + self.redundant

    @property
    def size(self) -> int:
        """Slots of one rank."""
        return self.physical // self.ranks


class Balance(msgspec.Struct, frozen=True, kw_only=True):
    """How evenly a layout spreads load over ranks, over all layers with load.

    Balancedness is the mean load of a rank divided by that of the busiest rank: 1 is perfect. `peak` is the mean of the
    inverse: how much longer the busiest rank computes than in a perfect layout.
    """

    balancedness: float
    peak: float
    worst: float
    worst_layer: int


def plan(
    counts: Sequence[Loads], shape: Shape, algorithm: Algorithm = "auto", previous: Layout | None = None
) -> Layout:
    """Return the layout for these counts, a row per layer. No layer has a busier rank than in the `trivial` layout.

    Two copies of an expert share a rank only if a rank has more slots than there are experts. `hierarchical` keeps the
    experts of a group on one node, even if a `trivial` layout that splits groups is better balanced. `auto` is
    hierarchical if the nodes divide the groups and balance allows it, and global otherwise.

    With the `previous` layout few slots get another expert: no more than without it, and none in a layer without load.
    The busiest rank of a layer is then at most 0.1% busier than without it. Raises ConfigError for an impossible shape.
    """
    check(shape, algorithm)
    if previous is None:
        return [_plan_layer(loads, shape, algorithm) for loads in counts]
    _check_previous(previous, len(counts), shape)
    return [_replan_layer(loads, shape, algorithm, row) for loads, row in zip(counts, previous, strict=True)]


def trivial(shape: Shape) -> Row:
    """Return the row that an engine starts with: experts in order, repeated to fill the slots."""
    return [slot % shape.experts for slot in range(shape.physical)]


def resolve(shape: Shape, algorithm: Algorithm) -> Literal["global", "hierarchical"]:
    """Return the algorithm that `auto` selects for this shape."""
    if algorithm != "auto":
        return algorithm
    return "hierarchical" if shape.nodes > 1 and shape.groups and shape.groups % shape.nodes == 0 else "global"


def rank_loads(loads: Loads, row: Row, ranks: int) -> list[float]:
    """Return the load of each rank. The copies of an expert share its load equally."""
    copies = [0] * len(loads)
    for expert in row:
        copies[expert] += 1
    size = len(row) // ranks
    return [
        math.fsum(loads[expert] / copies[expert] for expert in row[start : start + size])
        for start in range(0, len(row), size)
    ]


def measure(counts: Sequence[Loads], layout: Layout, ranks: int) -> Balance:
    """Return how evenly the layout spreads the counted load."""
    shares = {
        layer: _balancedness(rank_loads(loads, row, ranks))
        for layer, (loads, row) in enumerate(zip(counts, layout, strict=True))
        if any(loads)
    }
    if not shares:
        return Balance(balancedness=1.0, peak=1.0, worst=1.0, worst_layer=0)
    worst_layer = min(shares, key=shares.__getitem__)
    return Balance(
        balancedness=sum(shares.values()) / len(shares),
        peak=sum(1 / share for share in shares.values()) / len(shares),
        worst=shares[worst_layer],
        worst_layer=worst_layer,
    )


def _balancedness(loads: list[float]) -> float:
    return min(1.0, sum(loads) / len(loads) / max(loads))


def check(shape: Shape, algorithm: Algorithm) -> None:
    """Raise ConfigError for an impossible combination."""
    if shape.physical % shape.ranks:
        wanted = -shape.experts % shape.ranks
        raise ConfigError(
            f"{shape.experts} experts and {shape.redundant} redundant experts cannot be divided over"
            f" {shape.ranks} ranks: use {wanted}, {wanted + shape.ranks}, ... redundant experts"
        )
    if shape.ranks % shape.nodes:
        raise ConfigError(f"{shape.ranks} ranks cannot be divided over {shape.nodes} nodes")
    if shape.groups and shape.experts % shape.groups:
        raise ConfigError(f"{shape.experts} experts cannot be divided into {shape.groups} groups")
    if algorithm == "hierarchical" and not shape.groups:
        raise ConfigError("the hierarchical algorithm needs the number of expert groups: give --groups")
    if algorithm == "hierarchical" and shape.groups % shape.nodes:
        raise ConfigError(
            f"{shape.groups} expert groups cannot be divided over {shape.nodes} nodes: use the global algorithm"
        )


def _check_previous(previous: Layout, layers: int, shape: Shape) -> None:
    if len(previous) != layers:
        raise ConfigError(f"the previous layout has {len(previous)} layers, and the counts have {layers}")
    for layer, row in enumerate(previous):
        if len(row) != shape.physical or set(row) != set(range(shape.experts)):
            raise ConfigError(
                f"layer {layer} of the previous layout is not one of {shape.experts} experts in {shape.physical} slots"
            )


def _plan_layer(loads: Loads, shape: Shape, algorithm: Algorithm) -> Row:
    start = trivial(shape)
    if not any(loads):
        return start
    if resolve(shape, algorithm) == "hierarchical":
        row = _hierarchical(loads, shape)
        if not _better(start, row, loads, shape):
            return row
        if algorithm == "hierarchical":
            return start if _keeps_groups(start, shape) else row
    row = [expert for rank in spread(loads, shape.ranks, shape.size).bins for expert in rank]
    return start if _better(start, row, loads, shape) else row


def _replan_layer(loads: Loads, shape: Shape, algorithm: Algorithm, previous: Row) -> Row:
    if not any(loads):
        return list(previous)
    fresh = _plan_layer(loads, shape, algorithm)
    grouped = resolve(shape, algorithm) == "hierarchical" and _keeps_groups(fresh, shape)
    nodes = shape.nodes if grouped else 1
    near = _near_rows(loads, shape, previous, fresh, nodes) if _is_usable(previous, shape, grouped) else []
    rows = [keep_in_place(row, previous, shape.ranks, nodes) for row in (fresh, *near)]
    return min(rows, key=lambda row: moved(row, previous))


def _near_rows(loads: Loads, shape: Shape, previous: Row, fresh: Row, nodes: int) -> list[Row]:
    """Return rows that differ little from `previous`, and are balanced nearly as well as `fresh`."""
    load = _busiest(fresh, loads, shape)
    limit = max(load, min(_STAY * load, _busiest(trivial(shape), loads, shape)))
    if _busiest(previous, loads, shape) <= limit:
        return [previous]
    rows = adapted(previous, fresh, loads, shape.ranks, nodes, limit)
    return [row for row in rows if _busiest(row, loads, shape) <= limit]


def _is_usable(row: Row, shape: Shape, grouped: bool) -> bool:
    """Whether the row has no two copies of an expert on one rank, and if `grouped`, no group on two nodes."""
    ranks = (row[at : at + shape.size] for at in range(0, len(row), shape.size))
    return all(len(set(rank)) == shape.size for rank in ranks) and (not grouped or _keeps_groups(row, shape))


def _better(one: Row, other: Row, loads: Loads, shape: Shape) -> bool:
    return _busiest(one, loads, shape) < _busiest(other, loads, shape)


def _busiest(row: Row, loads: Loads, shape: Shape) -> float:
    return max(rank_loads(loads, row, shape.ranks))


def _hierarchical(loads: Loads, shape: Shape) -> Row:
    return Hierarchy(loads, shape.groups, shape.nodes, shape.ranks // shape.nodes, shape.size).row()


def _keeps_groups(row: Row, shape: Shape) -> bool:
    per_group, per_node = shape.experts // shape.groups, shape.physical // shape.nodes
    homes: dict[int, int] = {}
    return all(
        homes.setdefault(expert // per_group, slot // per_node) == slot // per_node for slot, expert in enumerate(row)
    )
