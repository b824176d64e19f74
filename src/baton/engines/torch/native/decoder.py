"""The native decode step behind tensors: checks shapes once, hands over pointers, reuses its buffers."""

import ctypes
import weakref
from array import array

import torch
from torch import Tensor

from baton.engines.torch.models.config import LlamaConfig
from baton.engines.torch.models.llama import Weights
from baton.engines.torch.native.build import Shape, load_decoder_library

PROBLEMS = {
    1: "a token is outside the vocabulary",
    2: "a position is outside the context",
    3: "a block is outside the KV cache",
    4: "out of memory",
}


class NativeDecoder:
    """One decode step for many sequences: from tokens to logits in one call that does not hold the GIL.

    A row's logits are the same, bit for bit, alone and in any batch, with any number of threads. Rows may belong to one
    sequence, at different positions: each sees the keys of those before it. Not for concurrent calls.
    """

    def __init__(
        self, config: LlamaConfig, weights: Weights, kv: Tensor, cos: Tensor, sin: Tensor, threads: int
    ) -> None:
        """Raises RuntimeError where `load_decoder_library` gives None, ValueError for tensors it cannot use."""
        library = load_decoder_library()
        if library is None:
            raise RuntimeError("the native decode step is not available")
        if kv.dtype not in (torch.bfloat16, torch.float32):
            raise ValueError(f"weights and KV cache are bfloat16 or float32, not {kv.dtype}")
        if kv.dim() != 6:
            raise ValueError(f"the KV cache has six dimensions, not {kv.dim()}")
        self._config = config
        self._kv_shape = tuple(kv.shape)
        self._dtype = kv.dtype
        self._block_size = kv.shape[3]
        _check("cos", cos, torch.float32, (cos.shape[0], config.head_dim // 2))
        _check("sin", sin, torch.float32, (cos.shape[0], config.head_dim // 2))
        self._angles = cos, sin
        shape = Shape(
            layers=config.layers,
            hidden=config.hidden,
            ffn=config.ffn,
            heads=config.heads,
            kv_heads=config.kv_heads,
            head_dim=config.head_dim,
            vocab=config.vocab,
            context=cos.shape[0],
            blocks=kv.shape[2],
            block_size=self._block_size,
            is_bf16=kv.dtype == torch.bfloat16,
            eps=config.eps,
        )
        handle = library.baton_decoder_new(ctypes.byref(shape), max(1, threads))
        if not handle:
            raise MemoryError("no memory for the native decode step")
        self._library = library
        self._handle = ctypes.c_void_p(handle)
        weakref.finalize(self, library.baton_decoder_free, self._handle)
        self._logits = torch.empty(0, config.vocab)
        self._tables = array("i")
        self.bind(weights, kv)

    def bind(self, weights: Weights, kv: Tensor) -> None:
        """Use these tensors from now on, and hold them. Values changed in place need no new call.

        Raises ValueError, and keeps what it had, unless they have the shapes of the model and the first KV cache.
        """
        tensors = _checked(self._config, weights, self._dtype)
        _check("kv", kv, self._dtype, (self._config.layers, 2, *self._kv_shape[2:4], *self._heads()))
        self._held = weights, kv
        pointers = (ctypes.c_void_p * len(tensors))(*(None if t is None else t.data_ptr() for t in tensors))
        cos, sin = (angles.data_ptr() for angles in self._angles)
        self._library.baton_decoder_bind(self._handle, pointers, kv.data_ptr(), cos, sin)

    def forward(self, tokens: list[int], positions: list[int], tables: list[list[int]]) -> Tensor:
        """Write the keys and values of one token per row into the cache; return float32 logits, a row for each.

        `tables` has each row's blocks, at least up to its position. The logits are overwritten by the next call.
        Raises ValueError, having done nothing, for a token, position or block out of range.
        """
        rows = len(tokens)
        if not rows:
            return self._logits[:0]
        width = max(map(len, tables))
        if len(self._tables) < rows * width:
            self._tables = array("i", bytes(8 * rows * width))
        if len(self._logits) < rows:
            self._logits = torch.empty(rows, self._config.vocab)
        packed, start = self._tables, 0
        for table, position in zip(tables, positions, strict=True):
            if len(table) * self._block_size <= position:
                raise ValueError(f"{len(table)} blocks do not reach position {position}")
            packed[start : start + len(table)] = array("i", table)
            start += width
        token_array, position_array = array("i", tokens), array("i", positions)
        status = self._library.baton_decoder_forward(
            self._handle,
            rows,
            token_array.buffer_info()[0],
            position_array.buffer_info()[0],
            packed.buffer_info()[0],
            width,
            self._logits.data_ptr(),
        )
        if status:
            raise ValueError(PROBLEMS[status])
        return self._logits[:rows]

    def _heads(self) -> tuple[int, int]:
        return self._config.kv_heads, self._config.head_dim


def _checked(config: LlamaConfig, weights: Weights, dtype: torch.dtype) -> list[Tensor | None]:
    """Return the tensors in the order step.cpp takes them. Raises ValueError naming one that does not fit."""
    hidden, ffn, q_size = config.hidden, config.ffn, config.q_size
    qkv = q_size + 2 * config.kv_size
    shapes: dict[str, tuple[int, ...]] = {
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
    if len(weights.layers) != config.layers:
        raise ValueError(f"weights have {len(weights.layers)} layers, the model {config.layers}")
    _check("embed", weights.embed, dtype, (config.vocab, hidden))
    _check("norm", weights.norm, dtype, (hidden,))
    _check("head", weights.head, dtype, (config.vocab, hidden))
    tensors: list[Tensor | None] = [weights.embed, weights.norm, weights.head]
    for number, layer in enumerate(weights.layers):
        for name, shape in shapes.items():
            tensor: Tensor | None = getattr(layer, name)
            if tensor is not None:
                _check(f"layer {number} {name}", tensor, dtype, shape)
            elif name not in ("qkv_bias", "q_norm", "k_norm", "o_bias"):
                raise ValueError(f"layer {number} has no {name}")
            tensors.append(tensor)
    return tensors


def _check(name: str, tensor: Tensor, dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    if tensor.dtype != dtype or tuple(tensor.shape) != shape:
        raise ValueError(f"{name} is {tensor.dtype} {tuple(tensor.shape)}, not {dtype} {shape}")
    if tensor.device.type != "cpu" or not tensor.is_contiguous():
        raise ValueError(f"{name} is not contiguous in the memory of the CPU")
