"""The native step: the maths of the models, bit-equal rows in any batch and any chunks, and refusals."""

import itertools
import math
import os
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest

torch = pytest.importorskip("torch")

from torch import Tensor  # noqa: E402
from torch.nn import functional as F  # noqa: E402, N812

from baton.config.engines import TorchOptions  # noqa: E402
from baton.engines.torch.core import Core  # noqa: E402
from baton.engines.torch.models.config import LlamaConfig, Rope  # noqa: E402
from baton.engines.torch.models.llama import Layer, LlamaModel, Span, Step, Weights  # noqa: E402
from baton.engines.torch.native.decoder import NativeDecoder, Rows  # noqa: E402
from baton.engines.torch.native.library import load_decoder_library  # noqa: E402
from baton.engines.torch.runner import Runner  # noqa: E402
from baton.engines.torch.sampling_params import make_sampling_params  # noqa: E402
from baton.engines.torch.sequence import Sequence  # noqa: E402
from baton.models.defaults import SamplingDefaults  # noqa: E402
from baton.ports.engine import Work  # noqa: E402
from baton.protocol.ids import RequestId  # noqa: E402
from baton.protocol.requests import OutputOptions, Sampling, StopConditions  # noqa: E402
from tests.doubles.tiny_models import make_tiny_model  # noqa: E402

BOTH = [torch.float32, torch.bfloat16]


def need_library() -> None:
    if load_decoder_library() is None:
        pytest.skip("no native step on this machine")


def shape(**changes: object) -> LlamaConfig:
    plain = LlamaConfig(
        family="llama",
        vocab=321,
        hidden=64,
        ffn=96,
        layers=2,
        heads=6,
        kv_heads=2,
        head_dim=16,
        eps=1e-5,
        context=700,
        theta=10000.0,
        rope=Rope(),
        tied=True,
        qkv_bias=False,
        o_bias=False,
        qk_norm=False,
    )
    return msgspec.structs.replace(plain, **changes)


def random_weights(config: LlamaConfig, dtype: torch.dtype) -> Weights:
    source = torch.Generator().manual_seed(7)

    def matrix(rows: int, columns: int) -> Tensor:
        return (torch.randn(rows, columns, generator=source) / math.sqrt(columns)).to(dtype)

    def vector(size: int, mean: float, wanted: bool = True) -> Tensor | None:
        return (mean + 0.2 * torch.randn(size, generator=source)).to(dtype) if wanted else None

    qkv = config.q_size + 2 * config.kv_size
    layers = tuple(
        Layer(
            input_norm=vector(config.hidden, 1.0),
            qkv=matrix(qkv, config.hidden),
            qkv_bias=vector(qkv, 0.0, config.qkv_bias),
            q_norm=vector(config.head_dim, 1.0, config.qk_norm),
            k_norm=vector(config.head_dim, 1.0, config.qk_norm),
            o=matrix(config.hidden, config.q_size),
            o_bias=vector(config.hidden, 0.0, config.o_bias),
            post_norm=vector(config.hidden, 1.0),
            gate_up=matrix(2 * config.ffn, config.hidden),
            down=matrix(config.hidden, config.ffn),
        )
        for _ in range(config.layers)
    )
    embed = matrix(config.vocab, config.hidden)
    head = embed if config.tied else matrix(config.vocab, config.hidden)
    return Weights(embed, layers, vector(config.hidden, 1.0), head)


def angles(config: LlamaConfig) -> tuple[Tensor, Tensor]:
    frequencies = config.theta ** (-torch.arange(0, config.head_dim, 2) / config.head_dim)
    turns = torch.arange(config.context)[:, None] * frequencies
    return turns.cos(), turns.sin()


class Case:
    """A random model with a cache full of random keys and values, and rows at given positions."""

    def __init__(self, config: LlamaConfig, dtype: torch.dtype, positions: list[int], block: int = 16) -> None:
        self.config, self.positions = config, positions
        self.weights = random_weights(config, dtype)
        self.cos, self.sin = angles(config)
        source = torch.Generator().manual_seed(11)
        used = [position // block + 1 for position in positions]
        order = iter(torch.randperm(sum(used) + 3, generator=source).tolist())
        self.tables = [list(itertools.islice(order, count)) for count in used]
        self.tokens = torch.randint(config.vocab, (len(positions),), generator=source).tolist()
        sizes = (config.layers, 2, sum(used) + 3, block, config.kv_heads, config.head_dim)
        self.kv = torch.randn(sizes, generator=source).to(dtype)

    def decoder(self, threads: int = 2) -> NativeDecoder:
        need_library()
        return NativeDecoder(self.config, self.weights, self.kv, self.cos, self.sin, threads)

    def step(self, decoder: NativeDecoder, rows: list[int]) -> Tensor:
        return decoder.forward([Rows([self.tokens[r]], self.positions[r], self.tables[r]) for r in rows]).clone()

    def reference(self, row: int) -> Tensor:
        """Return one row's logits, in float32, leaving the cache as it is."""
        config, position, table = self.config, self.positions[row], self.tables[row]
        block = self.kv.shape[3]
        slots = torch.tensor([table[p // block] * block + p % block for p in range(position + 1)])
        x = self.weights.embed[self.tokens[row]].float()
        for layer, cache in zip(self.weights.layers, self.kv.float(), strict=True):
            wide = Layer(*(None if tensor is None else tensor.float() for tensor in layer))
            normed = F.rms_norm(x, x.shape, wide.input_norm, config.eps)
            qkv = F.linear(normed, wide.qkv, wide.qkv_bias).view(-1, config.head_dim)
            q, k, v = qkv.split((config.heads, config.kv_heads, config.kv_heads))
            if wide.q_norm is not None:
                q = F.rms_norm(q, q.shape[1:], wide.q_norm, config.eps)
                k = F.rms_norm(k, k.shape[1:], wide.k_norm, config.eps)
            keys, values = (part.flatten(0, 1)[slots].transpose(0, 1).clone() for part in cache)
            keys[:, -1], values[:, -1] = self._turned(k, position), v
            group = config.heads // config.kv_heads
            queries = self._turned(q, position).view(config.kv_heads, group, config.head_dim)
            attended = F.scaled_dot_product_attention(queries[None], keys[None], values[None])
            x = x + F.linear(attended.flatten(), wide.o, wide.o_bias)
            gate, up = F.linear(F.rms_norm(x, x.shape, wide.post_norm, config.eps), wide.gate_up).chunk(2)
            x = x + F.linear(F.silu(gate) * up, wide.down)
        normed = F.rms_norm(x, x.shape, self.weights.norm.float(), config.eps)
        return F.linear(normed, self.weights.head.float())

    def _turned(self, heads: Tensor, position: int) -> Tensor:
        a, b = heads.chunk(2, -1)
        cos, sin = self.cos[position], self.sin[position]
        return torch.cat((a * cos - b * sin, b * cos + a * sin), -1)


SHAPES = {
    "llama": {},
    "untied": {"tied": False},
    "qwen2": {"qkv_bias": True, "heads": 7, "kv_heads": 1},
    "qwen3": {"qk_norm": True, "head_dim": 128},
    "llama with bias": {"qkv_bias": True, "o_bias": True, "kv_heads": 6},
    "odd widths": {"hidden": 75, "ffn": 101, "vocab": 97},
    "odd heads": {"head_dim": 80, "hidden": 50, "heads": 4, "kv_heads": 2},
    "tiny heads": {"head_dim": 6, "hidden": 20, "ffn": 10, "vocab": 3},
    "wide": {"hidden": 576, "ffn": 1536, "heads": 9, "kv_heads": 3, "head_dim": 64, "vocab": 1001},
}


@pytest.mark.parametrize("name", SHAPES)
@pytest.mark.parametrize("block", [1, 16])
def test_float32_logits_equal_a_plain_torch_forward(name: str, block: int) -> None:
    case = Case(shape(**SHAPES[name]), torch.float32, [0, 1, 15, 16, 100, 127, 128, 400], block)
    wanted = torch.stack([case.reference(row) for row in range(8)])
    logits = case.step(case.decoder(), list(range(8)))
    torch.testing.assert_close(logits, wanted, rtol=1e-4, atol=1e-4)
    assert logits.argmax(-1).tolist() == wanted.argmax(-1).tolist()


@pytest.mark.parametrize("name", SHAPES)
def test_bfloat16_logits_are_near_a_float32_forward(name: str) -> None:
    case = Case(shape(**SHAPES[name]), torch.bfloat16, [0, 1, 15, 16, 100, 127, 128, 400])
    wanted = torch.stack([case.reference(row) for row in range(8)])
    logits = case.step(case.decoder(), list(range(8)))
    torch.testing.assert_close(logits, wanted, rtol=0.05, atol=0.05)


@pytest.mark.parametrize("dtype", BOTH)
@pytest.mark.parametrize("name", ["llama", "odd widths", "wide"])
def test_a_row_is_bit_equal_alone_and_in_any_batch_with_any_threads(name: str, dtype: torch.dtype) -> None:
    case = Case(shape(**SHAPES[name]), dtype, [(37 * row) % 300 for row in range(33)])
    one, two = case.decoder(1), case.decoder(2)
    alone = torch.cat([case.step(one, [row]) for row in range(33)])
    for size in range(1, 34):
        for decoder in (one, two):
            assert torch.equal(case.step(decoder, list(range(33 - size, 33))), alone[33 - size :])


@pytest.mark.parametrize("dtype", BOTH)
def test_keys_and_values_written_by_one_step_are_read_by_the_next(dtype: torch.dtype) -> None:
    """Tokens given one by one, and all at once as rows of one sequence, come to the same."""
    case = Case(shape(qk_norm=True), dtype, [0] * 20, block=4)
    table, tokens = [5, 1, 8, 3, 2], case.tokens
    one_by_one = torch.cat([case.decoder().forward([Rows([t], p, table)]).clone() for p, t in enumerate(tokens)])
    written, case.kv = case.kv, torch.zeros_like(case.kv)
    at_once = case.decoder().forward([Rows([t], p, table) for p, t in enumerate(tokens)])
    assert torch.equal(at_once, one_by_one)
    assert torch.equal(case.kv[:, :, table], written[:, :, table])


class Prompt:
    """A random model, an empty cache, and a prompt for it: one sequence in blocks that lie in no order.

    Each token sees the tokens up to the end of its block of `seen` tokens.
    """

    seen = 1

    def __init__(self, config: LlamaConfig, dtype: torch.dtype, length: int, block: int = 16) -> None:
        self.config, self.length, self.block = config, length, block
        self.weights = random_weights(config, dtype)
        self.cos, self.sin = angles(config)
        source = torch.Generator().manual_seed(length)
        count = -(-length // block)
        self.table = torch.randperm(count + 2, generator=source)[:count].tolist()
        self.tokens = torch.randint(config.vocab, (length,), generator=source).tolist()
        # What was never written is not a number: whoever reads it fails.
        sizes = (config.layers, 2, count + 2, block, config.kv_heads, config.head_dim)
        self.kv = torch.full(sizes, math.nan, dtype=dtype)

    def decoder(self, threads: int = 2) -> NativeDecoder:
        need_library()
        return NativeDecoder(self.config, self.weights, self.kv, self.cos, self.sin, threads)

    def rows(self, start: int, stop: int) -> Rows:
        return Rows(self.tokens[start:stop], start, self.table, block=self.seen)

    def in_chunks(self, decoder: NativeDecoder, *cuts: int) -> Tensor:
        """Compute the prompt in the chunks between `cuts`; return the logits of all rows."""
        edges = [0, *cuts, self.length]
        return torch.cat([decoder.forward([self.rows(*edge)]).clone() for edge in itertools.pairwise(edges)])

    def reference(self) -> Tensor:
        """Return the logits of all rows as torch computes them, in float32."""
        need_library()
        weights = Weights(*(wide(part) for part in self.weights))
        layers, slots = self.config.layers, self.kv.shape[2] * self.block
        kv = torch.zeros(layers, 2, slots, self.config.kv_heads, self.config.head_dim)
        model = LlamaModel(self.config, weights, kv, self.cos, self.sin)
        places = torch.tensor([self.table[p // self.block] * self.block + p % self.block for p in range(self.length)])
        span = Span(0, self.length, 0, places, self.seen)
        return model.logits(
            model.forward(Step(torch.tensor(self.tokens), torch.arange(self.length), places, [span], []))
        )


def wide(part: Tensor | tuple[Layer, ...]) -> Tensor | tuple[Layer, ...]:
    if isinstance(part, Tensor):
        return part.float()
    return tuple(Layer(*(None if tensor is None else tensor.float() for tensor in layer)) for layer in part)


@pytest.mark.parametrize("name", SHAPES)
@pytest.mark.parametrize(("length", "block"), [(1, 16), (3, 1), (37, 4), (128, 16), (129, 16), (301, 1)])
def test_a_prompt_in_float32_equals_a_torch_forward(name: str, length: int, block: int) -> None:
    prompt = Prompt(shape(**SHAPES[name]), torch.float32, length, block)
    logits = prompt.in_chunks(prompt.decoder())
    torch.testing.assert_close(logits, prompt.reference(), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", SHAPES)
def test_a_prompt_in_bfloat16_is_near_a_float32_forward(name: str) -> None:
    prompt = Prompt(shape(**SHAPES[name]), torch.bfloat16, 301)
    torch.testing.assert_close(prompt.in_chunks(prompt.decoder()), prompt.reference(), rtol=0.05, atol=0.06)


@pytest.mark.parametrize("dtype", BOTH)
def test_a_long_prompt_agrees_with_torch(dtype: torch.dtype) -> None:
    prompt = Prompt(shape(**SHAPES["wide"], layers=1, context=2500), dtype, 2300)
    near = 1e-4 if dtype == torch.float32 else 0.06
    torch.testing.assert_close(prompt.in_chunks(prompt.decoder(), 1024, 2048), prompt.reference(), rtol=near, atol=near)


@pytest.mark.parametrize("dtype", BOTH)
@pytest.mark.parametrize(
    ("name", "block"), [("llama", 16), ("qwen2", 4), ("qwen3", 16), ("odd heads", 1), ("wide", 16)]
)
def test_every_way_to_cut_a_prompt_gives_the_same_bits(name: str, block: int, dtype: torch.dtype) -> None:
    prompt = Prompt(shape(**SHAPES[name]), dtype, 299, block)
    whole = prompt.in_chunks(prompt.decoder())
    written = prompt.kv.clone()
    assert torch.isfinite(whole).all()
    splits = [
        [1],
        [298],
        [128],
        [127, 129],
        [3, 6, 9, 130, 131, 132, 260],
        list(range(7, 299, 7)),
        list(range(1, 299)),
    ]
    for threads, cuts in zip((1, 2, 3, 1, 2, 3, 2), splits, strict=True):
        prompt.kv.fill_(math.nan)
        assert torch.equal(prompt.in_chunks(prompt.decoder(threads), *cuts), whole), cuts
        assert torch.equal(prompt.kv.nan_to_num(9), written.nan_to_num(9)), cuts


@pytest.mark.parametrize("dtype", BOTH)
def test_prompts_and_single_tokens_in_one_batch_are_as_they_are_alone(dtype: torch.dtype) -> None:
    """Enough rows for several blocks of them, and pieces of every kind."""
    config = shape(**SHAPES["wide"], layers=1, context=1000)
    case = Case(config, dtype, [610, 5, 128, 300, 19, 900])
    lengths, decoder = [350, 1, 3, 200, 20, 1], case.decoder()
    numbers = torch.Generator().manual_seed(5)
    pieces = [
        Rows(torch.randint(config.vocab, (length,), generator=numbers).tolist(), position + 1 - length, table)
        for length, position, table in zip(lengths, case.positions, case.tables, strict=True)
    ]
    alone = [decoder.forward([piece]).clone() for piece in pieces]
    assert torch.equal(decoder.forward(pieces), torch.cat(alone))
    assert torch.equal(decoder.forward(pieces[::-1]), torch.cat(alone[::-1]))
    lasts = list(itertools.accumulate(lengths))
    last = decoder.forward(pieces, [row - 1 for row in lasts]).clone()
    assert torch.equal(last, torch.stack([logits[-1] for logits in alone]))


def test_logits_are_computed_for_the_rows_that_are_wanted() -> None:
    prompt = Prompt(shape(), torch.bfloat16, 50)
    decoder = prompt.decoder()
    every = prompt.in_chunks(decoder)
    assert decoder.forward([prompt.rows(0, 50)], []).shape == (0, 321)
    assert torch.equal(decoder.score(list(range(50))), every)
    assert torch.equal(decoder.forward([prompt.rows(0, 50)], [49, 0, 7]), every[[49, 0, 7]])
    assert torch.equal(decoder.score([3, 3]), every[[3, 3]])
    assert decoder.score([]).shape == (0, 321)
    for wrong in (-1, 50):
        with pytest.raises(ValueError, match="row"):
            decoder.score([wrong])
        with pytest.raises(ValueError, match="row"):
            decoder.forward([prompt.rows(0, 50)], [0, wrong])


def test_a_prompt_that_is_not_a_number_leaves_the_others_alone() -> None:
    prompt = Prompt(shape(tied=False), torch.bfloat16, 60, block=4)
    bad = next(token for token in range(321) if token not in prompt.tokens)
    prompt.weights.embed[bad] = math.nan
    decoder = prompt.decoder()
    clean = decoder.forward([Rows(prompt.tokens[:30], 0, prompt.table[:8])]).clone()
    pieces = [Rows([bad] * 28, 0, prompt.table[8:]), Rows(prompt.tokens[:30], 0, prompt.table[:8])]
    logits = decoder.forward(pieces)
    assert torch.isnan(logits[:28]).all()
    assert torch.equal(logits[28:], clean)


@pytest.mark.parametrize("family", ["Llama", "Qwen2", "Qwen3"])
def test_greedy_steps_agree_with_transformers(family: str) -> None:
    transformers = pytest.importorskip("transformers")
    config = shape(qkv_bias=family == "Qwen2", qk_norm=family == "Qwen3", tied=False, hidden=96)
    torch.manual_seed(3)
    model = getattr(transformers, f"{family}ForCausalLM")(
        getattr(transformers, f"{family}Config")(
            vocab_size=config.vocab,
            hidden_size=config.hidden,
            intermediate_size=config.ffn,
            num_hidden_layers=config.layers,
            num_attention_heads=config.heads,
            num_key_value_heads=config.kv_heads,
            head_dim=config.head_dim,
            rms_norm_eps=config.eps,
            max_position_embeddings=config.context,
            initializer_range=0.2,
            tie_word_embeddings=False,
        )
    ).eval()
    case = Case(config, torch.float32, [30])
    case.weights = from_transformers(model, config)
    decoder, tokens = case.decoder(), [9]
    for position in range(24):
        with torch.inference_mode():
            wanted = model(torch.tensor([tokens])).logits[0, -1]
        logits = decoder.forward([Rows(tokens[-1:], position, case.tables[0])])[0]
        torch.testing.assert_close(logits, wanted, rtol=1e-4, atol=1e-4)
        assert logits.argmax() == wanted.argmax()
        tokens.append(int(wanted.argmax()))


def from_transformers(model: torch.nn.Module, config: LlamaConfig) -> Weights:
    state = model.state_dict()

    def layer(number: int) -> Layer:
        def merged(*names: str) -> Tensor | None:
            found = [state.get(f"model.layers.{number}.{name}") for name in names]
            return None if None in found else torch.cat(found)  # type: ignore[arg-type]

        return Layer(
            input_norm=merged("input_layernorm.weight"),
            qkv=merged(*(f"self_attn.{part}_proj.weight" for part in "qkv")),
            qkv_bias=merged(*(f"self_attn.{part}_proj.bias" for part in "qkv")),
            q_norm=merged("self_attn.q_norm.weight"),
            k_norm=merged("self_attn.k_norm.weight"),
            o=merged("self_attn.o_proj.weight"),
            o_bias=merged("self_attn.o_proj.bias"),
            post_norm=merged("post_attention_layernorm.weight"),
            gate_up=merged("mlp.gate_proj.weight", "mlp.up_proj.weight"),
            down=merged("mlp.down_proj.weight"),
        )

    layers = tuple(layer(number) for number in range(config.layers))
    return Weights(state["model.embed_tokens.weight"], layers, state["model.norm.weight"], state["lm_head.weight"])


@pytest.mark.parametrize("dtype", BOTH)
@pytest.mark.parametrize("place", ["qkv", "o", "gate_up", "down", "input_norm"])
def test_nan_in_the_weights_reaches_every_logit(place: str, dtype: torch.dtype) -> None:
    case = Case(shape(), dtype, [3, 200])
    decoder = case.decoder()
    assert torch.isfinite(case.step(decoder, [0, 1])).all()
    getattr(case.weights.layers[0], place).fill_(math.nan)
    assert torch.isnan(case.step(decoder, [0, 1])).all()


def test_one_nan_row_leaves_the_others_alone() -> None:
    case = Case(shape(tied=False), torch.bfloat16, [3, 40, 7])
    decoder = case.decoder()
    clean = case.step(decoder, [0, 1, 2])
    case.tokens[1] = next(token for token in range(9) if token not in case.tokens)
    case.weights.embed[case.tokens[1]] = math.nan
    logits = case.step(decoder, [0, 1, 2])
    assert torch.isnan(logits[1]).all()
    assert torch.equal(logits[[0, 2]], clean[[0, 2]])


def test_bind_moves_to_other_memory() -> None:
    case = Case(shape(), torch.float32, [20])
    decoder = case.decoder()
    before = case.step(decoder, [0])
    moved = Weights(
        case.weights.embed.clone(),
        tuple(Layer(*(None if t is None else t.clone() for t in layer)) for layer in case.weights.layers),
        case.weights.norm.clone(),
        case.weights.head.clone(),
    )
    decoder.bind(moved, case.kv.clone())
    case.weights.embed.zero_()
    case.kv.zero_()
    assert torch.equal(case.step(decoder, [0]), before)


def test_no_rows_give_no_logits() -> None:
    assert Case(shape(), torch.float32, [3]).decoder().forward([]).shape == (0, 321)


@pytest.mark.parametrize(
    "rows",
    [
        Rows([321], 0, [0]),
        Rows([-1], 0, [0]),
        Rows([1], 700, [0] * 99),
        Rows([1, 1], 699, [0] * 99),
        Rows([1], -1, [0]),
        Rows([1], 16, [0]),
        Rows([1, 1], 15, [0]),
        Rows([1], 0, []),
    ],
)
def test_rows_out_of_range_are_refused(rows: Rows) -> None:
    with pytest.raises(ValueError):
        Case(shape(), torch.float32, [3]).decoder().forward([rows])


@pytest.mark.parametrize("block", [-1, 4])
def test_blocks_out_of_range_are_refused_and_nothing_is_written(block: int) -> None:
    case = Case(shape(), torch.float32, [3])
    before = case.kv.clone()
    with pytest.raises(ValueError, match="block"):
        case.decoder().forward([Rows([1], 3, [0]), Rows([1], 3, [block])])
    assert torch.equal(case.kv, before)


def test_tensors_that_do_not_fit_are_refused_by_name() -> None:
    case = Case(shape(), torch.float32, [3])
    for wrong in (case.weights.norm.double(), case.weights.norm[:-1], case.weights.norm.repeat(2)[::2]):
        with pytest.raises(ValueError, match="norm"):
            case.decoder().bind(case.weights._replace(norm=wrong), case.kv)
    case.kv = case.kv.half()
    with pytest.raises(ValueError, match="float16"):
        case.decoder()


def answers(directory: Path, torch_prompts: bool, **options: object) -> dict[str, list[int]]:
    """Let three requests run together in small steps; return the tokens of each."""
    chosen = TorchOptions(device="cpu", threads=2, block_size=4, blocks=64, batch_tokens=13, **options)
    core = Core(Runner(chosen, directory, lambda *_: None, torch_prompts=torch_prompts), chosen)
    for name, length in (("a", 30), ("b", 1), ("c", 17)):
        work = Work(
            request_id=RequestId(name),
            token_ids=tuple((7 * length + 5 * number) % 250 for number in range(length)),
            max_tokens=9,
            sampling=Sampling(temperature=0.0),
            stop=StopConditions(max_tokens=9, ignore_eos=True),
            output=OutputOptions(prompt_logprobs=1 if name == "c" else None),
        )
        core.add([Sequence(work, 0, make_sampling_params(work, SamplingDefaults(), 300), len(core.requests))])
    found: dict[str, list[int]] = {}
    while core.busy:
        core.step()
        result = core.take_result()
        for sampled in result.sampled if result else ():
            found.setdefault(sampled.request_id, []).append(sampled.token)
            if sampled.request_id == "c" and len(found["c"]) == 1:
                assert sampled.prompt_logprobs
                assert len(sampled.prompt_logprobs.chosen) == 16
    return found


def test_prompts_can_be_left_to_torch_while_single_tokens_are_native(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    need_library()
    directory = make_tiny_model(tmp_path)
    expected = answers(directory, True, dtype="float32", native=False)
    assert [len(tokens) for tokens in expected.values()] == [9, 9, 9]
    assert answers(directory, True, dtype="float32") == expected
    assert answers(directory, False, dtype="float32") == expected


LOAD = "from baton.engines.torch.native.library import load_decoder_library as load; print(load() is not None)"


def load_elsewhere(cache: Path, code: str = LOAD, **environment: str) -> str:
    """Run `code` in a process of its own, with its own cache; return what it printed."""
    values = {**os.environ, "XDG_CACHE_HOME": str(cache), **environment}
    done = subprocess.run([sys.executable, "-c", code], env=values, capture_output=True, text=True, check=True)
    return done.stdout + done.stderr


def test_without_a_compiler_there_is_no_library_and_the_log_says_why(tmp_path: Path) -> None:
    said = load_elsewhere(tmp_path, CXX="no-such-compiler")
    assert said.splitlines()[0] == "False"
    assert "no-such-compiler not found" in said


def test_a_failed_compile_gives_no_library_and_leaves_nothing_behind(tmp_path: Path) -> None:
    need_library()
    said = load_elsewhere(tmp_path, CXXFLAGS="--no-such-flag")
    assert said.splitlines()[0] == "False"
    assert "failed with status" in said
    assert not list(tmp_path.rglob("*.so"))


def test_the_library_is_compiled_once_and_then_found(tmp_path: Path) -> None:
    need_library()
    assert load_elsewhere(tmp_path, CXXFLAGS="-O0").startswith("True")
    (built,) = tmp_path.rglob("*.so")
    stamp = built.stat().st_mtime_ns
    assert load_elsewhere(tmp_path, CXXFLAGS="-O0").startswith("True")
    assert [path.stat().st_mtime_ns for path in tmp_path.rglob("*.so")] == [stamp]


PORTABLE = """
import torch
from tests.torch.test_native import Case, Prompt, SHAPES, shape
for name in ("llama", "odd heads", "odd widths"):
    for dtype, near in ((torch.float32, 1e-4), (torch.bfloat16, 0.05)):
        case = Case(shape(**SHAPES[name]), dtype, [0, 15, 128, 400])
        logits = case.step(case.decoder(), [0, 1, 2, 3])
        for row in range(4):
            torch.testing.assert_close(logits[row], case.reference(row), rtol=near, atol=near)
            assert torch.equal(case.step(case.decoder(1), [row])[0], logits[row])
        prompt = Prompt(shape(**SHAPES[name]), dtype, 140)
        whole = prompt.in_chunks(prompt.decoder())
        for cuts in ([1], [3, 6, 9, 130]):
            assert torch.equal(prompt.in_chunks(prompt.decoder(1), *cuts), whole), (name, dtype, cuts)
print("agrees")
"""


@pytest.mark.slow
@pytest.mark.skipif(os.uname().machine != "x86_64", reason="the flags are of x86-64")
@pytest.mark.parametrize(
    "target",
    [
        "-march=x86-64",
        "-march=x86-64-v3",
        # Tuned for this CPU, GCC fuses products into sums in some loops only, unless it is told not to fuse at all.
        "-march=x86-64-v3 -mtune=znver2",
    ],
)
def test_code_for_older_cpus_agrees_too(target: str, tmp_path: Path) -> None:
    need_library()
    root = Path(__file__).parents[4]
    environment = {"CXXFLAGS": target, "PYTHONPATH": f"{root / 'src'}{os.pathsep}{root}"}
    assert load_elsewhere(tmp_path, PORTABLE, **environment).startswith("agrees")
