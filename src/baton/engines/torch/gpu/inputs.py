"""The input of a forward pass on a GPU, from the chunks of a batch: made in one array, and copied at once."""

from itertools import chain
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from baton.engines.torch.embedded_rows import MediaRows
from baton.engines.torch.gpu.model import PagedStep
from baton.engines.torch.gpu.prefill_attention import can_read_rows, tile_tokens
from baton.engines.torch.gpu.tables import BlockTables
from baton.engines.torch.gpu.transfers import to_device
from baton.engines.torch.models.config import LlamaConfig
from baton.engines.torch.scheduler import Batch, Chunk
from baton.engines.torch.step_inputs import rotary_positions

_Tile = tuple[int, int, int, int]
"""See `prefill_attention.prefill`."""


class PreparedStep(NamedTuple):
    """A forward pass, the rows of it that give logits, and the table rows of the sequences that they belong to."""

    step: PagedStep
    sampled: Tensor
    table_rows: Tensor


class PagedInputs:
    """Makes the inputs of one model."""

    def __init__(self, config: LlamaConfig, tables: BlockTables, dtype: torch.dtype, device: torch.device) -> None:
        self._tables = tables
        self._tile = tile_tokens(config.heads, config.kv_heads)
        self._reads_rows = can_read_rows(config.head_dim, device)
        self._device = device
        self._media_rows = MediaRows(dtype, device)

    def prepare(self, batch: Batch, sampled: list[int], sampled_chunks: list[Chunk]) -> PreparedStep:
        """Return the input of a pass: prompts, then decodes. `sampled` are the rows of it that give logits."""
        chunks = [*batch.prefills, *batch.decodes]
        single = _single_tokens(batch.decodes)
        numbers = self._tables.rows_of(chunk.sequence for chunk in chunks)
        self._tables.flush()
        lengths = [chunk.length for chunk in chunks]
        tokens = list(chain.from_iterable(map(_tokens, chunks)))
        indexes = _indexes(chunks)
        positions = _rotary(chunks, indexes)
        uncached, cached = self._tiles(chunks[: len(chunks) - len(single)])
        tiles = uncached + cached
        row_of = dict(zip((chunk.sequence for chunk in chunks), numbers, strict=True))
        parts = [
            np.array(tokens),
            np.repeat(numbers, lengths),
            indexes,
            positions.ravel(),
            np.array(sampled),
            np.array([row_of[chunk.sequence] for chunk in sampled_chunks]),
            np.array(tiles).ravel(),
        ]
        packed = to_device(np.concatenate(parts).astype(np.int32), self._device)
        views = packed.split([len(part) for part in parts])  # type: ignore[no-untyped-call]
        step = PagedStep(
            tokens=views[0],
            rows=views[1],
            indexes=views[2],
            positions=views[3] if len(positions) == 1 else views[3].view(3, -1),
            tiles=views[6].view(-1, 4) if tiles else None,
            uncached=len(uncached),
            decodes=len(single),
            embedded=self._embedded(batch.prefills),
        )
        return PreparedStep(step, views[4], views[5])

    def _tiles(self, chunks: list[Chunk]) -> tuple[list[_Tile], list[_Tile]]:
        """Cut chunks into tiles: those with keys of the pass alone, and those that need cached ones.

        Those of a longer prompt follow each other.
        """
        uncached: list[_Tile] = []
        cached: list[_Tile] = []
        first = 0
        for chunk in chunks:
            end, unit = chunk.start + chunk.length, chunk.sequence.unit
            tiles = uncached if self._reads_rows and chunk.start == 0 else cached
            tiles += [
                (first + start, min(self._tile, chunk.length - start), end, unit)
                for start in range(0, chunk.length, self._tile)
            ]
            first += chunk.length
        return uncached, cached

    def _embedded(self, prefills: list[Chunk]) -> list[tuple[int, Tensor]]:
        found: list[tuple[int, Tensor]] = []
        first = 0
        for chunk in prefills:
            if chunk.sequence.media is not None:
                found += [(first + place, rows) for place, rows in self._media_rows.of(chunk)]
            first += chunk.length
        return found


def _single_tokens(decodes: list[Chunk]) -> list[Chunk]:
    """Return the decodes if each is one token; blocks of a diffusion language model are computed as prompts are."""
    return decodes if all(chunk.length == 1 for chunk in decodes) else []


def _indexes(chunks: list[Chunk]) -> "np.ndarray[Any, Any]":
    return np.concatenate([np.arange(chunk.start, chunk.start + chunk.length) for chunk in chunks])


def _tokens(chunk: Chunk) -> list[int]:
    return chunk.sequence.inputs(chunk.start, chunk.start + chunk.length)


def _rotary(chunks: list[Chunk], indexes: "np.ndarray[Any, Any]") -> "np.ndarray[Any, Any]":
    """Return rotary positions, [1, tokens] or [3, tokens]."""
    if all(chunk.sequence.media is None for chunk in chunks):
        return indexes.reshape(1, -1)
    return np.array(rotary_positions(chunks)).reshape(-1, len(indexes))
