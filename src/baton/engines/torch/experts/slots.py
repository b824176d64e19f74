"""Physical slots of the experts: which logical expert each holds, and which copy a token uses.

A sparse layer has `experts + redundant` slots in one tensor of each kind; rank r has the slots [r * size, (r + 1) *
size). Copies of an expert have equal weights, so tokens do not depend on the layout.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from baton.engines.torch.experts.copies import ASIDE, order_copies
from baton.engines.torch.models.sparse import Dispatch, ExpertWeights
from baton.experts.placement import Layout, Row, Shape, trivial


class ExpertSlots:
    """The slots of a loaded model, at first in the `trivial` layout. Used from the engine's thread.

    `parts` has the target of each expert tensor of the model's files: the first of its copies. After targets have been
    written, `fill_copies` writes the others. `dispatch` is changed in place, so native code and captured graphs, which
    keep its addresses, use a new layout from the next step on.
    """

    def __init__(
        self,
        shape: Shape,
        numbers: Sequence[int],
        weights: Sequence[ExpertWeights],
        dynamic: bool,
        device: torch.device,
    ) -> None:
        """`weights` are those of the sparse layers, whose `numbers` are in the names of their tensors."""
        self.shape = shape
        self.parts: dict[str, Tensor] = {}
        self._numbers = numbers
        self._weights = weights
        # Without redundant copies every key leads to the same slot.
        width = 1 if not shape.redundant else shape.redundant + 1 if dynamic else shape.ranks
        table = torch.zeros((len(weights), shape.experts, width), dtype=torch.int32, device=device)
        counts = torch.ones((len(weights), shape.experts), dtype=torch.int32, device=device)
        self.dispatch = Dispatch(table, counts, dynamic)
        self._layout: Layout = [trivial(shape) for _ in weights]
        for layer in range(len(weights)):
            self._use(layer)

    @property
    def layout(self) -> Layout:
        """The logical expert in each slot, a row for each sparse layer."""
        return [list(row) for row in self._layout]

    def place(self, layer: int, row: Row) -> None:
        """Give the sparse layer with this index the experts of `row`, and move their weights. Between two steps only.

        Raises ValueError, having changed nothing, unless each expert has a slot in `row` and each slot an expert.
        """
        if len(row) != self.shape.physical or set(row) != set(range(self.shape.experts)):
            raise ValueError(
                f"a row has {self.shape.physical} slots for {self.shape.experts} experts, each at least once"
            )
        copies = order_copies(self._layout[layer], row, self.shape.size)
        for matrices in (self._weights[layer].gate_up, self._weights[layer].down):
            aside = torch.empty_like(matrices[0]) if any(copy.target == ASIDE for copy in copies) else matrices[0]
            for source, target in copies:
                (aside if target == ASIDE else matrices[target]).copy_(aside if source == ASIDE else matrices[source])
        self._layout[layer] = list(row)
        self._use(layer)

    def fill_copies(self) -> None:
        """Copy the first copy of each expert to the others, after weights have been loaded or replaced."""
        for row, weights in zip(self._layout, self._weights, strict=True):
            first = _first_slots(row)
            for slot, expert in enumerate(row):
                if slot != first[expert]:
                    weights.gate_up[slot].copy_(weights.gate_up[first[expert]])
                    weights.down[slot].copy_(weights.down[first[expert]])

    def _use(self, layer: int) -> None:
        """Let dispatch and names follow the layout of a layer."""
        row, weights = self._layout[layer], self._weights[layer]
        copies: list[list[int]] = [[] for _ in range(self.shape.experts)]
        for slot, expert in enumerate(row):
            copies[expert].append(slot)
        width = self.dispatch.table.shape[2]
        chosen = (
            copies if self.dispatch.dynamic or not self.shape.redundant else [self._by_rank(slots) for slots in copies]
        )
        padded = [slots + slots[:1] * (width - len(slots)) for slots in chosen]
        self.dispatch.table[layer].copy_(torch.tensor(padded, dtype=torch.int32))
        self.dispatch.counts[layer].copy_(torch.tensor([len(slots) for slots in chosen], dtype=torch.int32))
        prefix = f"model.layers.{self._numbers[layer]}.mlp.experts."
        ffn = weights.down.shape[2]
        for expert, slots in enumerate(copies):
            gate_up = weights.gate_up[slots[0]]
            self.parts[f"{prefix}{expert}.gate_proj.weight"] = gate_up[:ffn]
            self.parts[f"{prefix}{expert}.up_proj.weight"] = gate_up[ffn:]
            self.parts[f"{prefix}{expert}.down_proj.weight"] = weights.down[slots[0]]

    def _by_rank(self, slots: list[int]) -> list[int]:
        """Return the slot that rows of each rank use: the first on that rank, or else each of the copies in turn."""
        own = {slot // self.shape.size: slot for slot in reversed(slots)}
        others = 0
        chosen = []
        for rank in range(self.shape.ranks):
            chosen.append(own.get(rank, slots[others % len(slots)]))
            others += rank not in own
        return chosen


def _first_slots(row: Row) -> dict[int, int]:
    return {expert: slot for slot, expert in reversed(list(enumerate(row)))}
