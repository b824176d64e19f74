"""The decode step as captured CUDA graphs: one launch a step instead of a dozen for each layer.

A graph has one shape, so batches are padded to one of a few sizes. Padding rows use the spare row of the block tables.
Lengths and blocks of sequences are data: a graph serves every context. A diffusion language model decodes as many
tokens of a sequence at once as its blocks have; that number is part of the shape.
"""

from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from baton.engines.torch.gpu.model import PagedLlama, PagedStep
from baton.engines.torch.models.sparse import RoutedLayer
from baton.engines.torch.sampling.vocabulary import find_peaks

TOKEN_ON_DEVICE = -1
"""In place of a token that the step before samples."""

_INPUTS = 4  # tokens, table rows, indexes and rotary positions


class Decoded(NamedTuple):
    """What a pass of single tokens leaves for each: logits, the highest of them, and its token."""

    logits: Tensor
    peaks: Tensor
    best: Tensor


class _Graph(NamedTuple):
    """One captured shape. A replay reads `inputs` and `tiles`, and writes the hidden states, `decoded` and `routed`."""

    inputs: Tensor
    tiles: Tensor | None
    hidden: Tensor
    decoded: Decoded | None
    routed: list[RoutedLayer]
    graph: torch.cuda.CUDAGraph


class DecodeGraphs:
    """Captures a shape on its first use, if not before.

    `last` has the newest token of the sequence in each row of the tables.
    """

    def __init__(self, model: PagedLlama, last: Tensor, spare_row: int, tile: int) -> None:
        self._model = model
        self._last = last
        self._spare = spare_row
        self._tile = tile
        self._graphs: dict[tuple[int, int], _Graph] = {}
        self._pool: Any = None  # torch's handle of the memory that all graphs share
        self._used: tuple[_Graph, int] | None = None

    def decode(
        self, tokens: list[int], rows: list[int], indexes: list[int], positions: list[int]
    ) -> tuple[Decoded, Tensor]:
        """Compute one token of each sequence; return the result and `rows` on the device.

        The next call may overwrite them.
        """
        graph, count = self._replay(tokens, rows, indexes, positions, 1), len(tokens)
        assert graph.decoded is not None
        return Decoded(*(part[:count] for part in graph.decoded)), graph.inputs[1, :count]

    def forward(
        self, tokens: list[int], rows: list[int], indexes: list[int], positions: list[int], width: int
    ) -> Tensor:
        """Compute `width` tokens of each sequence, which see each other; return hidden states, as `decode` does."""
        return self._replay(tokens, rows, indexes, positions, width).hidden[: len(tokens)]

    def capture(self, sequences: int) -> None:
        """Capture the shapes of batches of up to so many sequences that decode a token each.

        The largest comes first: the others use its memory.
        """
        for count in sorted({bucket(count) for count in range(1, sequences + 1)}, reverse=True):
            self._capture(count, 1)

    @property
    def routed(self) -> list[RoutedLayer]:
        """The experts and slots of each row of the last call, for each sparse layer."""
        assert self._used is not None
        graph, rows = self._used
        return [RoutedLayer(layer.experts[:rows], layer.slots[:rows]) for layer in graph.routed]

    def forget(self) -> None:
        """Drop every graph, because memory has moved."""
        self._used = None
        self._graphs.clear()
        self._pool = None

    def _replay(
        self, tokens: list[int], rows: list[int], indexes: list[int], positions: list[int], width: int
    ) -> _Graph:
        count = bucket(len(tokens) // width) * width
        graph = self._graphs.get((count, width)) or self._capture(count, width)
        inputs = np.zeros((_INPUTS, count), dtype=np.int32)
        inputs[1] = self._spare
        inputs[:, : len(tokens)] = (tokens, rows, indexes, positions)
        graph.inputs.copy_(torch.from_numpy(inputs).pin_memory(), non_blocking=True)
        graph.graph.replay()
        self._used = graph, len(tokens)
        return graph

    def _capture(self, count: int, width: int) -> _Graph:
        device = self._last.device
        inputs = torch.zeros(_INPUTS, count, dtype=torch.int32, device=device)
        inputs[1] = self._spare
        tiles = None if width == 1 else self._tiles(count, width)
        warmup = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        warmup.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(warmup):  # kernels are compiled and libraries initialised, which cannot be captured
            self._step(inputs, tiles)
        torch.cuda.current_stream(device).wait_stream(warmup)
        graph = torch.cuda.CUDAGraph()
        # Errors of this thread only: other threads may copy KV meanwhile, on their own streams.
        with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
            hidden, decoded = self._step(inputs, tiles)
        self._pool = self._pool or graph.pool()
        self._graphs[count, width] = captured = _Graph(inputs, tiles, hidden, decoded, self._model.routed, graph)
        return captured

    def _step(self, inputs: Tensor, tiles: Tensor | None) -> tuple[Tensor, Decoded | None]:
        given, rows, indexes, positions = inputs
        tokens = torch.where(given == TOKEN_ON_DEVICE, self._last[rows], given)
        if tiles is not None:
            tiles = tiles.clone()
            tiles[:, 2] = indexes[tiles[:, 2]] + tiles[:, 3]
            return self._model.forward(PagedStep(tokens, rows, indexes, positions, tiles, 0, 0)), None
        hidden = self._model.forward(PagedStep(tokens, rows, indexes, positions, None, 0, len(tokens)))
        logits = self._model.logits(hidden)
        peaks, best = find_peaks(logits)
        self._last.index_copy_(0, rows.long(), best.to(torch.int32))
        return hidden, Decoded(logits, peaks, best)

    def _tiles(self, count: int, width: int) -> Tensor:
        """Return the tiles of blocks of `width` tokens; in place of its end, each has the first token of its block."""
        places = [
            (first + start, min(self._tile, width - start), first, width)
            for first in range(0, count, width)
            for start in range(0, width, self._tile)
        ]
        return torch.tensor(places, dtype=torch.int32, device=self._last.device)


def bucket(count: int) -> int:
    """Return the size of the graph for `count` sequences: powers of two at first, then closer to it."""
    if count <= 16:
        return 1 << (count - 1).bit_length()
    step = 16 if count <= 128 else 32 if count <= 256 else 64
    return -(-count // step) * step
