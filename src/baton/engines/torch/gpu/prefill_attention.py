"""Attention of prompts in Triton, without a mask: keys and values are read from their blocks, or from the pass.

A cache is as in `decode_attention`. All query heads of a KV head are rows of the same product. Prompts of which nothing
is cached are read from the tensor that the pass has computed, in whole rows, which Hopper GPUs copy without a thread.
"""

import functools
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

try:
    from triton.tools.tensor_descriptor import TensorDescriptor
except ImportError:  # before Triton 3.4
    TensorDescriptor = None

_LOG2_E = 1.4426950408889634
_LEAST_ROWS = 16  # of a product of tensor cores
_TILE_ROWS = 128
_MOST_HEAD = 128  # numbers of a head for `prefill_uncached`
_HOPPER = (9, 0)
_INT32 = 2**31


def tile_tokens(heads: int, kv_heads: int) -> int:
    """Return how many tokens one tile of `prefill` has."""
    return max(1, _TILE_ROWS // (heads // kv_heads))


class _PrefillShape(NamedTuple):
    """Keys of one product, and warps and stages that fit the registers and the shared memory."""

    keys: int
    warps: int
    stages: int


def prefill(
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    tables: Tensor,
    rows: Tensor,
    indexes: Tensor,
    tiles: Tensor,
    size: int,
    out: Tensor,
) -> None:
    """Write the attention of consecutive tokens to `out`, [tokens, heads, head size].

    A tile is (first token, tokens, end, unit) in int32: at most `tile_tokens` consecutive tokens of a sequence. A token
    sees the keys before `end` up to the end of its own block of `unit` tokens; with 1 attention is causal.
    """
    _, heads, head_dim = q.shape
    kv_heads = keys.shape[1]
    shape = _cached_shape(head_dim, q.dtype)
    _prefill_tile[(kv_heads, len(tiles))](
        q,
        keys,
        values,
        tables,
        rows,
        indexes,
        tiles,
        out,
        _LOG2_E * head_dim**-0.5,
        q.stride(0),
        out.stride(0),
        keys.stride(0),
        tables.stride(0),
        GROUP=heads // kv_heads,
        HEAD=head_dim,
        HEAD_PADDED=triton.next_power_of_2(max(head_dim, 16)),
        SIZE=size,
        ROWS=max(_TILE_ROWS, triton.next_power_of_2(heads // kv_heads)),
        KEYS=shape.keys,
        LARGE=keys.numel() >= _INT32,  # offsets of 64 bits take registers that the sums need
        num_warps=shape.warps,
        num_stages=shape.stages,
    )


def prefill_uncached(qkv: Tensor, heads: int, indexes: Tensor, tiles: Tensor, out: Tensor) -> None:
    """Write the attention of whole prompts, or of their beginnings, to `out`, as `prefill` does.

    `qkv` has the rotated queries and keys of the tokens and their values, [tokens, heads + 2 KV heads, head size].
    `can_read_rows` says for which models.
    """
    tokens, every, head_dim = qkv.shape
    kv_heads = (every - heads) // 2
    flat = qkv.view(tokens, every * head_dim)
    shape = _uncached_shape(qkv.dtype)
    _prefill_uncached_tile[(kv_heads, len(tiles))](
        flat,
        TensorDescriptor.from_tensor(flat, [shape.keys, head_dim]),
        indexes,
        tiles,
        out,
        _LOG2_E * head_dim**-0.5,
        flat.stride(0),
        out.stride(0),
        HEADS=heads,
        KV_HEADS=kv_heads,
        HEAD=head_dim,
        ROWS=max(_TILE_ROWS, triton.next_power_of_2(heads // kv_heads)),
        KEYS=shape.keys,
        num_warps=shape.warps,
        num_stages=shape.stages,
    )


def can_read_rows(head_dim: int, device: torch.device) -> bool:
    """Whether `prefill_uncached` can be used, and is faster than `prefill`.

    It reads rows of a power of two, which fit the shared memory of a Hopper GPU in float32 too.
    """
    if TensorDescriptor is None or (device.type == "cuda" and torch.cuda.get_device_capability(device) < _HOPPER):
        return False
    return _LEAST_ROWS <= head_dim <= _MOST_HEAD and head_dim & (head_dim - 1) == 0


@functools.cache
def _cached_shape(head_dim: int, dtype: torch.dtype) -> _PrefillShape:
    if dtype == torch.float32 or head_dim > 128:
        return _PrefillShape(32, 8, 2)
    return _PrefillShape(64, 4, 3)


def _uncached_shape(dtype: torch.dtype) -> _PrefillShape:
    return _PrefillShape(32, 8, 2) if dtype == torch.float32 else _PrefillShape(64, 8, 3)


@triton.jit
def _add_keys(query, key, value, peak, total, sum_, position, limits, scale, MASKED: tl.constexpr):
    """Add keys, [head size, keys], and values to the sums of all rows; a row sees positions before its limit."""
    score = tl.dot(query, key, input_precision="ieee")
    if MASKED:
        score = tl.where(position[None, :] < limits[:, None], score, -float("inf"))
    next_peak = tl.maximum(peak, tl.max(score, 1) * scale)
    weight = tl.exp2(score * scale - next_peak[:, None])
    fade = tl.exp2(peak - next_peak)
    total = total * fade + tl.sum(weight, 1)
    sum_ = tl.dot(weight.to(value.dtype), value, sum_ * fade[:, None], input_precision="ieee")
    return next_peak, total, sum_


@triton.jit
def _prefill_keys(
    query,
    keys,
    values,
    table,
    peak,
    total,
    sum_,
    start,
    limits,
    slots_base,
    slot_stride,
    scale,
    MASKED: tl.constexpr,
    HEAD: tl.constexpr,
    HEAD_PADDED: tl.constexpr,
    SIZE: tl.constexpr,
    KEYS: tl.constexpr,
    LARGE: tl.constexpr,
):
    """Add the keys from `start` on; a row sees those before its limit."""
    dim, position = tl.arange(0, HEAD_PADDED), start + tl.arange(0, KEYS)
    inside = dim < HEAD
    if MASKED:
        present = position < tl.max(limits, 0)
        block = tl.load(table + position // SIZE, mask=present, other=0)
    else:
        block = tl.load(table + position // SIZE)
    if LARGE:
        block = block.to(tl.int64)
    slot = (block * SIZE + position % SIZE) * slot_stride + slots_base
    key_at, value_at = keys + slot[None, :] + dim[:, None], values + slot[:, None] + dim[None, :]
    if MASKED:
        key = tl.load(key_at, mask=present[None, :] & inside[:, None], other=0.0)
        value = tl.load(value_at, mask=present[:, None] & inside[None, :], other=0.0)
    elif HEAD == HEAD_PADDED:
        key, value = tl.load(key_at), tl.load(value_at)
    else:
        key = tl.load(key_at, mask=inside[:, None], other=0.0)
        value = tl.load(value_at, mask=inside[None, :], other=0.0)
    return _add_keys(query, key, value, peak, total, sum_, position, limits, scale, MASKED)


@triton.jit(do_not_specialize_on_alignment=["tables", "rows", "indexes", "tiles"])
def _prefill_tile(
    q,
    keys,
    values,
    tables,
    rows,
    indexes,
    tiles,
    out,
    scale,
    q_stride,
    out_stride,
    slot_stride,
    table_stride,
    GROUP: tl.constexpr,
    HEAD: tl.constexpr,
    HEAD_PADDED: tl.constexpr,
    SIZE: tl.constexpr,
    ROWS: tl.constexpr,
    KEYS: tl.constexpr,
    LARGE: tl.constexpr,
):
    kv_head, tile = tl.program_id(0), tl.program_id(1)
    # The last tiles of a prompt have the most keys: they begin first.
    tile = tl.num_programs(1) - 1 - tile
    first = tl.load(tiles + tile * 4)
    count = tl.load(tiles + tile * 4 + 1)
    end = tl.load(tiles + tile * 4 + 2)
    unit = tl.load(tiles + tile * 4 + 3)
    start = tl.load(indexes + first)
    table = tables + tl.load(rows + first).to(tl.int64) * table_stride
    row, dim = tl.arange(0, ROWS), tl.arange(0, HEAD_PADDED)
    number = row // GROUP
    head = kv_head * GROUP + row % GROUP
    mask = (number < count)[:, None] & (dim < HEAD)[None, :]
    # Rows past the last token see what the first one does: a row without keys would have no maximum.
    limits = tl.minimum(((start + tl.where(number < count, number, 0)) // unit + 1) * unit, end)
    place = (first + number).to(tl.int64)
    query = tl.load(q + place[:, None] * q_stride + head[:, None] * HEAD + dim[None, :], mask=mask, other=0.0)
    peak = tl.full([ROWS], -float("inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    sum_ = tl.zeros([ROWS, HEAD_PADDED], tl.float32)
    base = kv_head * HEAD
    seen_by_all = tl.min(limits, 0) // KEYS * KEYS
    for at in range(0, seen_by_all, KEYS):
        peak, total, sum_ = _prefill_keys(
            query,
            keys,
            values,
            table,
            peak,
            total,
            sum_,
            at,
            limits,
            base,
            slot_stride,
            scale,
            False,
            HEAD,
            HEAD_PADDED,
            SIZE,
            KEYS,
            LARGE,
        )
    for at in range(seen_by_all, tl.max(limits, 0), KEYS):
        peak, total, sum_ = _prefill_keys(
            query,
            keys,
            values,
            table,
            peak,
            total,
            sum_,
            at,
            limits,
            base,
            slot_stride,
            scale,
            True,
            HEAD,
            HEAD_PADDED,
            SIZE,
            KEYS,
            LARGE,
        )
    result = (sum_ / total[:, None]).to(out.dtype.element_ty)
    tl.store(out + place[:, None] * out_stride + head[:, None] * HEAD + dim[None, :], result, mask=mask)


@triton.jit(do_not_specialize_on_alignment=["indexes", "tiles"])
def _prefill_uncached_tile(
    qkv,
    blocks,
    indexes,
    tiles,
    out,
    scale,
    stride,
    out_stride,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    HEAD: tl.constexpr,
    ROWS: tl.constexpr,
    KEYS: tl.constexpr,
):
    GROUP: tl.constexpr = HEADS // KV_HEADS
    kv_head = tl.program_id(0)
    # The last tiles of a prompt have the most keys: they begin first.
    tile = tiles + (tl.num_programs(1) - 1 - tl.program_id(1)) * 4
    first, count, end, unit = tl.load(tile), tl.load(tile + 1), tl.load(tile + 2), tl.load(tile + 3)
    start = tl.load(indexes + first)
    row, dim, near = tl.arange(0, ROWS), tl.arange(0, HEAD), tl.arange(0, KEYS)
    number = row // GROUP
    head = kv_head * GROUP + row % GROUP
    mask = (number < count)[:, None]
    limits = tl.minimum(((start + tl.where(number < count, number, 0)) // unit + 1) * unit, end)
    place = (first + number).to(tl.int64)
    query = tl.load(qkv + place[:, None] * stride + head[:, None] * HEAD + dim[None, :], mask=mask, other=0.0)
    peak = tl.full([ROWS], -float("inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    sum_ = tl.zeros([ROWS, HEAD], tl.float32)
    prompt = first - start  # the row of its first token
    key_at, value_at = (HEADS + kv_head) * HEAD, (HEADS + KV_HEADS + kv_head) * HEAD
    seen_by_all, stop = tl.min(limits, 0) // KEYS * KEYS, tl.max(limits, 0)
    for at in range(0, seen_by_all, KEYS):
        key, value = blocks.load([prompt + at, key_at]), blocks.load([prompt + at, value_at])
        peak, total, sum_ = _add_keys(query, key.T, value, peak, total, sum_, at + near, limits, scale, False)
    for at in range(seen_by_all, stop, KEYS):
        key, value = blocks.load([prompt + at, key_at]), blocks.load([prompt + at, value_at])
        value = tl.where((at + near < stop)[:, None], value, 0.0)  # rows of other sequences may not be finite
        peak, total, sum_ = _add_keys(query, key.T, value, peak, total, sum_, at + near, limits, scale, True)
    result = (sum_ / total[:, None]).to(out.dtype.element_ty)
    tl.store(out + place[:, None] * out_stride + head[:, None] * HEAD + dim[None, :], result, mask=mask)
