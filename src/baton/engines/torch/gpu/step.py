"""Computes steps on a GPU without waiting for it: a step is started, and its tokens are read later.

A step with prompts is one pass over all of its rows. A step of decodes alone replays a captured graph, if the device
has them; such a step can be started before the host has the tokens of the one before (`start_next`).
"""

from collections import deque
from collections.abc import Callable
from itertools import groupby
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from baton.engines.torch.gpu.graphs import TOKEN_ON_DEVICE, Decoded, DecodeGraphs, bucket
from baton.engines.torch.gpu.inputs import PagedInputs
from baton.engines.torch.gpu.model import PagedLlama, PagedStep
from baton.engines.torch.gpu.prefill_attention import can_read_rows, tile_tokens
from baton.engines.torch.gpu.sampling import SampledCopy, can_sample, sample_on_device
from baton.engines.torch.gpu.tables import BlockTables, last_tokens, table_width
from baton.engines.torch.gpu.transfers import to_device
from baton.engines.torch.models.config import LlamaConfig
from baton.engines.torch.models.llama import Weights
from baton.engines.torch.models.sparse import Dispatch, RoutedLayer
from baton.engines.torch.sampling.vocabulary import find_peaks
from baton.engines.torch.scheduler import Batch, Chunk
from baton.engines.torch.sequence import Sequence
from baton.engines.torch.step_inputs import rotary_shift, rows_to_sample

_STEPS_AHEAD = 2  # of prompts without a token; more would delay what is urgent

Score = Callable[[list[Chunk], Callable[[range], Tensor]], None]
Record = Callable[[Callable[[], list[RoutedLayer]]], None]


class CacheShape(NamedTuple):
    """Blocks of `block` tokens, the number `spare` of one that no sequence has, and the longest `context`."""

    block: int
    spare: int
    context: int


class Outputs(NamedTuple):
    """The logits of `sequences`, in their order, and the rows of the block tables that they have."""

    logits: Tensor
    decoded: Decoded | None
    sequences: list[Sequence]
    table_rows: Tensor


class GpuStep:
    """One model on one device; used from one thread. At most `max_running` sequences are in a batch."""

    def __init__(
        self,
        config: LlamaConfig,
        weights: Weights,
        kv: Tensor,
        angles: tuple[Tensor, Tensor],
        cache: CacheShape,
        max_running: int,
        dispatch: Dispatch | None,
    ) -> None:
        device = kv.device
        self._config = config
        self._device = device
        self._tables = BlockTables(max_running, table_width(cache.context, cache.block), cache.spare, device)
        self._last = last_tokens(self._tables)
        self._model = PagedLlama(
            config, weights, kv, *angles, self._tables.tensor, cache.block, bucket(max_running), dispatch
        )
        self._inputs = PagedInputs(config, self._tables, kv.dtype, device)
        tile = tile_tokens(config.heads, config.kv_heads)
        self._graphs = (
            DecodeGraphs(self._model, self._last, self._tables.spare_row, tile) if device.type == "cuda" else None
        )
        self._unread: deque[torch.cuda.Event] = deque()
        self._max_running = max_running

    def warm_up(self) -> None:
        """Compile the kernels and capture the graphs, so that no request waits for it. Raises TritonError."""
        row, zero = torch.full((2,), self._tables.spare_row), torch.zeros(2)
        tokens, rows, indexes = torch.stack((zero, row, torch.arange(2))).to(torch.int32).to(self._device)
        tiles = torch.tensor([[0, 2, 2, 1]], dtype=torch.int32, device=self._device)
        for uncached in {0, int(can_read_rows(self._config.head_dim, self._device))}:
            self._model.forward(PagedStep(tokens, rows, indexes, indexes, tiles, uncached, 0))
        if self._graphs is not None and self._config.diffusion is None:
            self._graphs.capture(self._max_running)

    @property
    def overlaps(self) -> bool:
        """Whether `start_next` can be used: for models that decode token by token, on devices with graphs."""
        return self._graphs is not None and self._config.diffusion is None

    def compute(self, batch: Batch, score: Score, record: Record) -> Outputs | None:
        """Start a step; return the logits that it will have, None if no sequence gets a token.

        `score` is called with the prompts and a function that returns the logits of rows of the step, and `record` with
        one that returns the experts of all rows.
        """
        if self._graphs is None or batch.prefills:
            return self._compute_pass(batch, score, record)
        if self._config.diffusion is None:
            return self._decode(self._graphs, batch.decodes, record)
        return self._decode_blocks(self._graphs, batch.decodes, record)

    def compute_next(self, decodes: list[Chunk]) -> Outputs:
        """Start a step of sequences whose newest tokens the step before samples."""
        assert self._graphs is not None
        return self._decode(self._graphs, decodes, None)

    def can_sample(self, sequences: list[Sequence]) -> bool:
        """Whether `sample` can be used for all of these."""
        return can_sample(sequences)

    def sample(self, outputs: Outputs, ahead: int = 0) -> SampledCopy:
        """Sample on the device; `ahead` is how many tokens of each sequence the host does not have yet."""
        decoded = outputs.decoded or Decoded(outputs.logits, *find_peaks(outputs.logits))
        return sample_on_device(decoded, outputs.sequences, self._last, outputs.table_rows, ahead)

    def forget_graphs(self) -> None:
        """Capture again, because memory has moved."""
        if self._graphs is not None:
            self._graphs.forget()

    def _compute_pass(self, batch: Batch, score: Score, record: Record) -> Outputs | None:
        rows, chunks = rows_to_sample(batch)
        prepared = self._inputs.prepare(batch, rows, chunks)
        hidden = self._model.forward(prepared.step)
        record(lambda: self._model.routed)
        score(batch.prefills, lambda scored: self._model.logits(hidden[scored.start : scored.stop]))
        if not rows:
            self._limit_steps_ahead()
            return None
        logits = self._model.logits(hidden.index_select(0, prepared.sampled))
        return Outputs(logits, None, [chunk.sequence for chunk in chunks], prepared.table_rows)

    def _decode(self, graphs: DecodeGraphs, decodes: list[Chunk], record: Record | None) -> Outputs:
        """Compute one token of each sequence; without `record`, that which is not on the host yet."""
        sequences = [chunk.sequence for chunk in decodes]
        rows = self._tables.rows_of(sequences)
        self._tables.flush()
        starts = [chunk.start for chunk in decodes]
        if record is None:
            tokens = [TOKEN_ON_DEVICE] * len(decodes)
        else:
            tokens = [chunk.sequence.tokens[chunk.start] for chunk in decodes]
        positions = starts
        if any(sequence.media is not None for sequence in sequences):
            positions = [chunk.start + rotary_shift(chunk) for chunk in decodes]
        decoded, table_rows = graphs.decode(tokens, rows, starts, positions)
        if record is not None:
            record(lambda: graphs.routed)
        return Outputs(decoded.logits, decoded, sequences, table_rows)

    def _decode_blocks(self, graphs: DecodeGraphs, decodes: list[Chunk], record: Record) -> Outputs:
        """Compute the blocks of a diffusion language model; only some of their rows are sampled."""
        logits: list[Tensor] = []
        for unit, chunks in groupby(decodes, key=lambda chunk: chunk.sequence.unit):
            group = list(chunks)
            rows = np.repeat(self._tables.rows_of(chunk.sequence for chunk in group), [one.length for one in group])
            self._tables.flush()
            tokens, indexes = _tokens_of(group)
            hidden = graphs.forward(tokens, rows.tolist(), indexes, indexes, unit)
            record(lambda: graphs.routed)
            sampled = np.array(rows_to_sample(Batch([], group))[0], dtype=np.int32)
            logits.append(self._model.logits(hidden.index_select(0, to_device(sampled, self._device))))
        sequences = [chunk.sequence for chunk in decodes]
        every = logits[0] if len(logits) == 1 else torch.cat(logits)
        return Outputs(every, None, sequences, self._last[:0])

    def _limit_steps_ahead(self) -> None:
        """Wait for earlier steps that returned nothing to wait for."""
        if self._device.type == "cuda":
            event = torch.cuda.Event()  # type: ignore[no-untyped-call]
            event.record(torch.cuda.current_stream(self._device))
            self._unread.append(event)
            if len(self._unread) > _STEPS_AHEAD:
                self._unread.popleft().synchronize()


def _tokens_of(chunks: list[Chunk]) -> tuple[list[int], list[int]]:
    """Return the tokens of all chunks and their indexes."""
    tokens: list[int] = []
    indexes: list[int] = []
    for chunk in chunks:
        stop = chunk.start + chunk.length
        tokens += chunk.sequence.inputs(chunk.start, stop)
        indexes += range(chunk.start, stop)
    return tokens, indexes
