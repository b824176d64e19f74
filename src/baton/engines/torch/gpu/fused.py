"""The small parts of a layer in Triton, each one pass over memory: norms, rotary positions with the cache, the gate."""

import torch
import triton
import triton.language as tl
from torch import Tensor

_HEADS_AT_ONCE = 16
_WIDE = 1024  # numbers of a row for each program, where rows are cut


def add_norm(x: Tensor, added: Tensor | None, weight: Tensor, eps: float) -> Tensor:
    """Add `added` to `x` in place, and return the sum normalised by its root mean square, times `weight`."""
    out = torch.empty_like(x)
    width = triton.next_power_of_2(x.shape[1])
    _add_norm[(len(x),)](
        x,
        x if added is None else added,
        weight,
        out,
        eps,
        WIDTH=x.shape[1],
        PADDED=width,
        ADD=added is not None,
        num_warps=8 if width >= 4096 else 4,
    )
    return out


@triton.jit
def _add_norm(x, added, weight, out, eps, WIDTH: tl.constexpr, PADDED: tl.constexpr, ADD: tl.constexpr):
    row, column = tl.program_id(0).to(tl.int64), tl.arange(0, PADDED)
    inside = column < WIDTH
    place = row * WIDTH + column
    value = tl.load(x + place, mask=inside, other=0.0)
    if ADD:
        value = value + tl.load(added + place, mask=inside, other=0.0)
        tl.store(x + place, value, mask=inside)
    wide = value.to(tl.float32)
    scale = tl.rsqrt(tl.sum(wide * wide, 0) / WIDTH + eps)
    result = wide * scale * tl.load(weight + column, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + place, result.to(out.dtype.element_ty), mask=inside)


def gate(gate_up: Tensor) -> Tensor:
    """Return silu of the first half of each row times the second half."""
    rows, width = gate_up.shape[0], gate_up.shape[1] // 2
    out = torch.empty(rows, width, dtype=gate_up.dtype, device=gate_up.device)
    # Rows come first: a GPU takes no more than 65535 programs in any other direction.
    _gate[(rows, triton.cdiv(width, _WIDE))](gate_up, out, width, WIDE=_WIDE, num_warps=4)
    return out


@triton.jit
def _gate(gate_up, out, width, WIDE: tl.constexpr):
    row, column = tl.program_id(0).to(tl.int64), tl.program_id(1) * WIDE + tl.arange(0, WIDE)
    inside = column < width
    first = tl.load(gate_up + row * 2 * width + column, mask=inside, other=0.0).to(tl.float32)
    second = tl.load(gate_up + row * 2 * width + width + column, mask=inside, other=0.0).to(tl.float32)
    result = first / (1.0 + tl.exp(-first)) * second
    tl.store(out + row * width + column, result.to(out.dtype.element_ty), mask=inside)


def rotate_and_store(
    qkv: Tensor,
    heads: int,
    positions: Tensor,
    sections: tuple[int, ...],
    cos: Tensor,
    sin: Tensor,
    norms: tuple[Tensor, Tensor] | None,
    eps: float,
    keys: Tensor,
    values: Tensor,
    tables: Tensor,
    rows: Tensor,
    indexes: Tensor,
    size: int,
) -> Tensor:
    """Rotate queries and keys to their positions in `qkv`, and write keys and values to the cache.

    `positions` are [tokens], or [3, tokens] with `sections` of each direction. `norms` are those of queries and keys.
    Returns a view of `qkv`, [tokens, heads + 2 KV heads, head size].
    """
    tokens, kv_heads, head_dim = len(qkv), keys.shape[1], keys.shape[2]
    every = heads + 2 * kv_heads
    q_norm, k_norm = norms if norms is not None else (qkv, qkv)
    spatial = positions.dim() == 2
    _rotate_and_store[(tokens, triton.cdiv(every, _HEADS_AT_ONCE))](
        qkv,
        positions,
        positions.stride(0) if spatial else 0,
        cos,
        sin,
        q_norm,
        k_norm,
        eps,
        keys,
        values,
        tables,
        rows,
        indexes,
        keys.stride(0),
        tables.stride(0),
        FIRST=sections[0] if spatial else 0,
        SECOND=sections[0] + sections[1] if spatial else 0,
        HEADS=heads,
        KV_HEADS=kv_heads,
        HALF=head_dim // 2,
        HALF_PADDED=triton.next_power_of_2(head_dim // 2),
        AT_ONCE=_HEADS_AT_ONCE,
        SIZE=size,
        NORM=norms is not None,
        SPATIAL=spatial,
        num_warps=4,
    )
    return qkv.view(tokens, every, head_dim)


@triton.jit(
    do_not_specialize=["position_stride"],
    do_not_specialize_on_alignment=["positions", "tables", "rows", "indexes"],
)
def _rotate_and_store(
    qkv,
    positions,
    position_stride,
    cos,
    sin,
    q_norm,
    k_norm,
    eps,
    keys,
    values,
    tables,
    rows,
    indexes,
    slot_stride,
    table_stride,
    FIRST: tl.constexpr,
    SECOND: tl.constexpr,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    HALF: tl.constexpr,
    HALF_PADDED: tl.constexpr,
    AT_ONCE: tl.constexpr,
    SIZE: tl.constexpr,
    NORM: tl.constexpr,
    SPATIAL: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    head = (tl.program_id(1) * AT_ONCE + tl.arange(0, AT_ONCE))[:, None]
    dim = tl.arange(0, HALF_PADDED)[None, :]
    inside = dim < HALF
    is_query, is_key = head < HEADS, (head >= HEADS) & (head < HEADS + KV_HEADS)
    is_value = (head >= HEADS + KV_HEADS) & (head < HEADS + 2 * KV_HEADS)
    at = qkv + (token * (HEADS + 2 * KV_HEADS) + head) * 2 * HALF + dim
    present = inside & (head < HEADS + 2 * KV_HEADS)
    low, high = tl.load(at, mask=present, other=0.0), tl.load(at + HALF, mask=present, other=0.0)
    a, b = low.to(tl.float32), high.to(tl.float32)
    if NORM:
        scale = tl.rsqrt(tl.sum(a * a + b * b, 1) / (2 * HALF) + eps)[:, None]
        for_query, for_key = is_query & inside, is_key & inside
        low_norm = tl.load(q_norm + dim + 0 * head, mask=for_query, other=0.0)
        high_norm = tl.load(q_norm + HALF + dim + 0 * head, mask=for_query, other=0.0)
        low_norm += tl.load(k_norm + dim + 0 * head, mask=for_key, other=0.0)
        high_norm += tl.load(k_norm + HALF + dim + 0 * head, mask=for_key, other=0.0)
        # Rounded as the result of a norm of its own would be.
        a = (a * scale * low_norm.to(tl.float32)).to(low.dtype).to(tl.float32)
        b = (b * scale * high_norm.to(tl.float32)).to(low.dtype).to(tl.float32)
    if SPATIAL:
        direction = (dim >= FIRST).to(tl.int32) + (dim >= SECOND).to(tl.int32)
        position = tl.load(positions + direction * position_stride + token, mask=inside, other=0)
    else:
        position = tl.load(positions + token)
    place = position.to(tl.int64) * HALF + dim
    c, s = tl.load(cos + place, mask=inside, other=0.0), tl.load(sin + place, mask=inside, other=0.0)
    rotated_low, rotated_high = (a * c - b * s).to(low.dtype), (b * c + a * s).to(low.dtype)
    tl.store(at, rotated_low, mask=(is_query | is_key) & inside)
    tl.store(at + HALF, rotated_high, mask=(is_query | is_key) & inside)
    index = tl.load(indexes + token)
    block = tl.load(tables + tl.load(rows + token).to(tl.int64) * table_stride + index // SIZE)
    slot = (block.to(tl.int64) * SIZE + index % SIZE) * slot_stride
    key = keys + slot + (head - HEADS) * 2 * HALF + dim
    tl.store(key, rotated_low, mask=is_key & inside)
    tl.store(key + HALF, rotated_high, mask=is_key & inside)
    value = values + slot + (head - HEADS - KV_HEADS) * 2 * HALF + dim
    tl.store(value, low, mask=is_value & inside)
    tl.store(value + HALF, high, mask=is_value & inside)
