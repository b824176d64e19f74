"""Profiles the steps of the built-in engine: by its own functions, by torch's operators, by compiled function.

Each profile is a separate run, so that none disturbs another. Functions are found by name: a renamed one is reported as
missing, and the rest is still timed.
"""

import functools
import importlib
import os
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import torch
from torch._C._profiler import _ExperimentalConfig

from bench.engine_peers import baton_torch
from bench.engine_runs import CellSpec, EngineSetup, without_paths
from bench.report import table

OPERATORS = 20
PERF_HERTZ = 499
PERF_LIBRARIES = 6
PERF_FUNCTIONS = 24
PERF_WIDTH = 140
PASSES = 3
"""Runs that a cell must have: one for each kind of profile."""


class Part(NamedTuple):
    """A function of the engine that is wrapped with a timer. `within` is the label of the part that calls it."""

    label: str
    module: str
    name: str
    within: str = ""


PARTS = (
    Part("step", "core", "Core.step"),
    Part("schedule", "scheduler", "Scheduler.schedule", "step"),
    Part("inputs", "runner", "Runner._step", "step"),
    Part("forward", "models.llama", "LlamaModel.forward", "step"),
    Part("logits", "models.llama", "LlamaModel.logits", "step"),
    Part("native forward", "native.decoder", "NativeDecoder.forward", "step"),
    Part("sample", "runner", "sample", "step"),
    Part("book-keeping", "scheduler", "Scheduler.computed", "step"),
    Part("append", "core", "Core._append", "step"),
    Part("publish", "thread", "EngineThread._post_result"),
    Part("deliver (event loop)", "engine", "TorchEngine._deliver"),
)


class Clocks:
    """Calls and seconds of every part, since the last reset."""

    def __init__(self) -> None:
        self.calls: dict[str, int] = {}
        self.seconds: dict[str, float] = {}
        self.missing: list[str] = []

    def reset(self) -> None:
        self.calls.clear()
        self.seconds.clear()

    def around(self, label: str, function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def timed(*args: Any, **kwargs: Any) -> Any:
            began = time.perf_counter()
            try:
                return function(*args, **kwargs)
            finally:
                self.seconds[label] = self.seconds.get(label, 0.0) + time.perf_counter() - began
                self.calls[label] = self.calls.get(label, 0) + 1

        return timed

    @contextmanager
    def installed(self, package: str, parts: Sequence[Part]) -> Iterator[None]:
        """Wrap the functions for the duration of the block. References taken before it stay untimed."""
        with ExitStack() as stack:
            for part in parts:
                *owners, name = part.name.split(".")
                try:
                    owner: Any = functools.reduce(getattr, owners, importlib.import_module(f"{package}.{part.module}"))
                    plain = getattr(owner, name)
                except (ImportError, AttributeError):
                    self.missing.append(f"{part.module}.{part.name}")
                else:
                    stack.callback(setattr, owner, name, plain)
                    setattr(owner, name, self.around(part.label, plain))
            yield


def split_table(clocks: Clocks, parts: Sequence[Part], wall_s: float) -> str:
    """Each part's share of the run, and the rest of a step outside its parts."""
    steps = clocks.calls.get("step", 0)
    rows = [
        row(part.label, clocks.calls[part.label], clocks.seconds[part.label], steps, wall_s)
        for part in parts
        if part.label in clocks.calls
    ]
    inside = sum(clocks.seconds.get(part.label, 0.0) for part in parts if part.within == "step")
    rows.append(row("rest of step", steps, clocks.seconds.get("step", 0.0) - inside, steps, wall_s))
    lines = [table(["part", "calls", "ms", "ms/step", "of wall"], rows)]
    if clocks.missing:
        lines.append(f"Not found, so not timed: {', '.join(clocks.missing)}.")
    return "\n\n".join(lines)


def row(label: str, calls: int, seconds: float, steps: int, wall_s: float) -> list[str]:
    per_step = f"{1000 * seconds / steps:.3f}" if steps else "-"
    return [label, str(calls), f"{1000 * seconds:.1f}", per_step, f"{seconds / wall_s:.1%}"]


def operators(work: Callable[[], object]) -> str:
    """torch's profile of all threads, the most expensive operators first."""
    all_threads = _ExperimentalConfig(profile_all_threads=True)
    activities = [torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(activities=activities, experimental_config=all_threads) as profile:
        work()
    return str(
        profile.key_averages().table(sort_by="self_cpu_time_total", row_limit=OPERATORS, max_name_column_width=50)
    )


def machine_code(work: Callable[[], object]) -> str:
    """Profile this process with `perf`, by compiled function, if `perf` is installed and permitted."""
    perf = shutil.which("perf")
    if perf is None:
        work()
        return "perf is not installed"
    with tempfile.TemporaryDirectory(prefix="baton-perf-") as folder, sampling(perf, Path(folder) / "data") as data:
        work()
        return data.read()


class PerfData:
    def __init__(self, perf: str, file: Path, recorder: "subprocess.Popen[str]") -> None:
        self._perf = perf
        self._file = file
        self._recorder = recorder

    def read(self) -> str:
        """End the recording and return its libraries and its functions, the most expensive first."""
        self._recorder.send_signal(signal.SIGINT)
        _, stderr = self._recorder.communicate(timeout=30)
        found = self._report("dso", PERF_LIBRARIES) + self._report("dso,symbol", PERF_FUNCTIONS)
        return without_paths("\n".join(found) or f"perf recorded nothing: {stderr.strip()[-200:]}")

    def _report(self, sort: str, limit: int) -> list[str]:
        argv = [self._perf, "report", "--stdio", "--input", str(self._file), "--sort", sort, "--percent-limit", "0.5"]
        found = subprocess.run(argv, capture_output=True, text=True, timeout=120, stdin=subprocess.DEVNULL)
        lines = [line.rstrip() for line in found.stdout.splitlines() if line.strip() and not line.startswith("#")]
        # Code without symbols, such as oneDNN's, has one address per sample; the line of its library includes it.
        named = [line[:PERF_WIDTH].rstrip() for line in lines if "] 0x" not in line]
        return named[:limit]


@contextmanager
def sampling(perf: str, file: Path) -> Iterator[PerfData]:
    argv = [perf, "record", "--quiet", "--freq", str(PERF_HERTZ), "--output", str(file), "--pid", str(os.getpid())]
    with subprocess.Popen(argv, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True) as recorder:
        try:
            time.sleep(0.5)  # perf needs time to attach
            yield PerfData(perf, file, recorder)
        finally:
            recorder.kill()


def profile_cells(setup: EngineSetup, cells: Sequence[CellSpec], warm_tokens: int) -> str:
    """Start the engine in this process and profile each cell once per kind of profile."""
    clocks = Clocks()
    with clocks.installed("baton.engines.torch", PARTS):
        engine = baton_torch.load(msgspec.structs.asdict(setup))
        try:
            parts = [part for cell in cells for part in profile_cell(engine, clocks, cell, warm_tokens)]
        finally:
            engine.close()
    return "\n\n".join(parts) + "\n"


def profile_cell(engine: baton_torch.EngineDriver, clocks: Clocks, cell: CellSpec, warm_tokens: int) -> Iterator[str]:
    first, second, third = cell.runs[:PASSES]
    engine.generate(cell.warm, min(warm_tokens, cell.new_tokens))
    clocks.reset()
    began = time.perf_counter()
    engine.generate(first, cell.new_tokens)
    wall_s = time.perf_counter() - began
    yield f"## {cell.name}: {len(first)} x {len(first[0])} prompt tokens, {cell.new_tokens} new each, {wall_s:.2f} s"
    yield split_table(clocks, PARTS, wall_s)
    yield "### torch operators"
    yield operators(lambda: engine.generate(second, cell.new_tokens))
    yield "### perf: libraries, then functions"
    yield machine_code(lambda: engine.generate(third, cell.new_tokens))
