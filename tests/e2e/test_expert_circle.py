"""Experts of the built-in engine over HTTP: record, dump, plan and restart; and rebalancing while requests run."""

import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")

from tests.doubles.tiny_models import make_tiny_model
from tests.e2e.harness import BATON, Serve, environment

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.timeout(300)]

RANKS = 4
FLAGS = ("--torch-dtype", "float32", "--torch-threads", "1", "--no-torch-prefix-cache")
EXPERTS = ("--experts-ranks", str(RANKS), "--experts-report", "prometheus")
PROMPTS = [letter * length for letter in "ab" for length in (100, 200, 300)]  # few different tokens use few experts


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("moe")
    return make_tiny_model(directory, "qwen3_moe", num_experts=16, num_experts_per_tok=2, num_hidden_layers=2)


def texts(serve: Serve) -> list[str]:
    """Return the answers to the skewed traffic, sent one after the other: what shares a pass changes its balance."""

    def answer(prompt: str) -> str:
        done = serve.client().completions.create(model="moe", prompt=prompt, max_tokens=2, temperature=0.0)
        return str(done.choices[0].text)

    return [answer(prompt) for prompt in PROMPTS]


def baton(*arguments: str) -> str:
    done = subprocess.run([BATON, *arguments], env=environment(), capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    return done.stdout


def ctl(serve: Serve, command: str) -> str:
    return baton("ctl", str(serve.system_ports[0]), command)


def balancedness(serve: Serve) -> float:
    return serve.metric("baton_experts_balancedness_ratio")


def test_a_recorded_planned_and_applied_layout_balances_better(
    start: Callable[..., Serve], model: Path, tmp_path: Path
) -> None:
    common: dict[str, Any] = {
        "engine": "torch",
        "settings": {"SGLANG_EXPERT_DISTRIBUTION_RECORDER_DIR": str(tmp_path / "records")},
    }
    flags = ("--model", str(model), "--name", "moe", *FLAGS, *EXPERTS)
    serve = start(Serve, *flags, "--experts-recorder", "stat", **common)
    ctl(serve, "experts/record/start")
    before = texts(serve)
    assert "passes written" in ctl(serve, "experts/record/dump")
    uneven = balancedness(serve)
    serve.stop()

    (dump,) = (tmp_path / "records").glob("expert_distribution_recorder_*.pt")
    layout = tmp_path / "layout.json"
    baton("experts", "plan", str(dump), "--ranks", str(RANKS), "--redundant", "8", "--out", str(layout))

    serve = start(Serve, *flags, "--experts-layout", str(layout), "--experts-redundant", "8", **common)
    assert texts(serve) == before
    assert balancedness(serve) > uneven
    serve.stop()


def test_experts_are_rebalanced_while_requests_run(start: Callable[..., Serve], model: Path) -> None:
    flags = ("--model", str(model), "--name", "moe", *FLAGS, *EXPERTS, "--experts-redundant", "8")
    eplb = ("--experts-eplb", "--experts-interval", "100", "--experts-layers-per-chunk", "1")
    serve = start(Serve, *flags, *eplb, engine="torch")
    before = texts(serve)
    uneven = balancedness(serve)
    assert serve.metric("baton_experts_rebalances_total") == 0
    while not serve.metric("baton_experts_rebalances_total", outcome="moved"):
        assert texts(serve) == before
    assert serve.metric("baton_experts_moved_slots_total") > 0
    for _ in range(4):
        assert texts(serve) == before
    assert balancedness(serve) > uneven
    serve.stop()
