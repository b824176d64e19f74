"""Attention of decoding sequences over the paged KV cache, in Triton: keys and values are read from their blocks.

A cache is [slots, KV heads, head size], `size` slots to a block. `tables` has the blocks of a sequence in each row,
[rows, blocks]. Queries are [tokens, heads, head size]; `rows` and `indexes` give the table row and the position in its
sequence of each token, whose key is in the cache already.

All query heads of a KV head are rows of the same product. The keys of a sequence are divided among several programs,
whose results a second kernel joins; a division depends on the length as data, so a captured graph has it too.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

_LOG2_E = 1.4426950408889634
_LEAST_ROWS = 16  # of a product of tensor cores
_DECODE_KEYS = 64
_LEAST_TILES = 2  # of keys for one program
_PROGRAMS = 1024  # that fill a large GPU
_SPLITS = (4, 16, 64)  # few, because a kernel is compiled for each


class DecodeScratch:
    """Memory for the partial results of `decode`, at most `tokens` of them; shared by all layers and graphs."""

    def __init__(self, tokens: int, heads: int, head_dim: int, kv_heads: int, device: torch.device) -> None:
        most = max(count * splits(count, kv_heads) for count in range(1, tokens + 1))
        self.sums = torch.empty(most * heads * head_dim, dtype=torch.float32, device=device)
        self.scales = torch.empty(most * heads, dtype=torch.float32, device=device)


def splits(count: int, kv_heads: int) -> int:
    """Return among how many programs the keys of each of `count` sequences are divided, at most."""
    wanted = _PROGRAMS // (count * kv_heads)
    return next((parts for parts in _SPLITS if parts >= wanted), _SPLITS[-1])


def decode(
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    tables: Tensor,
    rows: Tensor,
    indexes: Tensor,
    size: int,
    scratch: DecodeScratch,
    out: Tensor,
) -> None:
    """Write the attention of one token of each sequence to `out`, [tokens, heads, head size]."""
    count, heads, head_dim = q.shape
    kv_heads = keys.shape[1]
    group, parts = heads // kv_heads, splits(count, kv_heads)
    padded = triton.next_power_of_2(max(head_dim, 16))
    _decode_part[(count, kv_heads, parts)](
        q,
        keys,
        values,
        tables,
        rows,
        indexes,
        scratch.sums,
        scratch.scales,
        _LOG2_E * head_dim**-0.5,
        q.stride(0),
        keys.stride(0),
        tables.stride(0),
        parts,
        HEADS=heads,
        GROUP=group,
        HEAD=head_dim,
        HEAD_PADDED=padded,
        SIZE=size,
        ROWS=max(_LEAST_ROWS, triton.next_power_of_2(group)),
        KEYS=_DECODE_KEYS,
        LEAST_TILES=_LEAST_TILES,
        num_warps=4,
        num_stages=2,
    )
    _join_parts[(count, heads)](
        scratch.sums,
        scratch.scales,
        indexes,
        out,
        out.stride(0),
        HEADS=heads,
        HEAD=head_dim,
        HEAD_PADDED=padded,
        KEYS=_DECODE_KEYS,
        LEAST_TILES=_LEAST_TILES,
        PARTS=parts,
        num_warps=4 if parts > 8 else 1,
    )


@triton.jit(do_not_specialize=["parts"], do_not_specialize_on_alignment=["tables", "rows", "indexes"])
def _decode_part(
    q,
    keys,
    values,
    tables,
    rows,
    indexes,
    sums,
    scales,
    scale,
    q_stride,
    slot_stride,
    table_stride,
    parts,
    HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD: tl.constexpr,
    HEAD_PADDED: tl.constexpr,
    SIZE: tl.constexpr,
    ROWS: tl.constexpr,
    KEYS: tl.constexpr,
    LEAST_TILES: tl.constexpr,
):
    token, kv_head, part = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    length = tl.load(indexes + token) + 1
    tiles = tl.maximum(tl.cdiv(tl.cdiv(length, KEYS), parts), LEAST_TILES)
    first = part * tiles * KEYS
    stop = tl.minimum(first + tiles * KEYS, length)
    if first < stop:
        table = tables + tl.load(rows + token).to(tl.int64) * table_stride
        row, dim, near = tl.arange(0, ROWS), tl.arange(0, HEAD_PADDED), tl.arange(0, KEYS)
        head = kv_head * GROUP + row
        inside = dim < HEAD
        query_mask = (row < GROUP)[:, None] & inside[None, :]
        query = tl.load(q + token * q_stride + head[:, None] * HEAD + dim[None, :], mask=query_mask, other=0.0)
        peak = tl.full([ROWS], -float("inf"), tl.float32)
        total = tl.zeros([ROWS], tl.float32)
        sum_ = tl.zeros([ROWS, HEAD_PADDED], tl.float32)
        for start in range(first, stop, KEYS):
            position = start + near
            present = position < stop
            block = tl.load(table + position // SIZE, mask=present, other=0)
            slot = (block.to(tl.int64) * SIZE + position % SIZE) * slot_stride + kv_head * HEAD
            key = tl.load(keys + slot[None, :] + dim[:, None], mask=present[None, :] & inside[:, None], other=0.0)
            value = tl.load(values + slot[:, None] + dim[None, :], mask=present[:, None] & inside[None, :], other=0.0)
            score = tl.dot(query, key, input_precision="ieee")
            score = tl.where(present[None, :], score, -float("inf"))
            next_peak = tl.maximum(peak, tl.max(score, 1) * scale)
            weight = tl.exp2(score * scale - next_peak[:, None])
            fade = tl.exp2(peak - next_peak)
            total = total * fade + tl.sum(weight, 1)
            sum_ = sum_ * fade[:, None] + tl.dot(weight.to(value.dtype), value, input_precision="ieee")
            peak = next_peak
        place = (token * HEADS + head) * parts + part
        tl.store(sums + place[:, None] * HEAD + dim[None, :], sum_ / total[:, None], mask=query_mask)
        tl.store(scales + place, peak + tl.log2(total), mask=row < GROUP)


@triton.jit(do_not_specialize_on_alignment=["indexes"])
def _join_parts(
    sums,
    scales,
    indexes,
    out,
    out_stride,
    HEADS: tl.constexpr,
    HEAD: tl.constexpr,
    HEAD_PADDED: tl.constexpr,
    KEYS: tl.constexpr,
    LEAST_TILES: tl.constexpr,
    PARTS: tl.constexpr,
):
    token, head = tl.program_id(0), tl.program_id(1)
    length = tl.load(indexes + token) + 1
    tiles = tl.maximum(tl.cdiv(tl.cdiv(length, KEYS), PARTS), LEAST_TILES)
    parts = tl.cdiv(length, tiles * KEYS)
    dim, part = tl.arange(0, HEAD_PADDED), tl.arange(0, PARTS)
    inside, present = dim < HEAD, part < parts
    place = (token * HEADS + head) * PARTS + part
    scale = tl.load(scales + place, mask=present, other=-float("inf"))
    weight = tl.exp2(scale - tl.max(scale, 0))
    mask = present[:, None] & inside[None, :]
    value = tl.load(sums + place[:, None] * HEAD + dim[None, :], mask=mask, other=0.0)
    result = tl.sum(value * weight[:, None], 0) / tl.sum(weight, 0)
    tl.store(out + token * out_stride + head * HEAD + dim, result.to(out.dtype.element_ty), mask=inside)
