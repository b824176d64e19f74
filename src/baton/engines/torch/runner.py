"""The maths of a step: a batch in, the next token of each sequence out. Knows tensors and nothing of requests.

Prompts run in torch. On a CPU, sequences that decode run in the compiled step (`native/`) where there is one: then a
step is two passes, one over the prompts and one over the rest.
"""

import logging
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from baton.engines.torch.loader import Report, load_weights
from baton.engines.torch.memory import Arena, arena_bytes, available_bytes, usable_cores
from baton.engines.torch.models.config import LlamaConfig, read_llama_config
from baton.engines.torch.models.llama import (
    Decodes,
    LlamaModel,
    Span,
    Step,
    Weights,
    carve_weights,
    named_parts,
    rotary_tables,
)
from baton.engines.torch.native.build import load_decoder_library
from baton.engines.torch.native.decoder import NativeDecoder
from baton.engines.torch.options import TorchOptions
from baton.engines.torch.sampler import Sampled, prompt_logprobs, sample
from baton.engines.torch.scheduler import Batch, Chunk
from baton.engines.torch.sequence import Sequence
from baton.errors import BatonError, ConfigError

log = logging.getLogger(__name__)

Sampling = list[tuple[Sequence, Sampled | BatonError]]
_LOGIT_ROWS = 128  # rows of logits at once when a whole prompt wants them


class Runner:
    """One loaded model with its cache. Used from one thread."""

    def __init__(self, options: TorchOptions, directory: Path, report: Report) -> None:
        spill_dir = Path(options.spill_dir).expanduser()
        self.config = read_llama_config(directory)
        self.device = _device(options.device)
        self.dtype = torch.float32 if options.dtype == "float32" else torch.bfloat16
        self.threads = options.threads or usable_cores()
        torch.set_num_threads(self.threads)
        self.weights_arena, self.weights = _carve(self.config, self.dtype, self.device, spill_dir)
        self.parts = named_parts(self.config, self.weights)
        load_weights(directory, self.parts, report)
        self.context = min(options.context or self.config.context, self.config.context)
        self.block = options.block
        self.blocks = options.blocks or self._affordable_blocks(options)
        kv_shape = (self.config.layers, 2, self.blocks * self.block, self.config.kv_heads, self.config.head_dim)
        self.kv_arena = Arena(arena_bytes(kv_shape, self.dtype), self.device, spill_dir)
        self.kv = self.kv_arena.carve(kv_shape, self.dtype)
        cos, sin = rotary_tables(self.config, self.context, self.device)
        self._model = LlamaModel(self.config, self.weights, self.kv, cos, sin)
        self._native = self._make_native(cos, sin) if options.native else None

    def run(self, batch: Batch) -> Sampling:
        """Compute `batch` and choose the next token of every sequence that has one."""
        logits: list[Tensor] = []
        sequences: list[Sequence] = []
        native = self._native if batch.decodes else None
        if batch.prefills or native is None:
            self._use_threads(self.threads)
            step = self._step(batch.prefills, [] if native else batch.decodes)
            hidden = self._model.forward(step)
            self._score_prompts(batch.prefills, step, hidden)
            rows, sequences = _rows_to_sample(batch.prefills, [] if native else batch.decodes)
            if rows:
                logits.append(self._model.logits(hidden[rows]))
        if native is not None:
            logits.append(self._run_native(native, batch.decodes))
            sequences = sequences + [chunk.sequence for chunk in batch.decodes]
        if not sequences:
            return []
        if native is not None:
            # Threads that torch has used spin for a while, and would be in the way of the next compiled step.
            self._use_threads(1)
        scores = logits[0] if len(logits) == 1 else torch.cat(logits)
        return list(zip(sequences, sample(scores, sequences), strict=True))

    def rebind(self) -> None:
        """Take pointers again after an arena has been resumed."""
        if self._native is not None:
            self._native.bind(self.weights, self._paged())

    def _use_threads(self, count: int) -> None:
        if torch.get_num_threads() != count:
            torch.set_num_threads(count)

    def _run_native(self, native: NativeDecoder, decodes: list[Chunk]) -> Tensor:
        return native.forward(
            [chunk.sequence.tokens[-1] for chunk in decodes],
            [chunk.start for chunk in decodes],
            [chunk.sequence.blocks for chunk in decodes],
        )

    def _step(self, prefills: list[Chunk], decodes: list[Chunk]) -> Step:
        tokens: list[int] = []
        positions: list[int] = []
        slots: list[int] = []
        spans: list[Span] = []
        for chunk in prefills:
            stop = chunk.start + chunk.length
            places = self._slots(chunk.sequence.blocks, stop)
            spans.append(Span(len(tokens), chunk.length, chunk.start, self._tensor(places)))
            tokens += chunk.sequence.tokens[chunk.start : stop]
            positions += range(chunk.start, stop)
            slots += places[chunk.start :]
        first = len(tokens)
        for chunk in decodes:
            tokens.append(chunk.sequence.tokens[-1])
            positions.append(chunk.start)
            slots.append(chunk.sequence.blocks[chunk.start // self.block] * self.block + chunk.start % self.block)
        return Step(
            self._tensor(tokens),
            self._tensor(positions),
            self._tensor(slots),
            spans,
            self._decodes(first, decodes) if decodes else None,
        )

    def _decodes(self, first: int, decodes: list[Chunk]) -> Decodes:
        longest = max(chunk.start for chunk in decodes) + 1
        places = [self._slots(chunk.sequence.blocks, chunk.start + 1) for chunk in decodes]
        # Padding repeats a row of the sequence's own: masked or not, what is not a number there would spread.
        padded = [row + row[:1] * (longest - len(row)) for row in places]
        lengths = self._tensor([len(row) for row in places])
        mask = torch.arange(longest, device=self.device) < lengths.unsqueeze(1)
        return Decodes(first, self._tensor(padded), mask[:, None, None, :])

    def _slots(self, blocks: list[int], stop: int) -> list[int]:
        """Return the cache rows of tokens [0, stop)."""
        size = self.block
        return [slot for block in blocks for slot in range(block * size, block * size + size)][:stop]

    def _score_prompts(self, prefills: list[Chunk], step: Step, hidden: Tensor) -> None:
        """Keep log-probabilities of the prompt for those who asked: the row of a token scores the next one."""
        for chunk, span in zip(prefills, step.spans, strict=True):
            sequence = chunk.sequence
            top = sequence.plan.prompt_logprobs
            if top is None or sequence.index or sequence.generated:
                continue
            if chunk.start == 0:
                sequence.prompt_logprobs.clear()
            stop = min(chunk.start + chunk.length, sequence.prompt_length - 1)
            for start in range(chunk.start, stop, _LOGIT_ROWS):
                end = min(start + _LOGIT_ROWS, stop)
                row = span.first + start - chunk.start
                logits = self._model.logits(hidden[row : row + end - start])
                sequence.prompt_logprobs.append(prompt_logprobs(logits, sequence.tokens[start + 1 : end + 1], top))

    def _tensor(self, values: list[int] | list[list[int]]) -> Tensor:
        return torch.tensor(values, dtype=torch.int64, device=self.device)

    def _make_native(self, cos: Tensor, sin: Tensor) -> NativeDecoder | None:
        if self.device.type != "cpu" or load_decoder_library() is None:
            return None
        return NativeDecoder(self.config, self.weights, self._paged(), cos, sin, self.threads)

    def _paged(self) -> Tensor:
        layers, two, _, heads, size = self.kv.shape
        return self.kv.view(layers, two, self.blocks, self.block, heads, size)

    def _affordable_blocks(self, options: TorchOptions) -> int:
        """Return how many blocks fit the share of free memory; never more than everything that may run can fill."""
        config = self.config
        block_bytes = config.layers * 2 * self.block * config.kv_size * self.dtype.itemsize
        most = options.max_running * -(-self.context // self.block)
        blocks = min(most, int(available_bytes(self.device) * options.kv_share) // block_bytes)
        if blocks < 1:
            raise ConfigError("there is no memory left for the KV cache; lower --torch-context or --torch-max-running")
        return blocks


def _carve(config: LlamaConfig, dtype: torch.dtype, device: torch.device, spill_dir: Path) -> tuple[Arena, Weights]:
    """Return room for the weights, and the weights in it, without content."""
    sizes: list[int] = []

    def measure(shape: tuple[int, ...]) -> Tensor:
        sizes.append(arena_bytes(shape, dtype))
        return torch.empty(0)

    carve_weights(config, measure)
    arena = Arena(sum(sizes), device, spill_dir, dense=True)
    carve: Callable[[tuple[int, ...]], Tensor] = lambda shape: arena.carve(shape, dtype)  # noqa: E731
    return arena, carve_weights(config, carve)


def _rows_to_sample(prefills: list[Chunk], decodes: list[Chunk]) -> tuple[list[int], list[Sequence]]:
    """Return the row of the last token of each sequence that gets a next one, and those sequences."""
    rows: list[int] = []
    sequences: list[Sequence] = []
    first = 0
    for chunk in (*prefills, *decodes):
        first += chunk.length
        if chunk.last:
            rows.append(first - 1)
            sequences.append(chunk.sequence)
    return rows, sequences


def _device(name: str) -> torch.device:
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    device = torch.device(name)
    if device.type == "cuda" and not torch.cuda.is_available():
        raise ConfigError(f"--torch-device {name}: no CUDA device can be used here")
    return device
