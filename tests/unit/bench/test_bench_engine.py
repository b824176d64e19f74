"""The engine benchmark: prompts, rates, timeouts, statistics and the report."""

import json
import os
import shutil
import subprocess
import sys
import textwrap
import time
from collections.abc import Sequence
from pathlib import Path

import psutil
import pytest

from bench import engine_report, engine_runs
from bench.engine import QUICK, make_cells, make_spec, parse_arguments, without_outputs
from bench.engine_peers import run as peer_run
from bench.engine_prompts import make_prompts
from bench.engine_report import (
    Agreement,
    EngineResults,
    Sizes,
    agreements,
    leading_tokens,
    spread_of,
    to_markdown,
)
from bench.engine_runs import (
    EngineRunFailed,
    EngineSetup,
    Measured,
    Output,
    Rates,
    Run,
    Spec,
    run_process,
    select_engines,
)
from bench.result_files import Machine


def encode(text: str) -> list[int]:
    return list(text.encode())


def decode(tokens: Sequence[int]) -> str:
    return bytes(tokens).decode()


# Prompts and plan


def test_prompts_have_the_requested_length_and_share_no_first_block() -> None:
    prompts = make_prompts(encode, 40, 200, seed=10_000)
    assert {len(prompt) for prompt in prompts} == {200}
    assert len({tuple(prompt[:16]) for prompt in prompts}) == 40
    assert prompts == make_prompts(encode, 40, 200, seed=10_000)


def test_no_prompt_occurs_twice_in_a_run() -> None:
    cells = make_cells(Sizes(), encode)
    prompts = [tuple(prompt) for cell in cells for batch in (cell.warm, *cell.runs) for prompt in batch]
    assert len(set(prompts)) == len(prompts)
    assert [(cell.name, len(cell.runs), len(cell.runs[0])) for cell in cells] == [
        ("decode-1", 2, 1),
        ("decode-8", 2, 8),
        ("decode-32", 2, 32),
        ("prefill", 4, 1),
    ]


def test_kv_capacity_fits_the_largest_batch_and_the_long_prompt() -> None:
    options = parse_arguments(["--threads", "2", "--model", "somewhere"])
    setup = make_spec(options.engines[0], options.sizes, [], options).setup
    assert setup.kv_tokens >= 32 * (64 + 128) + 1000
    assert (setup.threads, setup.max_batch, setup.context) == (2, 32, 1024)


def test_options_override_the_quick_sizes() -> None:
    options = parse_arguments(["--quick", "--rounds", "2", "--batches", "1,2"])
    assert (options.sizes.rounds, options.sizes.batches) == (2, (1, 2))
    assert options.sizes.new_tokens == QUICK.new_tokens


def test_engines_are_selected_by_name_prefix() -> None:
    names = [engine.name for engine in parse_arguments(["--only", "baton,transformers-fp32"]).engines]
    assert names == ["baton-bf16", "baton-fp32", "transformers-fp32"]
    with pytest.raises(ValueError, match="unknown: missing"):
        select_engines(["baton", "missing"])


def test_the_reason_for_a_missing_engine_names_the_install_script(tmp_path: Path) -> None:
    engine = select_engines(["llama.cpp-q4_1"])[0]
    assert "python, q4_1.gguf not found; scripts/bench-peers.sh" in engine.missing(tmp_path)
    (tmp_path / "models").mkdir()
    (tmp_path / "models" / "q4_1.gguf").touch()
    (tmp_path / "llama.cpp" / "bin").mkdir(parents=True)
    (tmp_path / "llama.cpp" / "bin" / "python").touch()
    assert engine.missing(tmp_path) == ""


# Rates


def test_decode_counts_only_while_every_row_is_active() -> None:
    rows = [{"times": [1.0, 2.0, 3.0, 4.0]}, {"times": [2.5, 3.0, 4.0, 5.0]}]
    rates = peer_run.timings(rows, started=0.5, prompt_tokens=20)
    # From 2.5, the start of the second row, to 4, the end of the first: 2 tokens of each row.
    assert rates == {"prefill": 20 / 2.0, "decode": 4 / 1.5, "wall": 8 / 4.5}


def test_the_decode_rate_of_one_new_token_is_zero() -> None:
    assert peer_run.timings([{"times": [2.0]}], started=1.0, prompt_tokens=10) == {
        "prefill": 10.0,
        "decode": 0.0,
        "wall": 1.0,
    }


def test_rows_with_missing_tokens_raise() -> None:
    class Short:
        def generate(self, prompts: list[list[int]], new_tokens: int) -> list[dict[str, list[float]]]:
            return [{"times": [time.monotonic()] * (new_tokens - 1)} for _ in prompts]

    with pytest.raises(RuntimeError, match="requested 2 rows of 4 tokens, got 2, wrong"):
        peer_run.run_cell(Short(), [[1], [2]], 4)


@pytest.mark.process
def test_peak_memory_includes_child_processes() -> None:
    alone = peer_run.process_tree(os.getpid())
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as child:
        tree = peer_run.process_tree(os.getpid())
        assert child.pid in tree
        assert child.pid not in alone
        assert peer_run.peak_bytes(tree) > peer_run.peak_bytes([os.getpid()]) > 0
        child.communicate(b"\n")


# Processes

FAKE_PEER = """
import os, time

print("output of the peer on stdout")
os.write(1, b"output below Python's stdout\\n")

class Fake:
    def generate(self, prompts, new_tokens):
        rows = []
        for prompt in prompts:
            began = time.monotonic()
            rows.append({"times": [began + 0.001 * n for n in range(1, new_tokens + 1)], "tokens": prompt[:new_tokens]})
        return rows

def load(setup):
    assert setup["variant"] == "plain"
    return Fake()
"""


def spec_of(peer: str = "fake_peer") -> Spec:
    setup = EngineSetup(
        model="m", gguf="", cache="", variant="plain", threads=1, kv_tokens=1024, max_batch=4, context=1024
    )
    return Spec(peer=peer, packages=("pytest",), setup=setup, cells=make_cells(QUICK, encode), warm_tokens=2)


def program(tmp_path: Path, source: str) -> Path:
    path = tmp_path / "program.py"
    path.write_text(textwrap.dedent(source))
    return path


@pytest.mark.process
def test_a_peer_is_measured_and_its_stdout_is_not_the_result(tmp_path: Path) -> None:
    shutil.copy(engine_runs.RUN, tmp_path / "run.py")
    (tmp_path / "fake_peer.py").write_text(FAKE_PEER)
    found = run_process(Path(sys.executable), spec_of(), 30.0, tmp_path / "run.py")
    assert {name: len(rates) for name, rates in found.cells.items()} == {"decode-1": 1, "decode-4": 1, "prefill": 2}
    assert found.versions == {"pytest": pytest.__version__}
    assert found.ready_s > 0
    assert found.peak_bytes > 0
    first = spec_of().cells[1].runs[0][0][: QUICK.new_tokens]
    assert found.outputs["decode-4"][0] == Output(tokens=first)


@pytest.mark.process
def test_a_peer_that_fails_to_load_is_reported_with_its_error(tmp_path: Path) -> None:
    shutil.copy(engine_runs.RUN, tmp_path / "run.py")
    with pytest.raises(EngineRunFailed, match="ended with 1: ModuleNotFoundError: No module named 'missing_peer'"):
        run_process(Path(sys.executable), spec_of("missing_peer"), 30.0, tmp_path / "run.py")


@pytest.mark.process
def test_a_failure_contains_no_directories(tmp_path: Path) -> None:
    source = "raise SystemExit('cannot read /home/user/models/weights.bin')"
    run = run_with(program(tmp_path, source), 30.0)
    assert run.failure == "ended with 1: cannot read weights.bin"
    assert run.measured is None


@pytest.mark.process
def test_an_output_line_that_is_not_a_result_is_a_failure(tmp_path: Path) -> None:
    with pytest.raises(EngineRunFailed, match="the output is not a result"):
        run_process(Path(sys.executable), spec_of(), 30.0, program(tmp_path, "print('hello')"))


@pytest.mark.process
def test_a_timeout_kills_the_whole_process_tree(tmp_path: Path) -> None:
    hung = """
        import pathlib, subprocess, sys, time
        argv = [sys.executable, "-c", "import time; time.sleep(600)"]
        children = [subprocess.Popen(argv), subprocess.Popen(argv, start_new_session=True)]
        here = pathlib.Path(__file__).parent
        (here / "pids").write_text(" ".join(str(child.pid) for child in children))
        print("loading for ever", file=sys.stderr, flush=True)
        time.sleep(600)
    """
    with pytest.raises(EngineRunFailed, match="no result within 3 s; loading for ever"):
        run_process(Path(sys.executable), spec_of(), 3.0, program(tmp_path, hung))
    children = [int(pid) for pid in (tmp_path / "pids").read_text().split()]
    deadline = time.monotonic() + 10
    while any(alive(pid) for pid in children) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert [pid for pid in children if alive(pid)] == []


def alive(pid: int) -> bool:
    return psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE


def run_with(path: Path, request_timeout_s: float) -> Run:
    try:
        measured, failure = run_process(Path(sys.executable), spec_of(), request_timeout_s, path), ""
    except EngineRunFailed as error:
        measured, failure = None, str(error)
    return Run(engine="fake", round=0, measured=measured, failure=failure)


def test_a_peer_does_not_inherit_variables_that_affect_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", "somewhere")
    monkeypatch.setenv("BATON_MODEL", "something")
    monkeypatch.setenv("OMP_NUM_THREADS", "7")
    found = engine_runs.environment(2)
    assert "PYTHONPATH" not in found
    assert "BATON_MODEL" not in found
    assert found["OMP_NUM_THREADS"] == "2"


# Statistics and report

SIZES = Sizes(batches=(1, 2), new_tokens=4, rounds=2, repeats=1)


def measured(decode_rate: float, outputs: Sequence[Output] = ()) -> Measured:
    rates = [Rates(prefill=1000.0, decode=decode_rate, wall=decode_rate / 2)]
    return Measured(
        ready_s=2.0,
        peak_bytes=10**9,
        versions={"torch": "2.13.0"},
        cells={"decode-1": rates, "decode-2": rates, "prefill": rates},
        outputs={"decode-1": list(outputs[:1]), "decode-2": list(outputs[1:]), "prefill": []},
    )


def results_of(runs: list[Run], agreement: dict[str, Agreement] | None = None) -> EngineResults:
    machine = Machine(
        cores=2, cpu="a cpu", memory_bytes=1, system="Linux", python="3.11", versions={"baton-serve": "0.1.0"}
    )
    return EngineResults(
        date="2026-11-15T00:00:00+00:00",
        commit="abc",
        command="python -m bench.engine",
        source_changed=False,
        threads=2,
        sizes=SIZES,
        machine=machine,
        runs=runs,
        agreement=agreement or {},
    )


def test_a_spread_above_a_quarter_of_the_median_is_noisy() -> None:
    assert not spread_of([90.0, 100.0, 115.0]).noisy
    assert spread_of([80.0, 100.0, 106.0]).noisy
    assert engine_report.format_spread(spread_of([80.0, 100.0, 106.0])) == "~100 (80.0-106)"
    assert engine_report.format_spread(spread_of([5.0])) == "5.00"


def test_ratios_are_taken_round_by_round() -> None:
    runs = [
        Run(engine="baton-bf16", round=0, measured=measured(100.0)),
        Run(engine="peer", round=0, measured=measured(50.0)),
        Run(engine="baton-bf16", round=1, measured=measured(60.0)),
        Run(engine="peer", round=1, measured=measured(20.0)),
    ]
    report = to_markdown(results_of(runs))
    assert "| peer | ~2.50 (2.00-3.00)x | ~2.50 (2.00-3.00)x | 1.00x | 1.00x | 1.00x |" in report
    assert "| baton-bf16 | ~80.0 (60.0-100) |" in report
    assert "8 of 14 cells are noisy" in report


def test_a_failed_engine_is_reported_with_its_reason() -> None:
    runs = [
        Run(engine="baton-bf16", round=0, measured=measured(100.0)),
        Run(engine="vllm-bf16", round=0, failure="no result within 900 s; loading"),
        Run(engine="vllm-bf16", round=1, failure="another"),
    ]
    report = to_markdown(results_of(runs))
    assert "| vllm-bf16 | - | - | - | - | - |" in report
    assert "- vllm-bf16, 2 of 2 rounds: no result within 900 s; loading" in report
    assert "as a multiple of each" not in report


def test_a_report_can_consist_of_failures_only() -> None:
    report = to_markdown(results_of([Run(engine="baton-bf16", round=0, failure="no log output")]))
    assert "0 of 0 cells are noisy" in report


def test_agreement_counts_equal_rows_and_leading_tokens() -> None:
    expected = [Output(tokens=list(b"once")), Output(tokens=list(b"more")), Output(tokens=list(b"time"))]
    same_text = [Output(text="once"), Output(text="mole"), Output(text="time")]
    other = [Output(tokens=list(b"on|`")), Output(tokens=list(b"more")), Output(tokens=list(b"xime"))]
    runs = [
        Run(engine="llama", round=0, measured=measured(1.0, same_text)),
        Run(engine="transformers-fp32", round=0, measured=measured(1.0, expected)),
        Run(engine="other", round=0, measured=measured(1.0, other)),
        Run(engine="failed", round=0, failure="failed"),
    ]
    found = agreements(runs, decode)
    assert list(found) == ["llama", "transformers-fp32", "other"]
    assert (found["llama"].equal_rows, found["llama"].leading_tokens) == (2, 10 / 3)
    assert (found["other"].equal_rows, found["other"].leading_tokens, found["other"].sample) == (1, 2.0, "on/'")
    assert "| transformers-fp32 | 3 of 3 | 4.0 | `once` |" in to_markdown(results_of(runs, found))


def test_agreement_is_empty_without_the_reference() -> None:
    assert agreements([Run(engine="other", round=0, measured=measured(1.0))], decode) == {}


def test_an_output_without_token_ids_is_compared_by_text() -> None:
    assert leading_tokens(list(b"abc"), Output(text="abd"), decode) == 2
    assert leading_tokens(list(b"abc"), Output(text="abcd"), decode) == 3
    assert leading_tokens(list(b"abc"), Output(text=""), decode) == 0


def test_results_contain_no_outputs() -> None:
    run = Run(engine="x", round=0, measured=measured(1.0, [Output(text="a"), Output(text="b")]))
    kept = without_outputs(run)
    assert kept.measured is not None
    assert kept.measured.outputs == {}
    assert json.dumps(kept.measured.versions) == '{"torch": "2.13.0"}'


# The driver of Baton's engine


@pytest.mark.torch
def test_the_driver_reads_every_stream_to_its_end() -> None:
    pytest.importorskip("torch")
    from baton.config.engines import EchoOptions
    from baton.engines.echo.engine import EchoEngine
    from bench.engine_peers.baton_torch import EngineDriver

    driver = EngineDriver(lambda: EchoEngine(EchoOptions()))
    try:
        rows = driver.generate([[5, 6, 7], [8, 9]], 4)
        again = driver.generate([[3]], 1)
    finally:
        driver.close()
    assert [row["tokens"] for row in rows] == [[5, 6, 7, 5], [8, 9, 8, 9]]
    assert [len(row["times"]) for row in (*rows, *again)] == [4, 4, 1]


@pytest.mark.torch
def test_a_profile_times_functions_by_name_and_lists_missing_ones() -> None:
    pytest.importorskip("torch")
    from bench.engine_profile import Clocks, Part, split_table

    parts = [
        Part("step", "engine_prompts", "make_prompts"),
        Part("encode", "engine_prompts", "make_prompt", "step"),
        Part("missing", "engine_prompts", "Missing.function", "step"),
    ]
    clocks = Clocks()
    with clocks.installed("bench", parts):
        from bench import engine_prompts

        engine_prompts.make_prompts(encode, 3, 10, seed=1)
    engine_prompts.make_prompts(encode, 3, 10, seed=1)
    assert clocks.calls == {"step": 1, "encode": 3}
    text = split_table(clocks, parts, wall_s=1.0)
    assert "| encode | 3 |" in text
    assert "| rest of step | 1 |" in text
    assert "Not found, so not timed: engine_prompts.Missing.function." in text
