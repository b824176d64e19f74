"""Experts of the real SGLang: settings through its parser, records, layouts, and rebalancing over two ranks (gloo)."""

import json
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from baton.config.engines import ExpertOptions, SglangOptions
from baton.engines.sglang.launch_mode import LaunchMode
from baton.engines.sglang.server_args import Arguments, check_arguments
from baton.errors import ConfigError
from baton.protocol.commands import DumpExpertRecord, StartExpertRecord, StopExpertRecord
from baton.testing.engine_session import Session
from tests.e2e.harness import Process, Serve, eventually
from tests.real_sglang.engines import Bench, TestedEngine
from tests.real_sglang.hardware import SERVED, SMALL, cores_of_ranks, needs_cpu, needs_two
from tests.real_sglang.moe_model import EXPERTS, LAYERS, make_moe_model
from tests.real_sglang.test_generating import Engines, answer_of, work
from tests.real_sglang.test_serving import STOP, execute, order

pytestmark = [pytest.mark.timeout(600)]

MODEL = "moe"
TWO_RANKS = ("--tp-size", "2", "--ep-size", "2")
PROMPTS = [f"{number}: " + "".join(chr(97 + number * place % 26) for place in range(160)) for number in range(1, 7)]
INTERVAL = 40


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_moe_model(tmp_path_factory.mktemp("models") / MODEL)


@pytest.fixture
def bench() -> Iterator[Bench]:
    made = Bench()
    yield made
    made.close()


def two_ranks(start: Callable[..., Serve], model: Path, records: Path, *experts: str, log: str = "error") -> Serve:
    """Start a worker whose experts are on two ranks."""
    settings = {
        **STOP,
        "SGLANG_CPU_OMP_THREADS_BIND": cores_of_ranks(),
        "SGLANG_EXPERT_DISTRIBUTION_RECORDER_DIR": str(records),
    }
    flags = ("--model", str(model), *experts, "--experts-report", "prometheus", *SERVED, *TWO_RANKS, "--log-level", log)
    return start(Serve, *flags, engine="sglang", settings=settings)


def answers(serve: Serve) -> list[str]:
    """Return what the model says to prompts of which nothing is cached."""
    assert order(serve, "cache/clear", {})[0] == 200
    made = []
    for prompt in PROMPTS:
        body = {"model": MODEL, "prompt": prompt, "max_tokens": 16, "temperature": 0.0, "ignore_eos": True}
        status, text = serve.post("/v1/completions", body)
        assert status == 200, text
        made.append(json.loads(text)["choices"][0]["text"])
    return made


class Balancedness:
    """SGLang's own metric, of the prompts that are computed from now on."""

    def __init__(self, serve: Serve) -> None:
        self._serve = serve
        self._before = self._read()

    def mean(self) -> float:
        """Return the mean over the passes."""
        total, count = (now - then for now, then in zip(self._read(), self._before, strict=True))
        assert count >= len(PROMPTS)
        return total / count

    def _read(self) -> tuple[float, float]:
        """Return sum and count, of one scrape: passes end between two."""
        _, text = self._serve.system("/metrics", 0)
        samples = [
            sample
            for family in text_string_to_metric_families(text)
            for sample in family.samples
            if sample.labels.get("forward_mode") == "extend"
        ]

        def total(name: str) -> float:
            return sum(sample.value for sample in samples if sample.name == f"sglang:eplb_balancedness_{name}")

        return total("sum"), total("count")


@pytest.mark.e2e
@needs_two
def test_recorded_traffic_makes_a_layout_that_is_better_and_changes_no_text(
    start: Callable[..., Serve], model: Path, tmp_path: Path
) -> None:
    recording = two_ranks(start, model, tmp_path)
    execute(recording, "experts/record/start", {})
    trivial = Balancedness(recording)
    expected = answers(recording)
    unbalanced = trivial.mean()
    dump = execute(recording, "experts/record/dump", {})["path"]
    assert Path(dump).parent == tmp_path
    recording.stop()

    layout = tmp_path / "layout.json"
    planned = Process.command(
        ["experts", "plan", dump, "--ranks", "2", "--redundant", "2", "--algorithm", "global", "--out", str(layout)]
    )
    done = subprocess.run(planned, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    rows = json.loads(layout.read_text())["physical_to_logical_map"]
    assert [len(row) for row in rows] == [EXPERTS + 2] * LAYERS

    serving = two_ranks(start, model, tmp_path, "--experts-layout", str(layout), "--experts-redundant", "2")
    balanced = Balancedness(serving)
    assert answers(serving) == expected
    assert balanced.mean() > unbalanced + 0.1, f"it was {unbalanced:.3f}, and is {balanced.mean():.3f}"
    serving.stop()


@pytest.mark.e2e
@needs_two
def test_experts_move_while_the_engine_serves_and_the_text_stays(
    start: Callable[..., Serve], model: Path, tmp_path: Path
) -> None:
    rebalancing = ("--experts-eplb", "--experts-interval", str(INTERVAL), "--experts-layers-per-chunk", "1")
    serve = two_ranks(start, model, tmp_path, *rebalancing, "--experts-redundant", "2", log="info")

    def rebalances() -> int:
        return serve.log_of("worker-0").count("rebalance end")

    unbalanced = Balancedness(serve)
    expected = answers(serve)
    before = unbalanced.mean()
    eventually(lambda: answers(serve) == expected and rebalances() >= 1, 120, "a rebalance")
    balanced = Balancedness(serve)
    eventually(
        lambda: answers(serve) == expected and balanced.mean() > before + 0.1, 120, f"better balanced than {before:.3f}"
    )
    # The recorder is on although no setting names it, and a dump leaves SGLang its counts of the next passes.
    assert Path(execute(serve, "experts/record/dump", {})["path"]).is_file()
    assert answers(serve) == expected
    serve.stop()


@pytest.mark.parametrize(("mode", "key"), [("per_pass", "global_physical_count"), ("per_token", "topk_ids_of_layer")])
def test_a_recorder_of_single_passes_writes_what_it_saw(
    bench: Bench, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mode: Any, key: str
) -> None:
    import torch

    monkeypatch.setenv("SGLANG_EXPERT_DISTRIBUTION_RECORDER_DIR", str(tmp_path / "records"))
    options = ExpertOptions(recorder=mode)
    args = ("--chunked-prefill-size", "512")  # per_token keeps room for eight times as many tokens
    engine = Engines(bench, lambda: TestedEngine(model, "null", *args, experts=options))

    async def body(session: Session) -> Any:
        assert session.engine.capabilities.expert_records
        before = (await answer_of(session, work(4)))[0]  # not recorded
        await session.engine.execute(StartExpertRecord())
        assert (await answer_of(session, work(4)))[0] == before
        await session.engine.execute(StopExpertRecord())
        outcome = await session.engine.execute(DumpExpertRecord())
        await session.engine.stop()
        return outcome

    outcome = engine.run(body, 150)
    assert Path(outcome.path).parent == tmp_path / "records"
    content = torch.load(outcome.path, weights_only=True)
    assert len(content["records"]) == 4, "one pass for the prompt, and one for each further token"
    assert all(record[key].shape[0] == LAYERS for record in content["records"])
    assert content["last_physical_to_logical_map"].tolist() == [list(range(EXPERTS))] * LAYERS


def parsed(model: Path, experts: ExpertOptions, *args: str) -> Arguments:
    return check_arguments(LaunchMode(), SglangOptions(), (*SMALL, *args), model, MODEL, experts)


def test_every_setting_goes_through_the_parser_of_sglang(model: Path, tmp_path: Path) -> None:
    layout = tmp_path / "layout.json"
    layout.write_text(json.dumps({"physical_to_logical_map": [[*range(EXPERTS), 0, 1]] * LAYERS}))
    options = ExpertOptions(
        eplb=True,
        redundant=2,
        recorder="stat",
        recorder_buffer=20,
        layout=str(layout),
        algorithm="deepseek",
        interval=30,
        layers_per_chunk=1,
        dispatch="dynamic",
        report="both",
    )
    expected = {
        "enable_eplb": True,
        "ep_num_redundant_experts": 2,
        "expert_distribution_recorder_mode": "stat",
        "expert_distribution_recorder_buffer_size": 20,
        "init_expert_location": str(layout),
        "eplb_algorithm": "deepseek",
        "eplb_rebalance_num_iterations": 30,
        "eplb_rebalance_layers_per_chunk": 1,
        "eplb_min_rebalancing_utilization_threshold": 1.0,
        "ep_dispatch_algorithm": "dynamic",
        "expert_balancedness_report_mode": "both",
    }
    assert expected.items() <= parsed(model, options, *TWO_RANKS).values.items()
    on_gpus = ExpertOptions(eplb=True, utilization_threshold=0.75, report="prometheus", dispatch="static")
    values = parsed(model, on_gpus, *TWO_RANKS, "--device", "cuda", "--moe-a2a-backend", "pplx").values
    assert values["eplb_min_rebalancing_utilization_threshold"] == 0.75
    assert values["ep_dispatch_algorithm"] == "static"


@needs_cpu
def test_what_sglang_does_not_do_on_a_cpu_is_refused(model: Path, tiny: Path) -> None:
    for options, says in (
        (ExpertOptions(recorder="stat_approx"), "stat_approx needs DeepEP"),
        (ExpertOptions(eplb=True, dispatch="static"), "all-to-all"),
        (ExpertOptions(eplb=True, dispatch="lp"), "all-to-all"),
        (ExpertOptions(eplb=True, utilization_threshold=0.5, report="both"), "on GPUs only"),
    ):
        with pytest.raises(ConfigError, match=says):
            parsed(model, options, *TWO_RANKS)
    with pytest.raises(ConfigError, match="--enable-eplb: it is also set"):
        parsed(model, ExpertOptions(eplb=True), *TWO_RANKS, "--enable-eplb")
    with pytest.raises(ConfigError, match="no experts"):
        parsed(tiny, ExpertOptions(eplb=True), *TWO_RANKS)
