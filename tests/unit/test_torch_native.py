"""The native decode step: the maths of the models, bit-equal rows in any batch, and refusals."""

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

from baton.engines.torch.models.config import LlamaConfig, Rope  # noqa: E402
from baton.engines.torch.models.llama import Layer, Weights  # noqa: E402
from baton.engines.torch.native.build import load_decoder_library  # noqa: E402
from baton.engines.torch.native.decoder import NativeDecoder  # noqa: E402

BOTH = [torch.float32, torch.bfloat16]


def need_library() -> None:
    if load_decoder_library() is None:
        pytest.skip("no native decode step on this machine")


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
        picked = ([column[row] for row in rows] for column in (self.tokens, self.positions, self.tables))
        return decoder.forward(*picked).clone()

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
    one_by_one = torch.cat([case.decoder().forward([t], [p], [table]).clone() for p, t in enumerate(tokens)])
    written, case.kv = case.kv, torch.zeros_like(case.kv)
    at_once = case.decoder().forward(tokens, list(range(20)), [table] * 20)
    assert torch.equal(at_once, one_by_one)
    assert torch.equal(case.kv[:, :, table], written[:, :, table])


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
        logits = decoder.forward(tokens[-1:], [position], case.tables)[0]
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
    assert Case(shape(), torch.float32, [3]).decoder().forward([], [], []).shape == (0, 321)


@pytest.mark.parametrize(
    ("tokens", "positions", "tables"),
    [([321], [0], [[0]]), ([-1], [0], [[0]]), ([1], [700], [[0] * 99]), ([1], [-1], [[0]]), ([1], [16], [[0]])],
)
def test_rows_out_of_range_are_refused(tokens: list[int], positions: list[int], tables: list[list[int]]) -> None:
    with pytest.raises(ValueError):
        Case(shape(), torch.float32, [3]).decoder().forward(tokens, positions, tables)


@pytest.mark.parametrize("block", [-1, 4])
def test_blocks_out_of_range_are_refused_and_nothing_is_written(block: int) -> None:
    case = Case(shape(), torch.float32, [3])
    before = case.kv.clone()
    with pytest.raises(ValueError, match="block"):
        case.decoder().forward([1, 1], [3, 3], [[0], [block]])
    assert torch.equal(case.kv, before)


def test_tensors_that_do_not_fit_are_refused_by_name() -> None:
    case = Case(shape(), torch.float32, [3])
    for wrong in (case.weights.norm.double(), case.weights.norm[:-1], case.weights.norm.repeat(2)[::2]):
        with pytest.raises(ValueError, match="norm"):
            case.decoder().bind(case.weights._replace(norm=wrong), case.kv)
    case.kv = case.kv.half()
    with pytest.raises(ValueError, match="float16"):
        case.decoder()


LOAD = "from baton.engines.torch.native.build import load_decoder_library as load; print(load() is not None)"


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
from test_torch_native import Case, SHAPES, shape
for name in ("llama", "odd heads", "odd widths"):
    for dtype, near in ((torch.float32, 1e-4), (torch.bfloat16, 0.05)):
        case = Case(shape(**SHAPES[name]), dtype, [0, 15, 128, 400])
        logits = case.step(case.decoder(), [0, 1, 2, 3])
        for row in range(4):
            torch.testing.assert_close(logits[row], case.reference(row), rtol=near, atol=near)
            assert torch.equal(case.step(case.decoder(1), [row])[0], logits[row])
print("agrees")
"""


@pytest.mark.slow
@pytest.mark.skipif(os.uname().machine != "x86_64", reason="the flags are of x86-64")
@pytest.mark.parametrize("target", ["x86-64", "x86-64-v3"])
def test_code_for_older_cpus_agrees_too(target: str, tmp_path: Path) -> None:
    need_library()
    environment = {"CXXFLAGS": f"-march={target}", "PYTHONPATH": str(Path(__file__).parent)}
    assert load_elsewhere(tmp_path, PORTABLE, **environment).startswith("agrees")
