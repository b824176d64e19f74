"""The Triton kernels compute what plain torch does, in float32 and for every layout of the cache."""

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn import functional as F  # noqa: N812 - the usual name

pytest.importorskip("triton")

from hypothesis import given, settings
from hypothesis import strategies as st

from baton.engines.torch.gpu.decode_attention import DecodeScratch, decode
from baton.engines.torch.gpu.fused import add_norm, gate, rotate_and_store
from baton.engines.torch.gpu.prefill_attention import can_read_rows, prefill, prefill_uncached, tile_tokens

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
SHAPES = [(6, 2, 16), (7, 1, 18)]
if DEVICE.type == "cuda":  # the interpreter takes seconds for each
    SHAPES += [(4, 4, 32), (8, 2, 64), (8, 1, 128), (2, 2, 256)]


class Cache:
    """Sequences of some lengths in blocks at random places; what no sequence uses is NaN."""

    def __init__(self, lengths: list[int], size: int, kv_heads: int, head_dim: int, seed: int = 0) -> None:
        numbers = torch.Generator().manual_seed(seed)
        blocks = [-(-length // size) for length in lengths]
        order = torch.randperm(sum(blocks) + 3, generator=numbers).tolist()
        self.size = size
        self.lengths = lengths
        self.tables = torch.zeros(len(lengths), max(blocks) + 2, dtype=torch.int32)
        shape = (len(order) * size, kv_heads, head_dim)
        self.keys, self.values = torch.full(shape, torch.nan), torch.full(shape, torch.nan)
        self.slots: list[Tensor] = []
        for row, (length, count) in enumerate(zip(lengths, blocks, strict=True)):
            self.tables[row, :count] = torch.tensor([order.pop() for _ in range(count)])
            index = torch.arange(length)
            slots = self.tables[row, index // size] * size + index % size
            self.keys[slots] = torch.randn(length, *shape[1:], generator=numbers)
            self.values[slots] = torch.randn(length, *shape[1:], generator=numbers)
            self.slots.append(slots)
        self.keys, self.values, self.tables = (x.to(DEVICE) for x in (self.keys, self.values, self.tables))

    def attend(self, q: Tensor, row: int, seen: int) -> Tensor:
        """Return the attention of one token's queries, [heads, head size], to the first `seen` keys."""
        slots = self.slots[row][:seen].to(DEVICE)
        group = q.shape[0] // self.keys.shape[1]
        k, v = (x[slots].transpose(0, 1).repeat_interleave(group, dim=0) for x in (self.keys, self.values))
        return F.scaled_dot_product_attention(q.unsqueeze(1), k, v).squeeze(1)


def integers(values: list[int]) -> Tensor:
    return torch.tensor(values, dtype=torch.int32, device=DEVICE)


@pytest.mark.parametrize(("heads", "kv_heads", "head_dim"), SHAPES)
@pytest.mark.parametrize("size", [4, 16] if DEVICE.type == "cuda" else [4])
def test_decode_attends_to_every_key_of_its_sequence(heads: int, kv_heads: int, head_dim: int, size: int) -> None:
    cache = Cache([1, 64, 300], size, kv_heads, head_dim)
    q = torch.randn(3, heads + 2, head_dim, device=DEVICE)[:, :heads]
    rows, indexes = integers([2, 0, 1]), integers([299, 0, 63])
    out = torch.full((3, heads, head_dim), torch.nan, device=DEVICE)
    scratch = DecodeScratch(8, heads, head_dim, kv_heads, DEVICE)
    decode(q, cache.keys, cache.values, cache.tables, rows, indexes, size, scratch, out)
    for token, row in enumerate(rows.tolist()):
        torch.testing.assert_close(out[token], cache.attend(q[token], row, cache.lengths[row]), atol=1e-5, rtol=1e-5)


@settings(max_examples=2 if DEVICE.type == "cpu" else 100, deadline=None)
@given(
    shape=st.sampled_from(SHAPES),
    spans=st.lists(st.tuples(st.integers(0, 70), st.integers(1, 70)), min_size=1, max_size=3),
    unit=st.sampled_from([1, 1, 4, 8]),
    seed=st.integers(0, 1000),
)
def test_prefill_attends_to_cached_and_new_keys(
    shape: tuple[int, int, int], spans: list[tuple[int, int]], unit: int, seed: int
) -> None:
    heads, kv_heads, head_dim = shape
    spans = [(before // unit * unit, -(-length // unit) * unit) for before, length in spans]
    cache = Cache([before + length for before, length in spans], 8, kv_heads, head_dim, seed)
    most, first = tile_tokens(heads, kv_heads), 0
    rows: list[int] = []
    indexes: list[int] = []
    tiles: list[list[int]] = []
    for row, (before, length) in enumerate(spans):
        tiles += [[first + at, min(most, length - at), before + length, unit] for at in range(0, length, most)]
        rows += [row] * length
        indexes += range(before, before + length)
        first += length
    q = torch.randn(first, heads, head_dim, generator=torch.Generator().manual_seed(seed)).to(DEVICE)
    out = torch.full_like(q, torch.nan)
    described = torch.tensor(tiles, dtype=torch.int32, device=DEVICE)
    prefill(q, cache.keys, cache.values, cache.tables, integers(rows), integers(indexes), described, 8, out)
    for token, (row, index) in enumerate(zip(rows, indexes, strict=True)):
        expected = cache.attend(q[token], row, (index // unit + 1) * unit)
        torch.testing.assert_close(out[token], expected, atol=1e-5, rtol=1e-5)


@settings(max_examples=2 if DEVICE.type == "cpu" else 100, deadline=None)
@given(
    shape=st.sampled_from([shape for shape in SHAPES if can_read_rows(shape[2], DEVICE)]),
    lengths=st.lists(st.integers(1, 70), min_size=1, max_size=3),
    unit=st.sampled_from([1, 1, 4, 8]),
    seed=st.integers(0, 1000),
)
def test_prefill_of_whole_prompts_reads_no_cache(
    shape: tuple[int, int, int], lengths: list[int], unit: int, seed: int
) -> None:
    heads, kv_heads, head_dim = shape
    lengths = [-(-length // unit) * unit for length in lengths]
    numbers = torch.Generator().manual_seed(seed)
    qkv = torch.randn(sum(lengths), heads + 2 * kv_heads, head_dim, generator=numbers).to(DEVICE)
    expected, tiles, first = [], [], 0
    for length in lengths:
        q, k, v = qkv[first : first + length].transpose(0, 1).split((heads, kv_heads, kv_heads))
        index = torch.arange(length, device=DEVICE)
        mask = index[None, :] < (index[:, None] // unit + 1) * unit
        k, v = (x.repeat_interleave(heads // kv_heads, dim=0) for x in (k, v))
        expected.append(F.scaled_dot_product_attention(q, k, v, attn_mask=mask).transpose(0, 1))
        most = tile_tokens(heads, kv_heads)
        tiles += [[first + at, min(most, length - at), length, unit] for at in range(0, length, most)]
        first += length
    out = torch.full_like(qkv[:, :heads], torch.nan)
    described = torch.tensor(tiles, dtype=torch.int32, device=DEVICE)
    indexes = integers([index for length in lengths for index in range(length)])
    prefill_uncached(qkv, heads, indexes, described, out)
    torch.testing.assert_close(out, torch.cat(expected), atol=1e-5, rtol=1e-5)


def test_what_is_not_finite_stays_in_its_sequence() -> None:
    qkv = torch.randn(14, 4, 16, device=DEVICE)
    q, k, v = qkv[:5].transpose(0, 1).split((2, 1, 1))
    expected = F.scaled_dot_product_attention(q, *(x.repeat(2, 1, 1) for x in (k, v)), is_causal=True).transpose(0, 1)
    qkv[5:] = torch.nan
    out = torch.full_like(qkv[:, :2], 7)
    tiles = torch.tensor([[0, 5, 5, 1], [5, 9, 9, 1]], dtype=torch.int32, device=DEVICE)
    with np.errstate(invalid="ignore"):  # of the interpreter
        prefill_uncached(qkv, 2, integers([*range(5), *range(9)]), tiles, out)
    torch.testing.assert_close(out[:5], expected, atol=1e-5, rtol=1e-5)
    assert out[5:].isnan().all()


@pytest.mark.parametrize("width", [48, 42, 1100])
def test_norm_of_a_sum(width: int) -> None:
    x, added = torch.randn(2, 5, width, device=DEVICE)
    weight = torch.randn(width, device=DEVICE)
    expected = F.rms_norm(x + added, (width,), weight, 1e-5)
    summed = x + added
    torch.testing.assert_close(add_norm(x, added, weight, 1e-5), expected)
    torch.testing.assert_close(x, summed)
    torch.testing.assert_close(add_norm(x, None, weight, 1e-5), expected)
    torch.testing.assert_close(x, summed)


@pytest.mark.parametrize("width", [50, 2100])
def test_gate(width: int) -> None:
    both = torch.randn(3, 2 * width, device=DEVICE)
    first, second = both.chunk(2, dim=-1)
    torch.testing.assert_close(gate(both), F.silu(first) * second)


@pytest.mark.skipif(DEVICE.type == "cpu", reason="the interpreter has no limit, and takes minutes")
def test_gate_of_more_rows_than_a_gpu_has_programs_in_all_but_one_direction() -> None:
    both = torch.randn(65536, 2 * 16, device=DEVICE)
    first, second = both.chunk(2, dim=-1)
    torch.testing.assert_close(gate(both), F.silu(first) * second)


@pytest.mark.parametrize("spatial", [False, True])
@pytest.mark.parametrize("normed", [False, True])
@pytest.mark.parametrize("head_dim", [16, 18])
def test_rotary_positions_and_cache(spatial: bool, normed: bool, head_dim: int) -> None:
    heads, kv_heads, size, half = 6, 2, 4, head_dim // 2
    cache = Cache([9, 5], size, kv_heads, head_dim)
    rows, indexes = integers([0, 0, 1]), integers([7, 8, 4])
    sections = (2, 3, half - 5)
    positions = torch.randint(0, 30, (3, 3) if spatial else (3,), dtype=torch.int32).to(DEVICE)
    cos, sin = torch.randn(2, 30, half, device=DEVICE)
    norms = (torch.randn(head_dim, device=DEVICE), torch.randn(head_dim, device=DEVICE)) if normed else None
    qkv = torch.randn(3, (heads + 2 * kv_heads) * head_dim, device=DEVICE)
    q, k, v = qkv.clone().view(3, -1, head_dim).split((heads, kv_heads, kv_heads), dim=1)
    if norms is not None:
        q, k = (F.rms_norm(x, (head_dim,), norm, 1e-6) for x, norm in zip((q, k), norms, strict=True))
    if spatial:
        parts = [
            torch.cat([p[d] for d, p in enumerate(table[positions].split(sections, dim=-1))], -1)
            for table in (cos, sin)
        ]
    else:
        parts = [cos[positions], sin[positions]]
    c, s = (part.unsqueeze(1) for part in parts)
    rotated = [torch.cat((a * c - b * s, b * c + a * s), -1) for a, b in (x.chunk(2, dim=-1) for x in (q, k))]
    found = rotate_and_store(
        qkv,
        heads,
        positions,
        sections,
        cos,
        sin,
        norms,
        1e-6,
        cache.keys,
        cache.values,
        cache.tables,
        rows,
        indexes,
        size,
    )
    torch.testing.assert_close(found, torch.cat((*rotated, v), dim=1), atol=1e-5, rtol=1e-5)
    places = torch.stack([cache.slots[0][7], cache.slots[0][8], cache.slots[1][4]]).to(DEVICE)
    torch.testing.assert_close(cache.keys[places], rotated[1], atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(cache.values[places], v)


ON_GPU = pytest.mark.skipif(DEVICE.type != "cuda", reason="there is no GPU")


@ON_GPU
def test_long_contexts() -> None:
    heads, kv_heads, head_dim, size, length = 8, 2, 64, 16, 32_773
    cache = Cache([length, 5, length - 3000], size, kv_heads, head_dim)
    q = torch.randn(3, heads, head_dim, device=DEVICE)
    out = torch.full_like(q, torch.nan)
    scratch = DecodeScratch(4, heads, head_dim, kv_heads, DEVICE)
    indexes = integers([one - 1 for one in cache.lengths])
    decode(q, cache.keys, cache.values, cache.tables, integers([0, 1, 2]), indexes, size, scratch, out)
    for row, seen in enumerate(cache.lengths):
        torch.testing.assert_close(out[row], cache.attend(q[row], row, seen), atol=1e-5, rtol=1e-4)
    q, most = torch.randn(100, heads, head_dim, device=DEVICE), tile_tokens(heads, kv_heads)
    out = torch.full_like(q, torch.nan)
    tiles = [[at, min(most, 100 - at), length, 1] for at in range(0, 100, most)]
    described = torch.tensor(tiles, dtype=torch.int32, device=DEVICE)
    rows, indexes = integers([0] * 100), integers(list(range(length - 100, length)))
    prefill(q, cache.keys, cache.values, cache.tables, rows, indexes, described, size, out)
    for token in (0, 50, 99):
        expected = cache.attend(q[token], 0, length - 99 + token)
        torch.testing.assert_close(out[token], expected, atol=1e-5, rtol=1e-4)


@ON_GPU
def test_a_cache_of_more_than_two_billion_numbers() -> None:
    """Offsets past 31 bits: the blocks of the sequence are the last ones."""
    kv_heads, head_dim, size, tokens = 8, 128, 16, 40
    slots = 2**31 // (kv_heads * head_dim) + 4 * size
    keys, values = (torch.empty(slots, kv_heads, head_dim, dtype=torch.bfloat16, device=DEVICE) for _ in range(2))
    keys[-3 * size :].normal_()
    values[-3 * size :].normal_()
    last = slots // size
    tables = torch.tensor([[last - 3, last - 2, last - 1]], dtype=torch.int32, device=DEVICE)
    q = torch.randn(tokens, kv_heads, head_dim, device=DEVICE, dtype=torch.bfloat16)
    out = torch.full_like(q, torch.nan)
    tiles = torch.tensor([[0, tokens, tokens, 1]], dtype=torch.int32, device=DEVICE)
    prefill(q, keys, values, tables, integers([0] * tokens), integers(list(range(tokens))), tiles, size, out)
    k, v = (x[-3 * size :][:tokens].transpose(0, 1).float() for x in (keys, values))
    expected = F.scaled_dot_product_attention(q.transpose(0, 1).float(), k, v, is_causal=True).transpose(0, 1)
    torch.testing.assert_close(out.float(), expected, atol=0.02, rtol=0.02)
    scratch, row = DecodeScratch(1, kv_heads, head_dim, kv_heads, DEVICE), integers([0])
    out = torch.full_like(q[-1:], torch.nan)
    decode(q[-1:], keys, values, tables, row, integers([tokens - 1]), size, scratch, out)
    torch.testing.assert_close(out.float(), expected[-1:], atol=0.02, rtol=0.02)
