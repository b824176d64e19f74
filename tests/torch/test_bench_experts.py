"""The experts benchmark: its loads and prompts, what it reads from a run, and its report."""

import json
from pathlib import Path

import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")

from bench.engine_runs import Measured, Rates, Run
from bench.experts import parse_arguments
from bench.experts_engine import QUICK, ModeRun, make_cells, rotated
from bench.experts_loads import EXPERTS, ROWS, make_counts
from bench.experts_model import make_model, make_token_prompts
from bench.experts_planner import CASES, Case, PlannerFailed, measure_plan, peer_layouts, shape_of
from bench.experts_process import RebalanceRates, RecorderRates, metric, rate, slowest, step_times
from bench.experts_report import ExpertResults, to_markdown
from bench.result_files import Machine

pytestmark = pytest.mark.torch

MACHINE = Machine(cores=2, cpu="cpu", memory_bytes=1, system="linux", python="3.11", versions={})


def results(**parts: object) -> ExpertResults:
    base = {"date": "2026-11-16", "commit": "abc", "command": "bench", "source_changed": False}
    return ExpertResults(**base, machine=MACHINE, sizes=QUICK, **parts)  # type: ignore[arg-type]


def engine_run(engine: str, decode: float) -> Run:
    cells = {cell.name: [Rates(2 * decode, decode, decode)] for cell in make_cells(QUICK)}
    measured = Measured(ready_s=1.0, peak_bytes=1, versions={}, cells=cells, outputs={})
    return Run(engine=engine, round=0, measured=measured)


def rebalance_rates(after: float) -> RebalanceRates:
    return RebalanceRates(
        before=100.0,
        during=80.0,
        after=after,
        slowest_before=95.0,
        longest_gap_s=0.05,
        median_gap_s=0.01,
        moved=12,
        balancedness_before=0.5,
        balancedness_after=0.99,
    )


@pytest.mark.parametrize("name", ROWS)
def test_loads_are_whole_numbers_and_the_same_in_every_run(name: str) -> None:
    counts = make_counts(name, layers=2)
    assert counts == make_counts(name, layers=2)
    assert [len(row) for row in counts] == [EXPERTS, EXPERTS]
    assert all(load >= 0 and load == int(load) for row in counts for load in row)


def test_no_two_prompts_of_a_run_share_their_start() -> None:
    prompts = [tuple(prompt[:8]) for cell in make_cells(QUICK) for run in (cell.warm, *cell.runs) for prompt in run]
    assert len(set(prompts)) == len(prompts)
    assert make_token_prompts({}, 2, 8, "seed") == make_token_prompts({}, 2, 8, "seed")


def test_modes_alternate_by_round() -> None:
    assert [rotated(("a", "b", "c"), turn)[0] for turn in range(4)] == ["a", "b", "c", "a"]


def test_steps_count_only_while_every_row_decodes() -> None:
    rows = [{"times": [1.0, 2.0, 3.0, 4.0, 5.0]}, {"times": [2.0, 3.0, 4.0]}]
    assert step_times(rows) == [2.0, 3.0, 4.0]


def test_the_slowest_window_is_found() -> None:
    moments = [0.0, 1.0, 2.0, 5.0, 7.0, 8.0]
    assert rate(moments, batch=2) == pytest.approx(10 / 8)
    assert slowest(moments, batch=2, window=2) == pytest.approx(4 / 5)


def test_metrics_are_read_by_name_and_label() -> None:
    text = '# TYPE balance gauge\nbalance{layout="before"} 0.5\nbalance{layout="after"} 0.9\n'
    assert metric(text, "balance", layout="after") == 0.9
    assert metric(text, "other") == 0.0


def test_model_has_the_weights_that_its_configuration_says(tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    small = {"hidden_size": 32, "moe_intermediate_size": 16, "head_dim": 8, "num_attention_heads": 4, "vocab_size": 64}
    directory = make_model(tmp_path / "model", QUICK.changes | small, skewed=True)
    assert json.loads((directory / "config.json").read_text())["num_experts"] == 16
    _, report = AutoModelForCausalLM.from_pretrained(directory, output_loading_info=True)
    assert not any(report[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"))


def test_planner_without_sglang_says_so(tmp_path: Path) -> None:
    with pytest.raises(PlannerFailed, match="SGLang is not installed"):
        peer_layouts(tmp_path / "bin" / "python", layers=1)


def test_plans_are_measured_for_every_policy_and_number_of_copies() -> None:
    assert {(case.policy, case.redundant) for case in CASES} == {
        (policy, redundant) for policy in ("global", "hierarchical") for redundant in (0, 32, 64)
    }
    case = Case("Zipf", "hierarchical", 32)
    cell = measure_plan(case, make_counts("Zipf", layers=1), 2, {})
    assert len(cell.seconds) == 2
    assert 0 < cell.worst <= cell.balancedness <= 1
    assert 0 <= cell.moved < 0.5
    assert shape_of(case).size == 9


def test_report_has_ratios_costs_and_plans() -> None:
    recorder = [ModeRun(mode="stat", round=0, rates=RecorderRates(plain=[100.0], recorded=[98.0]))]
    text = to_markdown(
        results(
            engines=[engine_run("baton-fp32", 60.0), engine_run("transformers-fp32", 20.0)],
            recorder=recorder,
            rebalance=[ModeRun(mode="static", round=0, rates=rebalance_rates(150.0))],
            plans=[measure_plan(CASES[0], make_counts("Zipf", layers=1), 1, {})],
            layers=1,
            peers_skipped="SGLang is not installed",
        )
    )
    assert "| fp32 | 3.00x | 3.00x | 3.00x | 3.00x |" in text
    assert "| stat | 100 | 98.0 | 0.980 (0.980-0.980) |" in text
    assert "| static | 100 | 80.0 | 95.0 | 150 | 1.50 | 50.0 | 10.0 | 0.50 | 0.99 | 12.0 |" in text
    assert "Without SGLang: SGLang is not installed." in text
    assert "| Zipf | global | 0 |" in text


def test_report_names_what_failed() -> None:
    failed: ModeRun[RecorderRates] = ModeRun(mode="per_pass", round=1, failure="no memory")
    assert "- per_pass, round 1: no memory" in to_markdown(results(recorder=[failed]))


def test_report_of_one_part_has_only_that_part() -> None:
    text = to_markdown(results(plans=[measure_plan(CASES[0], make_counts("Zipf", layers=1), 1, {})], layers=1))
    assert [line for line in text.splitlines() if line.startswith("##")] == ["## Planning"]


def test_arguments_select_parts_and_sizes() -> None:
    options = parse_arguments(["--quick", "--parts", "planner", "engine", "--rounds", "2"])
    assert options.parts == ["planner", "engine"]
    assert options.sizes.rounds == 2
    assert options.sizes.changes == QUICK.changes
