"""The experts of a sparse layer in torch: routing, the choice among copies, and one grouped product for all experts.

Experts lie in physical slots; a logical expert may have copies in several. No shape depends on which experts the rows
use, so the computation can be captured in a CUDA graph.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F  # noqa: N812 - the usual name

from baton.engines.torch.models.experts import ExpertShape

_GATHERED_ROWS = 64  # experts whose weights are gathered at once, where there is no grouped product
_ALIGNED_BYTES = 16  # rows of a grouped product begin at multiples of this


class ExpertWeights(NamedTuple):
    """The weights of a sparse layer: the router, a matrix of each kind for each slot, and the shared expert's gate."""

    router: Tensor
    gate_up: Tensor
    down: Tensor
    shared_gate: Tensor | None


class RoutedLayer(NamedTuple):
    """The logical experts of each row in one sparse layer, and the slots that computed them: [rows, per token]."""

    experts: Tensor
    slots: Tensor


class LayerDispatch(NamedTuple):
    """The slots of one layer, see `Dispatch`."""

    table: Tensor
    counts: Tensor
    dynamic: bool

    def slots(self, experts: Tensor, positions: Tensor) -> Tensor:
        """Return the slot of each expert of each row."""
        if self.table.shape[1] == 1:
            return self.table[experts, 0]
        keys = _occurrences(experts, len(self.table)) if self.dynamic else positions.unsqueeze(-1)
        return self.table[experts, keys % self.counts[experts]]


class Dispatch(NamedTuple):
    """Where the copies of each logical expert lie, int32: `table` [sparse layers, experts, width], `counts` [.., ..].

    The slot of an expert is `table[layer, expert, key % counts[layer, expert]]`. The key is the position of the row in
    its sequence, or, if `dynamic`, how often the expert was used before in the step.
    """

    table: Tensor
    counts: Tensor
    dynamic: bool

    def layer(self, index: int) -> LayerDispatch:
        """Return the slots of a sparse layer."""
        return LayerDispatch(self.table[index], self.counts[index], self.dynamic)


def carve_experts(
    shape: ExpertShape, hidden: int, slots: int, tensor: Callable[[tuple[int, ...]], Tensor]
) -> ExpertWeights:
    """Return the weights of a sparse layer without content, each created by `tensor(shape)`."""
    return ExpertWeights(
        router=tensor((shape.count, hidden)),
        gate_up=tensor((slots, 2 * shape.ffn, hidden)),
        down=tensor((slots, hidden, shape.ffn)),
        shared_gate=tensor((1, hidden)) if shape.shared_ffn else None,
    )


def mix_experts(
    shape: ExpertShape, weights: ExpertWeights, dispatch: LayerDispatch, h: Tensor, positions: Tensor
) -> tuple[Tensor, RoutedLayer]:
    """Return the weighted sum of each row's experts, and which they were."""
    scores = F.linear(h, weights.router).softmax(-1, dtype=torch.float32)
    shares, experts = scores.topk(shape.per_token)
    if shape.normalised:
        shares = shares / shares.sum(-1, keepdim=True)
    slots = dispatch.slots(experts, positions)
    product = _grouped if _has_grouped_product(weights) else _gathered
    out = product(weights, h, slots.flatten(), shape.per_token).view(*slots.shape, -1)
    return (out * shares.to(h.dtype).unsqueeze(-1)).sum(1), RoutedLayer(experts, slots)


def _occurrences(experts: Tensor, count: int) -> Tensor:
    """Return how often each expert occurs before, in the order of rows."""
    flat = experts.flatten()
    order = torch.argsort(flat, stable=True)
    before = _ends(flat, count) - _counts(flat, count)
    ranks = torch.arange(len(flat), device=flat.device) - before[flat[order]]
    return torch.empty_like(flat).index_copy_(0, order, ranks).view(experts.shape)


def _counts(values: Tensor, size: int) -> Tensor:
    counts = torch.zeros(size, dtype=torch.int64, device=values.device)
    return counts.index_add_(0, values, torch.ones_like(values, dtype=torch.int64))


def _ends(values: Tensor, size: int) -> Tensor:
    return _counts(values, size).cumsum(0)


def _has_grouped_product(weights: ExpertWeights) -> bool:
    """Whether torch multiplies groups of rows with a matrix each without waiting for their sizes."""
    widths = weights.gate_up.shape[2], weights.down.shape[2]
    if not hasattr(F, "grouped_mm") or any(width * weights.down.itemsize % _ALIGNED_BYTES for width in widths):
        return False
    if weights.down.device.type != "cuda":
        return True
    return weights.down.dtype == torch.bfloat16 and torch.cuda.get_device_capability(weights.down.device) >= (8, 0)


def _grouped(weights: ExpertWeights, h: Tensor, slots: Tensor, per_token: int) -> Tensor:
    """Sort the rows by slot, and multiply each group of rows with the matrices of its slot."""
    order = torch.argsort(slots, stable=True)
    ends = _ends(slots, len(weights.down)).to(torch.int32)
    rows = h[order // per_token]
    gate, up = F.grouped_mm(rows, weights.gate_up.transpose(1, 2), offs=ends).chunk(2, dim=-1)
    out = F.grouped_mm(F.silu(gate) * up, weights.down.transpose(1, 2), offs=ends)
    return torch.empty_like(out).index_copy_(0, order, out)


def _gathered(weights: ExpertWeights, h: Tensor, slots: Tensor, per_token: int) -> Tensor:
    """Multiply each row with a copy of the matrices of its slot, some rows at once."""
    rows = h.repeat_interleave(per_token, dim=0).unsqueeze(2)
    parts = [
        _networks(weights.gate_up[part], weights.down[part], rows[first : first + _GATHERED_ROWS])
        for first, part in zip(range(0, len(slots), _GATHERED_ROWS), torch.split(slots, _GATHERED_ROWS), strict=True)
    ]
    return torch.cat(parts).squeeze(2)


def _networks(gate_up: Tensor, down: Tensor, rows: Tensor) -> Tensor:
    gate, up = torch.bmm(gate_up, rows).chunk(2, dim=1)
    return torch.bmm(down, F.silu(gate) * up)
