"""The decode step on a GPU as captured CUDA graphs: one launch a step instead of about thirty for each layer.

A graph has one shape, so batches are padded to powers of two, in sequences and in KV blocks. Padding rows write to a
block of the cache that no sequence uses. A diffusion language model decodes as many tokens of a sequence at once as its
blocks have; that number is part of the shape.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from baton.engines.torch.models.llama import Decodes, LlamaModel, Step
from baton.engines.torch.models.sparse import RoutedLayer

_MIN_BLOCKS = 16


class _Graph(NamedTuple):
    """One captured shape: `inputs` is the tokens of each sequence, index and rotary position of the first, and blocks.

    A replay writes `output`, and `routed` in each sparse layer.
    """

    inputs: Tensor
    output: Tensor
    routed: list[RoutedLayer]
    graph: torch.cuda.CUDAGraph


class DecodeGraphs:
    """Decodes like `NativeDecoder`, on a CUDA device. A shape is captured on its first use."""

    def __init__(self, model: LlamaModel, block: int, spare_block: int, device: torch.device) -> None:
        self._model = model
        self._block = block
        self._spare = spare_block
        self._device = device
        self._graphs: dict[tuple[int, int, int], _Graph] = {}
        self._pool: Any = None  # torch's handle of the memory that all graphs share
        self._last: tuple[_Graph, int] | None = None

    def forward(
        self, tokens: list[list[int]], indexes: list[int], positions: list[int], tables: list[list[int]]
    ) -> Tensor:
        """Compute equally many tokens of each sequence, from an index and a rotary position on. They see each other.

        Returns, for each token, float32 logits if there is one of each sequence, and last hidden states if there are
        more. The next call may overwrite them.
        """
        width = len(tokens[0])
        count = _at_least(len(tokens), 1)
        blocks = _at_least(max(indexes) // self._block + 1, _MIN_BLOCKS)
        graph = self._graphs.get((count, blocks, width)) or self._capture(count, blocks, width)
        padded = [
            [*several, index, position, *table[:blocks], *[self._spare] * (blocks - len(table))]
            for several, index, position, table in zip(tokens, indexes, positions, tables, strict=True)
        ]
        padded += [self._idle(blocks, width)] * (count - len(padded))
        graph.inputs.copy_(torch.tensor(padded, dtype=torch.int64).pin_memory(), non_blocking=True)
        graph.graph.replay()
        self._last = graph, len(tokens) * width
        return graph.output[: len(tokens) * width]

    @property
    def routed(self) -> list[RoutedLayer]:
        """The experts and slots of each row of the last call, for each sparse layer."""
        assert self._last is not None
        graph, rows = self._last
        return [RoutedLayer(layer.experts[:rows], layer.slots[:rows]) for layer in graph.routed]

    def forget(self) -> None:
        """Drop every graph, because memory has moved."""
        self._last = None
        self._graphs.clear()
        self._pool = None

    def _idle(self, blocks: int, width: int) -> list[int]:
        return [*[0] * width, 0, 0, *[self._spare] * blocks]

    def _capture(self, count: int, blocks: int, width: int) -> _Graph:
        inputs = torch.tensor([self._idle(blocks, width)] * count, dtype=torch.int64, device=self._device)
        warmup = torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]
        warmup.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(warmup):  # libraries initialise themselves on first use, which cannot be captured
            self._step(inputs, width)
        torch.cuda.current_stream(self._device).wait_stream(warmup)
        graph = torch.cuda.CUDAGraph()
        # Errors of this thread only: other threads may copy KV meanwhile, on their own streams.
        with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
            output = self._step(inputs, width)
        self._pool = self._pool or graph.pool()
        self._graphs[count, blocks, width] = captured = _Graph(inputs, output, self._model.routed, graph)
        return captured

    def _step(self, inputs: Tensor, width: int) -> Tensor:
        tokens, indexes, positions, tables = inputs.tensor_split((width, width + 1, width + 2), dim=1)
        offsets, within = (torch.arange(size, device=self._device) for size in (self._block, width))
        slots = (tables.unsqueeze(2) * self._block + offsets).flatten(1)
        mask = torch.arange(slots.shape[1], device=self._device) < indexes + width
        here = slots.gather(1, indexes + within)
        # Beyond its last token a sequence reads its first key again, so that a NaN in unused slots does not spread.
        slots = torch.where(mask, slots, slots[:, :1])
        decodes = Decodes(0, slots, mask[:, None, None, :], width)
        step = Step(tokens.flatten(), (positions + within).flatten(), here.flatten(), [], [decodes])
        hidden = self._model.forward(step)
        return self._model.logits(hidden) if width == 1 else hidden


def _at_least(count: int, minimum: int) -> int:
    """Return the smallest power of two that is at least `count`, and at least `minimum`."""
    return max(minimum, 1 << (count - 1).bit_length())
