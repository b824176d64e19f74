"""Mixture-of-experts models in the built-in engine: files, new weights, memory, and experts that move meanwhile."""

import json
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from safetensors.torch import load_file, save_file  # noqa: E402

from baton.config.engines import ExpertOptions, TorchOptions  # noqa: E402
from baton.engines.torch.core import Core  # noqa: E402
from baton.engines.torch.models.config import read_llama_config  # noqa: E402
from baton.engines.torch.runner import Runner  # noqa: E402
from baton.engines.torch.sampling_params import make_sampling_params  # noqa: E402
from baton.engines.torch.sequence import Sequence  # noqa: E402
from baton.errors import ConfigError, InvalidRequest  # noqa: E402
from baton.models.defaults import SamplingDefaults  # noqa: E402
from baton.ports.engine import Work  # noqa: E402
from baton.protocol.commands import (  # noqa: E402
    FromDisk,
    FromTensors,
    InlineTensor,
    ReleaseMemory,
    ResumeMemory,
    StartExpertRecord,
    StopExpertRecord,
    UpdateWeights,
)
from baton.protocol.ids import RequestId  # noqa: E402
from baton.protocol.requests import Sampling, StopConditions  # noqa: E402
from baton.testing import run_bounded  # noqa: E402
from tests.doubles.tiny_models import make_tiny_model  # noqa: E402
from tests.torch.sparse_models import random_row  # noqa: E402
from tests.torch.torch_sessions import fresh_answer, session  # noqa: E402

BACKENDS: dict[str, dict[str, Any]] = {
    "native": {"device": "cpu", "threads": 2, "native": True},
    "torch": {"device": "cpu", "threads": 1, "native": False},
}
if torch.cuda.is_available():
    BACKENDS["cuda"] = {"device": "cuda"}
EXPERTS = ExpertOptions(redundant=4, ranks=3)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("old"), "qwen2_moe", num_hidden_layers=2)


@pytest.fixture(scope="module")
def other(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("new"), "qwen2_moe", seed=1, num_hidden_layers=2)


@pytest.fixture(scope="module")
def fused(other: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The model `other` with one tensor for all experts of a kind."""
    directory = tmp_path_factory.mktemp("fused")
    for name in ("config.json", "tokenizer.json", "tokenizer_config.json"):
        (directory / name).write_bytes((other / name).read_bytes())
    save_file(fuse(load_file(other / "model.safetensors")), directory / "model.safetensors")
    return directory


def fuse(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    found = {name: tensor for name, tensor in tensors.items() if ".mlp.experts." not in name}
    for layer in range(2):
        prefix = f"model.layers.{layer}.mlp.experts."
        gates, ups, downs = (
            [tensors[f"{prefix}{expert}.{kind}_proj.weight"] for expert in range(8)] for kind in ("gate", "up", "down")
        )
        merged = [torch.cat(pair) for pair in zip(gates, ups, strict=True)]
        found[prefix + "gate_up_proj"], found[prefix + "down_proj"] = torch.stack(merged), torch.stack(downs)
    return found


def core_for(directory: Path, backend: str, **experts: Any) -> Core:
    options = TorchOptions(
        dtype="float32", block_size=4, blocks=64, batch_tokens=13, max_running=4, **BACKENDS[backend]
    )
    runner = Runner(options, directory, lambda *_: None, experts=ExpertOptions(**experts))
    core = Core(runner, options)
    for name, length in (("a", 30), ("b", 1), ("c", 17)):
        work = Work(
            request_id=RequestId(name),
            token_ids=tuple((7 * length + 5 * number) % 250 for number in range(length)),
            max_tokens=12,
            sampling=Sampling(temperature=0.0),
            stop=StopConditions(max_tokens=12, ignore_eos=True),
        )
        core.add([Sequence(work, 0, make_sampling_params(work, SamplingDefaults(), 300), len(core.requests))])
    return core


def generate(core: Core, rebalances: bool = False) -> dict[str, list[int]]:
    """Run all requests to their ends, with experts that move between two steps; return the tokens of each."""
    found: dict[str, list[int]] = {}
    slots, seeds = core.runner.slots, iter(range(1000))
    while core.busy:
        core.step()
        result = core.take_result()
        for sampled in result.sampled if result else ():
            found.setdefault(sampled.request_id, []).append(sampled.token)
        if rebalances and slots is not None:
            for layer in range(len(slots.layout)):
                slots.place(layer, random_row(slots.shape, next(seeds)))
    return found


@pytest.mark.parametrize("backend", BACKENDS)
def test_tokens_do_not_depend_on_where_experts_are(model: Path, backend: str) -> None:
    expected = generate(core_for(model, backend))
    assert [len(tokens) for tokens in expected.values()] == [12, 12, 12]
    for options in ({"ranks": 2}, {"redundant": 4, "ranks": 3}, {"redundant": 2, "ranks": 5, "dispatch": "dynamic"}):
        assert generate(core_for(model, backend, **options), rebalances=True) == expected, options


@pytest.mark.parametrize("backend", BACKENDS)
def test_routing_has_a_row_for_each_token_of_a_step(model: Path, backend: str) -> None:
    core = core_for(model, backend, redundant=4, ranks=3, recorder="stat")
    core.execute(StartExpertRecord())
    core.step()
    routing = core.runner.routing
    assert routing is not None
    assert routing.experts.dtype == routing.slots.dtype == torch.int32
    assert routing.experts.shape == routing.slots.shape == (2, 13, 3)
    assert core.runner.slots is not None
    layout = torch.tensor(core.runner.slots.layout, device=routing.slots.device)
    assert torch.equal(layout.gather(1, routing.slots.flatten(1).long()).int(), routing.experts.flatten(1))
    core.execute(StopExpertRecord())
    core.step()
    assert core.runner.routing is None


def test_files_with_one_tensor_for_all_experts_are_the_same_model(other: Path, fused: Path) -> None:
    async def body() -> None:
        assert await fresh_answer(fused) == await fresh_answer(other)

    run_bounded(body())


def inline(tensors: dict[str, torch.Tensor]) -> FromTensors:
    return FromTensors(
        tensors=tuple(
            InlineTensor(
                name=name,
                dtype="float32",
                shape=tuple(tensor.shape),
                data=tensor.contiguous().view(torch.uint8).numpy().tobytes(),
            )
            for name, tensor in tensors.items()
        )
    )


@pytest.mark.parametrize("form", ["disk", "fused disk", "tensors", "fused tensors"])
def test_new_weights_after_a_rebalance(model: Path, other: Path, fused: Path, form: str) -> None:
    """Experts move between the start of an update, which another thread prepares, and its end."""
    expected = generate(core_for(other, "native"))
    directory = fused if form.startswith("fused") else other
    source = FromDisk(path=str(directory))
    tensors = inline(load_file(directory / "model.safetensors"))
    core = core_for(model, "native", redundant=4, ranks=3)
    slots = core.runner.slots
    assert slots is not None
    slots.place(0, random_row(slots.shape, 1))
    finish = core.prepare(UpdateWeights(source=source if form.endswith("disk") else tensors, version="2"))
    slots.place(0, random_row(slots.shape, 2))
    slots.place(1, random_row(slots.shape, 3))
    finish()
    assert generate(core, rebalances=True) == expected


def test_tensors_of_experts_that_do_not_fit_are_refused(model: Path) -> None:
    core = core_for(model, "native")
    wrong = {
        r"experts.8.gate_proj.weight is not a tensor": ("experts.gate_up_proj", (9, 64, 48)),
        r"has shape \[30, 48\]": ("experts.gate_up_proj", (8, 60, 48)),
        r"experts.gate_up_proj is not a tensor": ("experts.gate_up_proj", (8, 63, 48)),
        r"has shape \[48, 31\]": ("experts.3.down_proj.weight", (48, 31)),
    }
    for complaint, (name, shape) in wrong.items():
        source = inline({f"model.layers.0.mlp.{name}": torch.zeros(shape)})
        with pytest.raises(InvalidRequest, match=complaint):
            core.prepare(UpdateWeights(source=source, version="2"))


def test_released_memory_comes_back_with_the_experts_in_their_places(model: Path) -> None:
    async def body() -> None:
        expected = await fresh_answer(model)
        async with session(model, experts=EXPERTS) as here:
            assert await here.generate() == expected
            await here.execute(ReleaseMemory(tags=("kv_cache", "weights")))
            await here.execute(ResumeMemory(tags=("kv_cache", "weights")))
            assert await here.generate() == expected

    run_bounded(body())


def test_expert_settings_are_refused_for_a_dense_model(tmp_path: Path) -> None:
    directory = make_tiny_model(tmp_path, num_hidden_layers=1)
    with pytest.raises(ConfigError, match="the model has no experts"):
        Runner(TorchOptions(blocks=8), directory, lambda *_: None, experts=EXPERTS)


@pytest.mark.parametrize(
    ("field", "value", "complaint"),
    [
        ("num_experts_per_tok", 0, "num_experts_per_tok is missing"),
        ("num_experts_per_tok", 9, "num_experts_per_tok 9 of 8 experts"),
        ("moe_intermediate_size", None, "moe_intermediate_size"),
        ("shared_expert_intermediate_size", 0, "shared_expert_intermediate_size is missing"),
        ("decoder_sparse_step", 0, "decoder_sparse_step is missing"),
        ("scoring_func", "sigmoid", "scoring_func 'sigmoid' is not supported"),
        ("routed_scaling_factor", 2.5, "routed_scaling_factor 2.5 is not supported"),
    ],
)
def test_configurations_that_are_not_supported_are_refused_by_name(
    model: Path, tmp_path: Path, field: str, value: object, complaint: str
) -> None:
    config = json.loads((model / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, field: value}))
    with pytest.raises(ConfigError, match=complaint):
        read_llama_config(tmp_path)


def test_groups_of_experts_are_read_and_limited_routing_is_refused(model: Path, tmp_path: Path) -> None:
    config = json.loads((model / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "n_group": 4}))
    experts = read_llama_config(tmp_path).experts
    assert experts is not None
    assert experts.groups == 4
    (tmp_path / "config.json").write_text(json.dumps({**config, "n_group": 4, "topk_group": 2}))
    with pytest.raises(ConfigError, match="topk_group 2 of 4 groups is not supported"):
        read_llama_config(tmp_path)
