"""Sparse layers: native and torch agree, and a row's bits depend on neither batch, threads, ranks nor placement."""

import itertools
import math

import pytest

torch = pytest.importorskip("torch")

from torch import Tensor  # noqa: E402

from baton.engines.torch.native.decoder import NativeDecoder  # noqa: E402
from tests.torch.sparse_models import SparseModel, random_row, rows, sparse_config  # noqa: E402

BOTH = [torch.float32, torch.bfloat16]
SHAPES = {
    "plain": sparse_config(),
    "not normalised": sparse_config({"normalised": False}),
    "shared": sparse_config({"shared_ffn": 56}, qk_norm=False, qkv_bias=True),
    "dense between": sparse_config({"layers": (1, 3)}, layers=4),
    "odd widths": sparse_config({"ffn": 37, "count": 7, "shared_ffn": 21}, hidden=75),
    "one expert": sparse_config({"count": 5, "per_token": 1}),
    "all experts": sparse_config({"count": 4, "per_token": 4}),
    "wide": sparse_config({"count": 40, "per_token": 6, "ffn": 300, "shared_ffn": 200}, hidden=576, layers=2),
}


@pytest.mark.parametrize("name", SHAPES)
def test_float32_logits_equal_a_torch_forward(name: str) -> None:
    model = SparseModel(SHAPES[name])
    tokens = model.prompt(150)
    logits = model.native().forward([rows(tokens)])
    torch.testing.assert_close(logits, model.expected(tokens), rtol=1e-3, atol=1e-3)


def test_bfloat16_logits_are_near_a_torch_forward() -> None:
    """Rounding changes the experts of some rows, so not all rows can be near."""
    model = SparseModel(SHAPES["shared"], torch.bfloat16)
    tokens = model.prompt(100)
    difference = (model.native().forward([rows(tokens)]) - model.expected(tokens)).abs().amax(-1)
    assert difference.median() < 0.1


PLACEMENTS: list[dict[str, object]] = [
    {},
    {"redundant": 4},
    {"redundant": 4, "ranks": 2},
    {"redundant": 4, "ranks": 3, "dynamic": True},
    {"redundant": 7, "ranks": 1, "dynamic": True},
]


def same_bits(model: SparseModel, tokens: list[int], threads: int, cuts: tuple[int, ...]) -> Tensor:
    """Return the logits of a prompt that is computed in the chunks between `cuts`, beside another sequence."""
    decoder, found = model.native(threads), []
    for number, (start, stop) in enumerate(itertools.pairwise((0, *cuts, len(tokens)))):
        pieces = [rows(tokens[start:stop], start)]
        if number % 2:
            pieces.append(rows(model.prompt(5, seed=9), 0, first_block=38))
        found.append(decoder.forward(pieces)[: stop - start].clone())
    return torch.cat(found)


@pytest.mark.parametrize("dtype", BOTH)
@pytest.mark.parametrize("name", ["shared", "odd widths"])
def test_a_row_has_the_same_bits_in_any_batch_and_any_placement(name: str, dtype: torch.dtype) -> None:
    config = sparse_config({"count": 8, "shared_ffn": 21}, hidden=75) if name == "odd widths" else SHAPES[name]
    tokens = SparseModel(config, dtype).prompt(90)
    whole = same_bits(SparseModel(config, dtype), tokens, 1, ())
    assert torch.isfinite(whole).all()
    chunks: list[tuple[int, ...]] = [(), (1,), (40,), tuple(range(1, 90)), tuple(range(7, 90, 7))]
    for number, (options, cuts) in enumerate(zip(PLACEMENTS, chunks, strict=True)):
        model = SparseModel(config, dtype, **options)
        for layer in range(2):
            model.slots.place(layer, random_row(model.shape, 10 * number + layer))
        for threads in (1, 2, 3):
            assert torch.equal(same_bits(model, tokens, threads, cuts), whole), (options, cuts, threads)


def test_many_rows_of_one_expert_take_several_blocks() -> None:
    config = sparse_config({"count": 2, "per_token": 2, "shared_ffn": 64})
    model = SparseModel(config)
    tokens = model.prompt(500)
    whole = model.native(2).forward([rows(tokens)]).clone()
    torch.testing.assert_close(whole, model.expected(tokens), rtol=1e-3, atol=1e-3)
    assert torch.equal(same_bits(model, tokens, 3, (3, 9, 200)), whole)


def record(decoder: NativeDecoder, tokens: list[int]) -> tuple[Tensor, Tensor]:
    decoder.records_routing = True
    decoder.forward([rows(tokens)])
    experts, slots = decoder.routing
    return experts, slots


@pytest.mark.parametrize("dynamic", [False, True])
def test_native_and_torch_route_alike_and_record_it(dynamic: bool) -> None:
    model = SparseModel(SHAPES["plain"], redundant=4, ranks=2, dynamic=dynamic)
    for layer in range(2):
        model.slots.place(layer, random_row(model.shape, layer))
    tokens = model.prompt(60)
    experts, slots = record(model.native(), tokens)
    _, routed = model.computed(tokens)
    assert torch.equal(experts, torch.stack([layer.experts for layer in routed]).int())
    assert torch.equal(slots, torch.stack([layer.slots for layer in routed]))
    layout = torch.tensor(model.slots.layout)
    assert torch.equal(layout.gather(1, slots.flatten(1).long()).view(slots.shape).int(), experts)


def test_dynamic_dispatch_uses_the_copies_of_an_expert_in_turn() -> None:
    model = SparseModel(SHAPES["plain"], redundant=4, ranks=2, dynamic=True)
    experts, slots = record(model.native(), model.prompt(60))
    for layer, row in enumerate(model.slots.layout):
        for expert in range(8):
            used = slots[layer][experts[layer] == expert].tolist()
            copies = [slot for slot, content in enumerate(row) if content == expert]
            assert used == list(itertools.islice(itertools.cycle(copies), len(used)))


def test_static_dispatch_prefers_the_copy_on_the_rank_of_a_position() -> None:
    model = SparseModel(SHAPES["plain"], redundant=4, ranks=2)
    experts, slots = record(model.native(), model.prompt(60))
    for layer, row in enumerate(model.slots.layout):
        for position, use in itertools.product(range(60), range(3)):
            expert, slot = int(experts[layer, position, use]), int(slots[layer, position, use])
            ranks = {at // 6 for at, content in enumerate(row) if content == expert}
            assert slot // 6 == position % 2 or position % 2 not in ranks


def test_routing_is_recorded_only_while_it_is_wanted() -> None:
    model = SparseModel(SHAPES["plain"])
    decoder = model.native()
    recorded = record(decoder, model.prompt(9))[0].clone()
    decoder.records_routing = False
    decoder.forward([rows(model.prompt(30, seed=5))])
    assert torch.equal(decoder.routing[0], recorded)
    assert recorded.shape == (2, 9, 3)


@pytest.mark.parametrize("dtype", BOTH)
@pytest.mark.parametrize("place", ["router", "gate_up", "down", "shared_gate"])
def test_nan_in_the_weights_reaches_every_logit(place: str, dtype: torch.dtype) -> None:
    model = SparseModel(SHAPES["shared"], dtype)
    decoder, tokens = model.native(), model.prompt(4)
    assert torch.isfinite(decoder.forward([rows(tokens)])).all()
    experts = model.weights.layers[0].experts
    assert experts is not None
    getattr(experts, place).fill_(math.nan)
    assert torch.isnan(decoder.forward([rows(tokens)])).all()


def test_one_nan_row_leaves_the_others_alone() -> None:
    model = SparseModel(sparse_config(tied=False))
    decoder, good = model.native(), [3, 5, 7, 11]
    clean = decoder.forward([rows(good)]).clone()
    model.weights.embed[90] = math.nan
    logits = decoder.forward([rows([90, 1], 0, 10), rows(good)])
    assert torch.isnan(logits[:2]).all()
    assert torch.equal(logits[2:], clean)
