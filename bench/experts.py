"""`python -m bench.experts`: mixtures of experts in the built-in engine, and the planner of expert layouts.

    engine      decode and prefill next to transformers, of a random model
    recorder    decode with each mode of the recorder, and without
    rebalance   decode before, during and after a rebalance of a skewed load on two ranks
    planner     time and balance of plans for 256 experts, next to SGLang's algorithms

Systems and modes alternate. Speed is reported, never asserted.
"""

import argparse
import cProfile
import dataclasses
import io
import pstats
import re
import shlex
import signal
import sys
import tempfile
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path

import msgspec

from baton.experts.placement import plan
from bench.engine import positive, without_outputs
from bench.engine_report import agreements
from bench.engine_runs import Run, without_paths
from bench.experts_engine import (
    QUICK,
    WARM_TOKENS,
    ModeRun,
    Sizes,
    compare_engines,
    make_cells,
    make_setup,
    measure_rebalance,
    measure_recorder,
)
from bench.experts_loads import LAYERS, make_counts
from bench.experts_model import make_model
from bench.experts_planner import Case, PlanCell, PlannerFailed, measure_plans, peer_layouts, shape_of
from bench.experts_process import RebalanceRates, RecorderRates
from bench.experts_report import ExpertResults, to_markdown
from bench.result_files import describe_machine, git_commit, source_digest

PARTS = ("engine", "recorder", "rebalance", "planner")
PROFILED_PLANS = (Case("mostly unused", "global", 32), Case("mostly unused", "hierarchical", 64))
PROFILE_LINES = 20
QUICK_LAYERS = 4


class Benchmark:
    """The parts of a run. Each fills its own results, so that an interrupted run keeps those so far."""

    def __init__(self, options: argparse.Namespace, models: Path) -> None:
        self._options = options
        self._sizes: Sizes = options.sizes
        self._models = models
        self._source = source_digest()
        self.engines: list[Run] = []
        self.recorder: list[ModeRun[RecorderRates]] = []
        self.rebalance: list[ModeRun[RebalanceRates]] = []
        self.plans: list[PlanCell] = []
        self._peers_skipped = ""

    @property
    def failed(self) -> bool:
        return any(run.failure for runs in (self.engines, self.recorder, self.rebalance) for run in runs)

    def run(self, part: str) -> None:
        match part:
            case "engine":
                for run in compare_engines(self._model(), self._sizes):
                    self.engines.append(run)
                    report(f"round {run.round} {run.engine}: {run.failure or 'done'}")
            case "recorder":
                for found in measure_recorder(self._model(), self._sizes):
                    self.recorder.append(found)
                    report(f"round {found.round} recorder {found.mode}: {found.failure or 'done'}")
            case "rebalance":
                for moved in measure_rebalance(self._model(skewed=True), self._sizes):
                    self.rebalance.append(moved)
                    report(f"round {moved.round} dispatch {moved.mode}: {moved.failure or 'done'}")
            case _:
                self._plan()

    def _plan(self) -> None:
        layers = self._options.layers
        try:
            peers = peer_layouts(self._options.sglang / "bin" / "python", layers)
        except PlannerFailed as failure:
            self._peers_skipped, peers = str(failure), {}
            report(self._peers_skipped)
        for cell in measure_plans(layers, self._sizes.rounds, peers):
            self.plans.append(cell)
            report(f"{' '.join(map(str, cell.case))}: {min(cell.seconds):.2f} s, {cell.balancedness:.4f}")

    def _model(self, skewed: bool = False) -> Path:
        directory = self._models / ("skewed" if skewed else "random")
        return directory if directory.exists() else make_model(directory, self._sizes.changes, skewed)

    def results(self) -> ExpertResults:
        return ExpertResults(
            date=datetime.now(UTC).isoformat(timespec="seconds"),
            commit=git_commit(),
            command=command_of(self._options),
            source_changed=source_digest() != self._source,
            machine=describe_machine(),
            sizes=self._sizes,
            engines=[without_outputs(run) for run in self.engines],
            agreement=agreements(self.engines, lambda tokens: " ".join(map(str, tokens))),
            recorder=self.recorder,
            rebalance=self.rebalance,
            plans=self.plans,
            layers=self._options.layers,
            peers_skipped=self._peers_skipped,
        )

    def profile(self) -> str:
        """Return where the time of the engine's steps and of plans goes."""
        from bench.engine_profile import PASSES, profile_cells

        cells = make_cells(dataclasses.replace(self._sizes, repeats=PASSES))
        setup = make_setup(self._model(), self._sizes, "bfloat16", max(self._sizes.batches), self._sizes.new_tokens)
        plans = [f"## Plan: {' '.join(map(str, case))}\n\n{profile_plan(case)}" for case in PROFILED_PLANS]
        return "\n\n".join([profile_cells(setup, cells, WARM_TOKENS), *plans]) + "\n"


def profile_plan(case: Case) -> str:
    counts, text = make_counts(case.loads, LAYERS), io.StringIO()
    with cProfile.Profile() as profile:
        plan(counts, shape_of(case), case.policy)
    pstats.Stats(profile, stream=text).sort_stats("tottime").print_stats(PROFILE_LINES)
    return re.sub(r"/\S*/(?=baton/|lib/python)", "", text.getvalue()).strip()


def report(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def command_of(options: argparse.Namespace) -> str:
    return without_paths(shlex.join(["python", "-m", "bench.experts", *options.arguments]))


def write(results: ExpertResults, out: Path) -> None:
    out.mkdir(parents=True, exist_ok=True)
    (out / "experts.json").write_bytes(msgspec.json.format(msgspec.json.encode(results), indent=1) + b"\n")
    (out / "experts.md").write_text(to_markdown(results))


def parse_arguments(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m bench.experts", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="a small model and few layers, to check that all runs")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS, help="what to measure")
    parser.add_argument("--rounds", type=positive, help="how often each system or mode is started, and a plan made")
    parser.add_argument(
        "--sglang", type=Path, default=Path(".venv-sglang"), help="environment with SGLang (make test-sglang)"
    )
    parser.add_argument("--out", type=Path, default=Path("bench/results"), help="folder of the results")
    parser.add_argument("--profile", action="store_true", help="only profile the engine and the planner")
    options = parser.parse_args(arguments)
    options.arguments = list(arguments)
    sizes = QUICK if options.quick else Sizes()
    options.sizes = dataclasses.replace(sizes, rounds=options.rounds or sizes.rounds)
    options.layers = QUICK_LAYERS if options.quick else LAYERS
    return options


def main(arguments: Sequence[str] | None = None) -> int:
    options = parse_arguments(sys.argv[1:] if arguments is None else arguments)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # exit by exception, so that child processes are stopped
    with tempfile.TemporaryDirectory(prefix="baton-bench-experts-") as models:
        benchmark = Benchmark(options, Path(models))
        if options.profile:
            options.out.mkdir(parents=True, exist_ok=True)
            title = f"# Where the time of a mixture of experts goes\n\n{command_of(options)}\n\n"
            (options.out / "experts-profile.txt").write_text(title + benchmark.profile())
            return 0
        try:
            for part in options.parts:
                benchmark.run(part)
        finally:
            write(benchmark.results(), options.out)
    return 1 if benchmark.failed else 0


if __name__ == "__main__":
    sys.exit(main())
