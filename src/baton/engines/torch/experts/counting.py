"""Counts of one forward pass: how often each slot was chosen, and what that is per expert and per rank.

Knows no model. On a GPU the choices are counted there, and only the counts are copied.
"""

from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from baton.experts.placement import Layout, Shape

Counts = npt.NDArray[np.int64]


class PassCounts(NamedTuple):
    """The use of slots, experts and ranks in one forward pass, a row per sparse layer.

    `balancedness` is mean load / maximum load of the ranks, as the mean of the layers with load; 1.0 without load.
    """

    slots: Counts
    experts: Counts
    ranks: Counts
    balancedness: float


class SlotCounter:
    """Counts passes with one layout. What depends on the layout alone is computed once."""

    def __init__(self, layout: Layout, shape: Shape) -> None:
        self._shape = shape
        self._layers = len(layout)
        rows = np.arange(self._layers, dtype=np.int64)[:, None]
        self._first_slots = rows * shape.physical
        self._experts = (rows * shape.experts + np.array(layout, dtype=np.int64)).ravel()

    def count(self, chosen: Tensor) -> PassCounts:
        """Return the counts of `chosen`, the slots of each sparse layer, row and choice."""
        shape, layers = self._shape, self._layers
        slots = self._count_slots(chosen)
        experts = np.bincount(self._experts, weights=slots.ravel(), minlength=layers * shape.experts)
        ranks = slots.reshape(layers, shape.ranks, shape.size).sum(2)
        return PassCounts(slots, experts.astype(np.int64).reshape(layers, -1), ranks, _balancedness(ranks))

    def _count_slots(self, chosen: Tensor) -> Counts:
        layers, physical = self._layers, self._shape.physical
        if chosen.device.type != "cpu":
            counts = torch.zeros((layers, physical), dtype=torch.int64, device=chosen.device)
            flat = chosen.flatten(1).long()
            on_host: Counts = counts.scatter_add_(1, flat, torch.ones_like(flat)).cpu().numpy()
            return on_host
        numbers = chosen.numpy().reshape(layers, -1) + self._first_slots
        return np.bincount(numbers.ravel(), minlength=layers * physical).reshape(layers, physical)


def _balancedness(ranks: Counts) -> float:
    if ranks.shape[1] == 1:
        return 1.0
    peaks = ranks.max(1)
    if not peaks.all():
        used = peaks > 0
        ranks, peaks = ranks[used], peaks[used]
    return float((ranks.mean(1) / peaks).mean()) if len(peaks) else 1.0
