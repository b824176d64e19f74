"""Computes a step: a batch in, the next token of each sequence out. Knows tensors and nothing of requests.

On a CPU the native step (`native/`) computes the whole batch, if it can be compiled. On CPUs where torch is faster with
many rows, torch computes the prompts, and a step is two passes. On a GPU the kernels of `gpu/` compute everything, and
steps overlap. Otherwise torch computes everything.
"""

import logging
from collections import ChainMap
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from baton.config.directories import spill_directory
from baton.config.engines import ExpertOptions, TorchOptions
from baton.engines.torch.arena import Arena, arena_bytes, available_bytes, find_device, usable_cores, use_device
from baton.engines.torch.capacity import with_device_defaults
from baton.engines.torch.diffusion.candidates import decide
from baton.engines.torch.experts.routing import Routing, join_passes, stack_layers
from baton.engines.torch.experts.settings import ExpertSettings, resolve_experts
from baton.engines.torch.experts.slots import ExpertSlots
from baton.engines.torch.kv_memory import describe_kv
from baton.engines.torch.loader import Report, load_weights, tensor_names
from baton.engines.torch.models.config import LlamaConfig, read_llama_config
from baton.engines.torch.models.llama import (
    LlamaModel,
    Weights,
    carve_weights,
    named_parts,
    rotary_tables,
)
from baton.engines.torch.native.decoder import NativeDecoder
from baton.engines.torch.native.library import has_matrix_unit, load_decoder_library
from baton.engines.torch.pending import ComputedStep, PendingStep, Sampling, StartedStep
from baton.engines.torch.sampling.logprobs import prompt_logprobs
from baton.engines.torch.sampling.sampler import sample
from baton.engines.torch.scheduler import Batch, Chunk
from baton.engines.torch.sequence import Sequence
from baton.engines.torch.step_inputs import StepInputs, rows_to_sample
from baton.errors import ConfigError

if TYPE_CHECKING:
    from baton.engines.torch.gpu.step import GpuStep

log = logging.getLogger(__name__)

_LOGIT_ROWS = 128  # rows of logits at once for the logprobs of a prompt
_NO_EXPERT_OPTIONS = ExpertOptions()


class Runner:
    """One loaded model with its KV cache. Used from one thread.

    A mixture-of-experts model has `slots`, divided and filled as `experts` says. While `records_routing` is set, each
    step leaves its `routing`.

    `torch_prompts` makes torch compute prompts even with a native step; None decides by the CPU. `kernels` makes the
    kernels of `gpu/` compute all steps; None uses them on a GPU, if Triton can compile them. With `exports_kv` other
    processes can map the KV cache.
    """

    def __init__(
        self,
        options: TorchOptions,
        directory: Path,
        report: Report,
        torch_prompts: bool | None = None,
        exports_kv: bool = False,
        experts: ExpertOptions = _NO_EXPERT_OPTIONS,
        kernels: bool | None = None,
    ) -> None:
        spill_dir = spill_directory(options)
        self.config = read_llama_config(directory)
        self.records_routing = False
        self.routing: Routing | None = None
        self._routed: list[Routing] = []
        self.device = find_device(options.device)
        use_device(self.device)
        options = with_device_defaults(options, self.device)
        self.max_running = options.max_running
        self.dtype = torch.float32 if options.dtype == "float32" else torch.bfloat16
        self.threads = options.threads or usable_cores()
        torch.set_num_threads(self.threads)
        self.experts = resolve_experts(experts, self.config.experts, self.config.layers)
        self.weights_arena, self.weights = _carve(self.config, self.experts, self.dtype, self.device, spill_dir)
        self.slots = self._make_slots(self.experts)
        self.parts = self._named_parts()
        load_weights(directory, self.parts, report, tensor_names(self.config))
        self.weights_replaced()
        self._place_experts()
        self.context = min(options.context or self.config.context, self.config.context)
        self.block = self._block_size(options)
        self.blocks = options.blocks or self._affordable_blocks(options)
        blocks = self.blocks + (self.device.type == "cuda")  # a spare one, for the padding rows of captured graphs
        kv_shape = (self.config.layers, 2, blocks * self.block, self.config.kv_heads, self.config.head_dim)
        self.kv_arena = Arena(arena_bytes(kv_shape, self.dtype), self.device, spill_dir, shared=exports_kv)
        self.kv = self.kv_arena.carve(kv_shape, self.dtype)
        self.kv_memory = describe_kv(
            self.config, self.parts, self.kv, self.block, self.blocks, self.kv_arena.descriptor
        )
        cos, sin = rotary_tables(self.config, self._rotary_positions(), self.device)
        self._model = self._make_model(cos, sin)
        self._gpu = self._make_gpu_step(cos, sin, kernels)
        self._captured = self._addresses()
        self._native = self._make_native(cos, sin) if options.native else None
        if torch_prompts is None:
            torch_prompts = self._native is not None and self.dtype == torch.bfloat16 and has_matrix_unit()
        self._torch_prompts = torch_prompts
        self._inputs = StepInputs(self.block, self.dtype, self.device)

    @property
    def overlaps(self) -> bool:
        """Whether `start_next` can be used."""
        return self._gpu is not None and self._gpu.overlaps

    def start(self, batch: Batch) -> PendingStep:
        """Start to compute `batch` and to sample the next token of every sequence that has one.

        The KV of the batch is complete for every later step. A step may be computed when this returns.
        """
        self._routed = []
        if self._gpu is None:
            return ComputedStep(self._run(batch))
        outputs = self._gpu.compute(batch, self._score_prompts, lambda read: self._record(lambda: stack_layers(read())))
        self.routing = join_passes(self._routed)
        if outputs is None:
            return ComputedStep([])
        if self.config.diffusion is None and self._gpu.can_sample(outputs.sequences):
            return StartedStep(self._gpu.sample(outputs), outputs.sequences)
        return ComputedStep(self._sample(outputs.logits, outputs.sequences))

    def start_next(self, decodes: list[Chunk]) -> PendingStep:
        """Start a step of tokens that a started one samples, before that is waited for; `overlaps` is true."""
        assert self._gpu is not None
        outputs = self._gpu.compute_next(decodes)
        return StartedStep(self._gpu.sample(outputs, ahead=1), outputs.sequences)

    def _run(self, batch: Batch) -> Sampling:
        """Compute `batch` and sample the next token of every sequence that has one, or decide some of its block."""
        for_torch, for_native = self._divided(batch)
        logits: list[Tensor] = []
        sequences: list[Sequence] = []
        if for_torch.prefills or for_torch.decodes:
            self._use_threads(self.threads)
            sequences += self._run_torch(for_torch, logits)
        if self._native is not None and (for_native.prefills or for_native.decodes):
            # Threads that torch has used spin for a while, and would slow down the native step.
            self._use_threads(1)
            sequences += self._run_native(self._native, for_native, logits)
        self.routing = join_passes(self._routed)
        if not sequences:
            return []
        return self._sample(logits[0] if len(logits) == 1 else torch.cat(logits), sequences)

    def settle(self) -> None:
        """Return when all computed KV is in memory: a GPU may still be computing after a step."""
        if self.device.type == "cuda":
            torch.cuda.current_stream(self.device).synchronize()  # copies of transfers have streams of their own

    def weights_replaced(self) -> None:
        """Write new weights of experts to all their copies."""
        if self.slots is not None:
            self.slots.fill_copies()

    def rebind(self) -> None:
        """Take pointers again after an arena has been resumed."""
        if self._native is not None:
            self._native.bind(self.weights, self._paged())
        if self._gpu is not None and self._addresses() != self._captured:
            self._captured = self._addresses()
            self._gpu.forget_graphs()

    def _addresses(self) -> tuple[int, int]:
        """Return where weights and KV are, which captured graphs have in them."""
        return self.weights_arena.address, self.kv_arena.address

    def _sample(self, logits: Tensor, sequences: list[Sequence]) -> Sampling:
        diffusion = self.config.diffusion
        if diffusion is not None:
            return list(zip(sequences, decide(logits, sequences, diffusion.mask_token), strict=True))
        return list(zip(sequences, sample(logits, sequences), strict=True))

    def _use_threads(self, count: int) -> None:
        if torch.get_num_threads() != count:
            torch.set_num_threads(count)

    def _divided(self, batch: Batch) -> tuple[Batch, Batch]:
        """Return what torch computes of a batch, and what the native step does."""
        if self._native is None:
            return batch, Batch([], [])
        if self._torch_prompts:
            return Batch(batch.prefills, []), Batch([], batch.decodes)
        return Batch([], []), batch

    def _run_torch(self, batch: Batch, logits: list[Tensor]) -> list[Sequence]:
        """Add the logits of all sequences that get a next token to `logits`; return those sequences."""
        hidden = self._model.forward(self._inputs.step(batch.prefills, batch.decodes))
        self._record(lambda: stack_layers(self._model.routed))
        self._score_prompts(batch.prefills, lambda rows: self._model.logits(hidden[rows.start : rows.stop]))
        rows, chunks = rows_to_sample(batch)
        if rows:
            logits.append(self._model.logits(hidden[rows]))
        return [chunk.sequence for chunk in chunks]

    def _run_native(self, native: NativeDecoder, batch: Batch, logits: list[Tensor]) -> list[Sequence]:
        """As `_run_torch`."""
        native.records_routing = self.records_routing
        sequences = self._forward_native(native, batch, logits)
        self._record(lambda: Routing(*native.routing))
        return sequences

    def _forward_native(self, native: NativeDecoder, batch: Batch, logits: list[Tensor]) -> list[Sequence]:
        chunks = [self._inputs.rows(chunk) for chunk in (*batch.prefills, *batch.decodes)]
        if not batch.prefills and self.config.diffusion is None:
            logits.append(native.forward(chunks))
            return [chunk.sequence for chunk in batch.decodes]
        rows, sampled = rows_to_sample(batch)
        if any(chunk.sequence.scored for chunk in batch.prefills):
            native.forward(chunks, [])
            self._score_prompts(batch.prefills, lambda rows: native.score(list(rows)))
            logits.append(native.score(rows))
        else:
            logits.append(native.forward(chunks, rows))
        return [chunk.sequence for chunk in sampled]

    def _record(self, read: Callable[[], Routing]) -> None:
        """Keep the experts of the rows just computed, if they are wanted."""
        if self.records_routing and self.slots is not None:
            self._routed.append(read())

    def _score_prompts(self, prefills: list[Chunk], logits_of: Callable[[range], Tensor]) -> None:
        """Store the logprobs of prompts for requests that want them: the row of a token scores the next one."""
        first = 0
        for chunk in prefills:
            if chunk.sequence.scored:
                _score_chunk(chunk, first - chunk.start, logits_of)
            first += chunk.length

    def _named_parts(self) -> Mapping[str, Tensor]:
        """Return the target of each tensor; experts may move while new weights are gathered, and their targets too."""
        return ChainMap(named_parts(self.config, self.weights), self.slots.parts if self.slots else {})

    def _make_model(self, cos: Tensor, sin: Tensor) -> LlamaModel:
        dispatch = self.slots.dispatch if self.slots else None
        return LlamaModel(self.config, self.weights, self.kv, cos, sin, dispatch)

    def _make_slots(self, experts: ExpertSettings | None) -> ExpertSlots | None:
        if experts is None:
            return None
        return ExpertSlots(
            experts.shape,
            experts.sparse,
            [layer.experts for layer in self.weights.layers if layer.experts is not None],
            experts.dispatch == "dynamic",
            self.device,
        )

    def _place_experts(self) -> None:
        """Move the experts, loaded in order, to where the settings want them."""
        if self.slots is not None and self.experts is not None:
            for layer, row in enumerate(self.experts.layout):
                self.slots.place(layer, row)

    def _make_native(self, cos: Tensor, sin: Tensor) -> NativeDecoder | None:
        if self.device.type != "cpu" or self._gpu is not None or load_decoder_library() is None:
            return None
        return NativeDecoder(self.config, self.weights, self._paged(), cos, sin, self.threads, self.slots)

    def _make_gpu_step(self, cos: Tensor, sin: Tensor, kernels: bool | None) -> "GpuStep | None":
        on_gpu = self.device.type == "cuda"
        if not (on_gpu if kernels is None else kernels):
            return None
        try:
            from baton.engines.torch.gpu.compilation import find_problem, run_small_kernel
            from baton.engines.torch.gpu.step import CacheShape, GpuStep
        except ImportError as error:
            raise ConfigError(f"a GPU needs Triton, which comes with torch for CUDA: {error}") from error
        cache = CacheShape(self.block, self.blocks, self._rotary_positions())
        dispatch = self.slots.dispatch if self.slots else None
        step = GpuStep(self.config, self.weights, self.kv, (cos, sin), cache, self.max_running, dispatch)
        if on_gpu and (problem := find_problem(lambda: run_small_kernel(self.device), step.warm_up)) is not None:
            if kernels:
                raise ConfigError(f"the GPU's kernels are not available: {problem}")
            log.warning(
                "the GPU's kernels are not available (%s): torch computes instead, which is far slower", problem
            )
            return None
        return step

    def _paged(self) -> Tensor:
        layers, two, _, heads, size = self.kv.shape
        return self.kv.view(layers, two, self.blocks, self.block, heads, size)

    def _block_size(self, options: TorchOptions) -> int:
        """Return the tokens of a KV block: whole blocks of a diffusion language model."""
        diffusion = self.config.diffusion
        return options.block_size if diffusion is None else _round_up(options.block_size, diffusion.block_length)

    def _rotary_positions(self) -> int:
        """Return the number of rotary positions: the last block of a diffusion model may exceed the context."""
        return self.context if self.config.diffusion is None else _round_up(self.context, self.block)

    def _affordable_blocks(self, options: TorchOptions) -> int:
        """Return how many blocks fit the share of free memory; at most what `max_running` requests can fill."""
        config = self.config
        block_bytes = config.layers * 2 * self.block * config.kv_size * self.dtype.itemsize
        useful = options.max_running * -(-self.context // self.block)
        blocks = min(useful, int(available_bytes(self.device) * options.kv_memory_fraction) // block_bytes)
        if blocks < 1:
            raise ConfigError("there is no memory left for the KV cache; lower --context-length or --torch-max-running")
        return blocks


def _carve(
    config: LlamaConfig, experts: ExpertSettings | None, dtype: torch.dtype, device: torch.device, spill_dir: Path
) -> tuple[Arena, Weights]:
    """Return the memory for the weights, and the weights in it, without content."""
    slots = experts.shape.physical if experts is not None else 0
    sizes: list[int] = []

    def measure(shape: tuple[int, ...]) -> Tensor:
        sizes.append(arena_bytes(shape, dtype))
        return torch.empty(0)

    carve_weights(config, measure, slots)
    arena = Arena(sum(sizes), device, spill_dir, dense=True)
    carve: Callable[[tuple[int, ...]], Tensor] = lambda shape: arena.carve(shape, dtype)  # noqa: E731
    return arena, carve_weights(config, carve, slots)


def _score_chunk(chunk: Chunk, offset: int, logits_of: Callable[[range], Tensor]) -> None:
    """Add the logprobs of one chunk of a prompt; row `offset + position` of the step belongs to `position`."""
    sequence, top = chunk.sequence, chunk.sequence.params.prompt_logprobs or 0
    if chunk.start == 0:
        sequence.prompt_logprobs.clear()
    stop = min(chunk.start + chunk.length, sequence.prompt_length - 1)
    for start in range(chunk.start, stop, _LOGIT_ROWS):
        end = min(start + _LOGIT_ROWS, stop)
        logits = logits_of(range(offset + start, offset + end))
        sequence.prompt_logprobs.append(prompt_logprobs(logits, sequence.tokens[start + 1 : end + 1], top))


def _round_up(value: int, step: int) -> int:
    return -(-value // step) * step
