"""The native step on 64-bit ARM, emulated: it compiles, agrees with torch, and rows do not depend on their batch."""

import itertools
from pathlib import Path

import pytest
import torch

from tests.torch.arm.emulated import build, compute
from tests.torch.sparse_models import SparseModel, rows, sparse_config
from tests.torch.test_native import SHAPES, Prompt, shape

pytestmark = pytest.mark.slow

# The oldest CPUs of this kind, and one with wider vectors and products of bfloat16, of which the step uses neither yet.
TARGETS = ["armv8-a", "armv8.6-a+sve"]


@pytest.fixture(scope="module", params=TARGETS)
def program(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build(tmp_path_factory.mktemp("arm"), request.param)


def computed(program: Path, prompt: Prompt, *cuts: int) -> torch.Tensor:
    edges = [0, *cuts, prompt.length]
    steps = [prompt.rows(start, stop) for start, stop in itertools.pairwise(edges)]
    return compute(program, prompt.config, prompt.weights, prompt.kv, (prompt.cos, prompt.sin), steps)


@pytest.mark.parametrize("name", SHAPES)
def test_a_prompt_in_float32_equals_a_torch_forward(program: Path, name: str) -> None:
    prompt = Prompt(shape(**SHAPES[name]), torch.float32, 37, 4)
    torch.testing.assert_close(computed(program, prompt, 20, 21), prompt.reference(), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_every_way_to_cut_a_prompt_gives_the_same_bits(program: Path, dtype: torch.dtype) -> None:
    whole, *others = (
        computed(program, Prompt(shape(), dtype, 60), *cuts) for cuts in ((), (1,), (7, 8), tuple(range(1, 60)))
    )
    difference = (whole - Prompt(shape(), dtype, 60).reference()).abs().max()
    assert difference < (1e-3 if dtype == torch.float32 else 0.2)
    for other in others:
        assert torch.equal(other, whole)


def test_experts_in_float32_equal_a_torch_forward(program: Path) -> None:
    model = SparseModel(sparse_config({"shared_ffn": 56}), redundant=4, ranks=2)
    tokens = model.prompt(50)
    found = compute(program, model.config, model.weights, model.kv, model.angles, [rows(tokens)], model.slots)
    torch.testing.assert_close(found, model.expected(tokens), rtol=1e-3, atol=1e-3)
