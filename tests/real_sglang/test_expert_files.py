"""Records and layouts of the built-in engine's experts, taken by SGLang's own readers."""

from pathlib import Path
from typing import Any

import pytest
import torch

from baton.config.engines import ExpertOptions, SglangOptions
from baton.engines.sglang.launch_mode import LaunchMode
from baton.engines.sglang.server_args import check_arguments, make_server_args
from baton.experts.files import read_counts, write_layout
from baton.experts.placement import Shape, plan
from baton.protocol.commands import DumpExpertRecord, StartExpertRecord
from baton.testing import run_bounded
from tests.doubles.tiny_models import make_tiny_model
from tests.real_sglang.hardware import SMALL
from tests.torch.torch_sessions import session

pytestmark = pytest.mark.filterwarnings("ignore")  # SGLang's modules warn about what a CPU lacks

EXPERTS, LAYERS, RANKS, REDUNDANT = 8, 3, 2, 4


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model whose second layer has no experts."""
    sizes = {"num_experts": EXPERTS, "num_hidden_layers": LAYERS, "mlp_only_layers": [1]}
    return make_tiny_model(tmp_path_factory.mktemp("moe"), "qwen3_moe", **sizes)


def record(model: Path, mode: Any, directory: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the file that the built-in engine writes for one request, in `directory`."""
    monkeypatch.setenv("SGLANG_EXPERT_DISTRIBUTION_RECORDER_DIR", str(directory))

    async def body() -> str:
        options = ExpertOptions(recorder=mode, ranks=RANKS, redundant=REDUNDANT)
        async with session(model, experts=options) as here:
            await here.execute(StartExpertRecord())
            await here.generate(tokens=6)
            return str((await here.execute(DumpExpertRecord())).path)

    return Path(run_bounded(body(), 120))


def initial_location(model: Path, layout: Path) -> Any:
    """Return where SGLang, started with this layout, puts the experts."""
    from sglang.srt.configs.model_config import ModelConfig
    from sglang.srt.eplb.expert_location import compute_initial_expert_location_metadata
    from sglang.srt.runtime_context import create_context, use_context

    parallel = ("--tp-size", str(RANKS), "--ep-size", str(RANKS))
    experts = ExpertOptions(layout=str(layout), redundant=REDUNDANT, dispatch="dynamic")
    arguments = check_arguments(LaunchMode(), SglangOptions(), (*SMALL, *parallel), model, "tiny", experts)
    server_args: Any = make_server_args(arguments, {})
    with use_context(create_context(server_args, role="scheduler")):
        return compute_initial_expert_location_metadata(ModelConfig.from_server_args(server_args), moe_ep_rank=0)


@pytest.mark.parametrize("mode", ["per_pass", "per_token"])
def test_sglangs_reader_takes_records(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mode: str) -> None:
    from sglang.srt.eplb.eplb_simulator.reader import (
        convert_global_physical_count_to_logical_count,
        read_mode_per_pass,
    )

    counts = read_counts(record(model, "stat", tmp_path / "stat", monkeypatch))
    record(model, mode, tmp_path / mode, monkeypatch)
    content = read_mode_per_pass(tmp_path / mode)
    slots, layout = content["global_physical_count_of_forward_pass"], content["last_physical_to_logical_map"]
    assert slots.shape == (6, LAYERS, EXPERTS + REDUNDANT)
    logical = convert_global_physical_count_to_logical_count(slots, LAYERS, EXPERTS, layout)
    assert logical.sum(0).tolist() == counts


def test_sglang_plans_from_our_counts(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    location = initial_location(model, record(model, "stat", tmp_path, monkeypatch))
    assert location.physical_to_logical_map.shape == (LAYERS, EXPERTS + REDUNDANT)
    assert (location.num_logical_experts, location.ep_size) == (EXPERTS, RANKS)
    for row in location.physical_to_logical_map.tolist():
        assert set(row) == set(range(EXPERTS))


@pytest.mark.parametrize("suffix", [".json", ".pt"])
def test_sglang_starts_with_our_layout(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, suffix: str
) -> None:
    counts = read_counts(record(model, "stat", tmp_path, monkeypatch))
    layout = plan(counts, Shape(experts=EXPERTS, redundant=REDUNDANT, ranks=RANKS))
    write_layout(tmp_path / f"layout{suffix}", layout)
    location = initial_location(model, tmp_path / f"layout{suffix}")
    assert torch.equal(location.physical_to_logical_map.cpu(), torch.tensor(layout))
