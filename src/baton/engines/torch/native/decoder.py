"""The native step for tensors: checks shapes once, passes pointers, reuses its buffers."""

import ctypes
import weakref
from array import array
from collections.abc import Iterable
from itertools import chain
from typing import NamedTuple

import torch
from torch import Tensor

from baton.engines.torch.experts.slots import ExpertSlots
from baton.engines.torch.models.config import LlamaConfig
from baton.engines.torch.models.llama import Layer, Weights, dense_ffn
from baton.engines.torch.native.library import Shape, load_decoder_library
from baton.engines.torch.prompt_media import RotaryPositions

PROBLEMS = {
    1: "a token is outside the vocabulary",
    2: "a position is outside the context",
    3: "a block is outside the KV cache",
    4: "out of memory",
    5: "a row is not of the step",
}


class EmbeddedRows(NamedTuple):
    """Rows of a chunk, from its row `first` on, that begin with `rows` instead of the embeddings of their tokens."""

    first: int
    rows: Tensor


class Rows(NamedTuple):
    """Consecutive tokens of one sequence, the first at index `start`. `table` has its blocks, up to the last token.

    The KV before `start` is in the cache. The rotary positions are the indexes plus a number, or three for each row.
    A row sees the tokens up to the end of its block of `block` tokens, as far as the chunk has them.
    """

    tokens: list[int]
    start: int
    table: list[int]
    positions: RotaryPositions = 0
    embedded: list[EmbeddedRows] = []
    block: int = 1


class NativeDecoder:
    """One step for many sequences, from tokens to logits, in one call without the GIL.

    A row's logits, keys and values are the same, bit for bit, alone and in any batch, in whichever chunks its prompt is
    computed, with any number of threads and in any layout of experts. Not for concurrent calls.

    The threads are divided over the ranks of `slots`: an expert is computed by the threads of its slot's rank alone.
    While `records_routing` is set, `routing` has the experts and slots of each row of the last `forward`.
    """

    def __init__(
        self,
        config: LlamaConfig,
        weights: Weights,
        kv: Tensor,
        cos: Tensor,
        sin: Tensor,
        threads: int,
        slots: ExpertSlots | None = None,
    ) -> None:
        """Raises RuntimeError where `load_decoder_library` gives None, ValueError for tensors it cannot use."""
        library = load_decoder_library()
        if library is None:
            raise RuntimeError("the native step is not available")
        if kv.dtype not in (torch.bfloat16, torch.float32):
            raise ValueError(f"weights and KV cache are bfloat16 or float32, not {kv.dtype}")
        if kv.dim() != 6:
            raise ValueError(f"the KV cache has six dimensions, not {kv.dim()}")
        self._config = config
        self._kv_shape = tuple(kv.shape)
        self._dtype = kv.dtype
        _check("cos", cos, torch.float32, (cos.shape[0], config.head_dim // 2))
        _check("sin", sin, torch.float32, (cos.shape[0], config.head_dim // 2))
        self._angles = cos, sin
        self._slots = slots
        self.records_routing = self._recorded = False
        self.routing = torch.empty(2, 0, 0, 0, dtype=torch.int32)
        if (config.experts is None) != (slots is None):
            raise ValueError("a model with experts has slots for them, and no other model has")
        shape = shape_of(config, kv, cos.shape[0], slots)
        handle = library.baton_decoder_new(ctypes.byref(shape), max(1, threads))
        if not handle:
            raise MemoryError("no memory for the native step")
        self._library = library
        self._handle = ctypes.c_void_p(handle)
        weakref.finalize(self, library.baton_decoder_free, self._handle)
        self._logits = torch.empty(0, config.vocab)
        self.bind(weights, kv)
        if slots is not None:
            table, counts, dynamic = slots.dispatch
            library.baton_decoder_dispatch(
                self._handle, table.data_ptr(), counts.data_ptr(), table.shape[2], int(dynamic)
            )

    def bind(self, weights: Weights, kv: Tensor) -> None:
        """Use these tensors from now on, and keep references to them. Values changed in place need no new call.

        Raises ValueError, and keeps the previous ones, unless they have the shapes of the model and the first KV cache.
        """
        slots = self._slots.shape.physical if self._slots else 0
        tensors = checked_tensors(self._config, weights, self._dtype, slots)
        _check("kv", kv, self._dtype, (self._config.layers, 2, *self._kv_shape[2:4], *self._heads()))
        self._held = weights, kv
        pointers = (ctypes.c_void_p * len(tensors))(*(None if t is None else t.data_ptr() for t in tensors))
        cos, sin = (angles.data_ptr() for angles in self._angles)
        self._library.baton_decoder_bind(self._handle, pointers, kv.data_ptr(), cos, sin)

    def forward(self, chunks: Iterable[Rows], wanted: list[int] | None = None) -> Tensor:
        """Write the keys and values of all rows into the cache; return float32 logits [len(wanted), vocabulary].

        Rows count from the first token of the first chunk; without `wanted` all have logits, which the next call
        overwrites. Raises ValueError, having done nothing, for a token, position, block or row out of range, and for
        embedded rows that do not fit the model.
        """
        count = total = 0
        packed: list[int] = []
        embedded: list[EmbeddedRows] = []
        for tokens, start, table, positions, begun, block in chunks:
            shift = positions if isinstance(positions, int) else 0
            spatial = () if isinstance(positions, int) else positions
            packed += (len(tokens), start, len(table), shift, bool(spatial), block)
            packed += table
            packed += tokens
            packed += chain.from_iterable(spatial)
            embedded += [EmbeddedRows(total + first, rows) for first, rows in begun]
            count += 1
            total += len(tokens)
        numbers = array("i", packed)
        pointers = self._pointers(embedded, total)
        rows, logits = self._output_for(wanted, total)
        self._record(total)
        self._raise_for(
            self._library.baton_decoder_forward(
                self._handle,
                count,
                numbers.buffer_info()[0],
                _address(pointers),
                len(logits),
                _address(rows),
                logits.data_ptr(),
            )
        )
        return logits

    def score(self, wanted: list[int]) -> Tensor:
        """Return logits of rows of the last `forward`, which succeeded. As with its own, the next call overwrites them.

        Raises ValueError for a row that was not there.
        """
        rows, logits = self._output_for(wanted, 0)
        self._raise_for(self._library.baton_decoder_score(self._handle, len(logits), _address(rows), logits.data_ptr()))
        return logits

    def _record(self, total: int) -> None:
        """Say where the experts of the next step are written, if they are wanted."""
        if self.records_routing and self._config.experts is not None:
            experts = self._config.experts
            self.routing = torch.empty(2, len(experts.layers), total, experts.per_token, dtype=torch.int32)
            chosen, slots = self.routing
            self._library.baton_decoder_record(self._handle, chosen.data_ptr(), slots.data_ptr())
            self._recorded = True
        elif self._recorded:
            self._library.baton_decoder_record(self._handle, None, None)
            self._recorded = False

    def _pointers(self, embedded: list[EmbeddedRows], total: int) -> "array[int] | None":
        """Return the address that each row of the step begins with, 0 for its token's; None if there are no others."""
        if not embedded:
            return None
        pointers = array("Q", bytes(8 * total))
        for first, rows in embedded:
            _check("embedded rows", rows, self._dtype, (len(rows), self._config.hidden))
            if first + len(rows) > total:
                raise ValueError(PROBLEMS[5])
            address, step = rows.data_ptr(), rows.stride(0) * rows.itemsize
            pointers[first : first + len(rows)] = array("Q", range(address, address + step * len(rows), step))
        return pointers

    def _output_for(self, wanted: list[int] | None, total: int) -> tuple["array[int] | None", Tensor]:
        count = total if wanted is None else len(wanted)
        if len(self._logits) < count:
            self._logits = torch.empty(count, self._config.vocab)
        return None if wanted is None else array("i", wanted), self._logits[:count]

    def _raise_for(self, status: int) -> None:
        if status:
            raise ValueError(PROBLEMS[status])

    def _heads(self) -> tuple[int, int]:
        return self._config.kv_heads, self._config.head_dim


def shape_of(config: LlamaConfig, kv: Tensor, context: int, slots: ExpertSlots | None) -> Shape:
    """Return the shape of a model as step.cpp takes it."""
    shape = Shape(
        layers=config.layers,
        hidden=config.hidden,
        ffn=config.ffn,
        heads=config.heads,
        kv_heads=config.kv_heads,
        head_dim=config.head_dim,
        vocab=config.vocab,
        context=context,
        blocks=kv.shape[2],
        block_size=kv.shape[3],
        is_bf16=kv.dtype == torch.bfloat16,
        time_pairs=config.spatial.sections[0] if config.spatial else 0,
        height_pairs=config.spatial.sections[1] if config.spatial else 0,
        ranks=1,
        eps=config.eps,
    )
    if config.experts is not None and slots is not None:
        shape.experts = config.experts.count
        shape.experts_per_token = config.experts.per_token
        shape.expert_ffn = config.experts.ffn
        shape.shared_ffn = config.experts.shared_ffn
        shape.normalised = config.experts.normalised
        shape.slots, shape.ranks = slots.shape.physical, slots.shape.ranks
    return shape


def _address(rows: "array[int] | None") -> int | None:
    return None if rows is None else rows.buffer_info()[0]


_Shapes = dict[str, tuple[int, ...]]


def checked_tensors(config: LlamaConfig, weights: Weights, dtype: torch.dtype, slots: int) -> list[Tensor | None]:
    """Return the tensors in the order step.cpp takes them. Raises ValueError naming one that does not fit."""
    hidden = config.hidden
    if len(weights.layers) != config.layers:
        raise ValueError(f"weights have {len(weights.layers)} layers, the model {config.layers}")
    _check("embed", weights.embed, dtype, (config.vocab, hidden))
    _check("norm", weights.norm, dtype, (hidden,))
    _check("head", weights.head, dtype, (config.vocab, hidden))
    tensors: list[Tensor | None] = [weights.embed, weights.norm, weights.head]
    for number, layer in enumerate(weights.layers):
        shapes, optional = _layer_shapes(config, number, slots)
        for name, tensor in _layer_tensors(layer).items():
            if tensor is not None:
                _check(f"layer {number} {name}", tensor, dtype, shapes[name])
            elif name not in optional:
                raise ValueError(f"layer {number} has no {name}")
            tensors.append(tensor)
    return tensors


def _layer_tensors(layer: Layer) -> dict[str, Tensor | None]:
    """Return the tensors of a layer in the order step.cpp takes them."""
    tensors = layer._asdict()
    experts = tensors.pop("experts")
    names = ("router", "gate_up", "down", "shared_gate")
    return tensors | {f"experts {name}": getattr(experts, name, None) for name in names}


def _layer_shapes(config: LlamaConfig, number: int, slots: int) -> tuple[_Shapes, set[str]]:
    """Return the shapes of the tensors of a layer, and which of them it may be without."""
    hidden, ffn, q_size = config.hidden, dense_ffn(config, number), config.q_size
    qkv = q_size + 2 * config.kv_size
    shapes: _Shapes = {
        "input_norm": (hidden,),
        "qkv": (qkv, hidden),
        "qkv_bias": (qkv,),
        "q_norm": (config.head_dim,),
        "k_norm": (config.head_dim,),
        "o": (hidden, q_size),
        "o_bias": (hidden,),
        "post_norm": (hidden,),
        "gate_up": (2 * ffn, hidden),
        "down": (hidden, ffn),
    }
    optional = {"qkv_bias", "q_norm", "k_norm", "o_bias"} | (set() if ffn else {"gate_up", "down"})
    experts = config.experts
    if experts is None or number not in experts.layers:
        return shapes, optional | {f"experts {name}" for name in ("router", "gate_up", "down", "shared_gate")}
    shapes["experts router"] = (experts.count, hidden)
    shapes["experts gate_up"] = (slots, 2 * experts.ffn, hidden)
    shapes["experts down"] = (slots, hidden, experts.ffn)
    shapes["experts shared_gate"] = (1, hidden)
    return shapes, optional | (set() if experts.shared_ffn else {"experts shared_gate"})


def _check(name: str, tensor: Tensor, dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    if tensor.dtype != dtype or tuple(tensor.shape) != shape:
        raise ValueError(f"{name} is {tensor.dtype} {tuple(tensor.shape)}, not {dtype} {shape}")
    if tensor.device.type != "cpu" or not tensor.is_contiguous():
        raise ValueError(f"{name} is not contiguous in the memory of the CPU")
