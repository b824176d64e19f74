"""The decode step on a GPU as captured CUDA graphs: one launch a step instead of about thirty for each layer.

A graph has one shape, so batches are padded to powers of two, in rows and in blocks. Padding rows write to a block of
the cache that no sequence uses.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from baton.engines.torch.models.llama import Decodes, LlamaModel, Step

_MIN_BLOCKS = 16


class _Graph(NamedTuple):
    """One captured shape: `inputs` is token, index, rotary position and block table of each row.

    A replay writes `logits`.
    """

    inputs: Tensor
    logits: Tensor
    graph: torch.cuda.CUDAGraph


class DecodeGraphs:
    """Decodes like `NativeDecoder`, on a CUDA device. A shape is captured on its first use."""

    def __init__(self, model: LlamaModel, block: int, spare_block: int, device: torch.device) -> None:
        self._model = model
        self._block = block
        self._spare = spare_block
        self._device = device
        self._graphs: dict[tuple[int, int], _Graph] = {}
        self._pool: Any = None  # torch's handle of the memory that all graphs share

    def forward(self, tokens: list[int], indexes: list[int], positions: list[int], tables: list[list[int]]) -> Tensor:
        """Compute one token for each row, at its index in its sequence and with its rotary position.

        Returns float32 logits, which the next call may overwrite.
        """
        rows = _at_least(len(tokens), 1)
        blocks = _at_least(max(indexes) // self._block + 1, _MIN_BLOCKS)
        graph = self._graphs.get((rows, blocks)) or self._capture(rows, blocks)
        padded = [
            [token, index, position, *table[:blocks], *[self._spare] * (blocks - len(table))]
            for token, index, position, table in zip(tokens, indexes, positions, tables, strict=True)
        ]
        padded += [self._idle_row(blocks)] * (rows - len(padded))
        graph.inputs.copy_(torch.tensor(padded, dtype=torch.int64).pin_memory(), non_blocking=True)
        graph.graph.replay()
        return graph.logits[: len(tokens)]

    def forget(self) -> None:
        """Drop every graph, because memory has moved."""
        self._graphs.clear()
        self._pool = None

    def _idle_row(self, blocks: int) -> list[int]:
        return [0, 0, 0, *[self._spare] * blocks]

    def _capture(self, rows: int, blocks: int) -> _Graph:
        inputs = torch.tensor([self._idle_row(blocks)] * rows, dtype=torch.int64, device=self._device)
        warmup = torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]
        warmup.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(warmup):  # libraries initialise themselves on first use, which cannot be captured
            self._step(inputs)
        torch.cuda.current_stream(self._device).wait_stream(warmup)
        graph = torch.cuda.CUDAGraph()
        # Errors of this thread only: other threads may copy KV meanwhile, on their own streams.
        with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
            logits = self._step(inputs)
        self._pool = self._pool or graph.pool()
        self._graphs[rows, blocks] = captured = _Graph(inputs, logits, graph)
        return captured

    def _step(self, inputs: Tensor) -> Tensor:
        tokens, indexes, positions, tables = inputs[:, 0], inputs[:, 1], inputs[:, 2], inputs[:, 3:]
        offsets = torch.arange(self._block, device=self._device)
        slots = (tables.unsqueeze(2) * self._block + offsets).flatten(1)
        mask = torch.arange(slots.shape[1], device=self._device) <= indexes.unsqueeze(1)
        here = slots.gather(1, indexes.unsqueeze(1)).squeeze(1)
        # Beyond its index a row reads its first key again, so that a NaN in unused slots does not spread.
        slots = torch.where(mask, slots, slots[:, :1])
        step = Step(tokens, positions, here, [], Decodes(0, slots, mask[:, None, None, :]))
        return self._model.logits(self._model.forward(step))


def _at_least(count: int, minimum: int) -> int:
    """Return the smallest power of two that is at least `count`, and at least `minimum`."""
    return max(minimum, 1 << (count - 1).bit_length())
