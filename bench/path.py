"""`python -m bench.path`: cost of the request path, for Baton and its peers in the same run.

Every repeat starts each system again and measures each cell of the matrix on one system after the other,
so that other load on the machine affects all of them alike. Speed is reported, never asserted.
"""

import argparse
import dataclasses
import io
import pstats
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, get_args

import msgspec
import psutil

import baton
from bench.load import OPEN_LINE, LoadResult, LoadSpec, raise_descriptor_limit
from bench.report import to_markdown
from bench.result_files import Cell, Kind, Results, describe_run, source_digest
from bench.systems import (
    BEFORE,
    FLAT_OUT_ONLY,
    LAUNCHES,
    NEVER_STALLED,
    PACED_ONLY,
    RunningSystem,
    Setup,
    SystemFailed,
    running,
)

TOKENS = 128
FLAT_OUT_MS = 0.0
PACED_MS = 20.0
IDLE_MS = 1000.0
# Nearly the context of Baton's echo engine.
STALLED_TOKENS = 1_000_000
STALL_LEAD_S = 20.0
HOLD_S = 3.0
ANY_NUMBER = 1_000_000
DEADLINE_S = 60.0
PROFILE_STREAMS = 64
PROFILE_LINES = 25
Part = Literal["unpaced", "stalled", "paced", "idle"]
PARTS: tuple[Part, ...] = get_args(Part)
PEERS = tuple(name for name in LAUNCHES if name != BEFORE)


@dataclass(frozen=True)
class Plan:
    systems: tuple[str, ...] = PEERS
    before: Path | None = None
    """A checkout of an older Baton to measure beside this one."""
    parts: tuple[Part, ...] = PARTS
    tokens: int = TOKENS
    flat_streams: tuple[int, ...] = (1, 16, 64, 256, 1024)
    paced_streams: tuple[int, ...] = (1, 16, 64, 256, 512, 1024)
    stall_streams: int = 16
    idle_streams: int = 1024
    repeats: int = 3
    flat_s: float = 2.5
    """How long an unpaced cell starts requests."""
    model_dir: Path = Path(baton.__file__).parent / "engines" / "echo" / "model"

    def setup(self, pace_ms: float, profile_dir: Path | None = None) -> Setup:
        return Setup(pace_ms, self.model_dir, profile_dir, self.before)

    def systems_at(self, pace_ms: float, repeat: int) -> list[str]:
        """The systems in the order of this repeat: the first one alternates."""
        left_out = PACED_ONLY if pace_ms == FLAT_OUT_MS else FLAT_OUT_ONLY
        older = (BEFORE,) if self.before is not None else ()
        names = [name for name in (*self.systems, *older) if name not in left_out]
        start = repeat % max(1, len(names))
        return [*names[start:], *names[:start]]


QUICK = Plan(flat_streams=(1, 8), paced_streams=(8,), stall_streams=4, idle_streams=32, repeats=1, flat_s=0.5)


def load_spec(plan: Plan, system: RunningSystem, streams: int, paced_requests: int = 1) -> LoadSpec:
    """Unpaced, each connection sends requests for a fixed time; paced, a fixed number of requests."""
    paced = system.pace_ms > 0
    return LoadSpec(
        port=system.port,
        streams=streams,
        tokens=plan.tokens,
        requests=paced_requests if paced else ANY_NUMBER,
        start_limit_s=DEADLINE_S if paced else plan.flat_s,
        request_timeout_s=DEADLINE_S,
    )


def run_plan(plan: Plan) -> Iterator[Cell]:
    """Yield every cell as it is measured, so that an interrupted run keeps its results so far."""
    for repeat in range(plan.repeats):
        if {"unpaced", "stalled"}.intersection(plan.parts):
            yield from run_unpaced(plan, repeat)
        if "paced" in plan.parts:
            with started(plan, PACED_MS, repeat) as systems:
                yield from run_matrix(plan, systems, plan.paced_streams, repeat)
    if "idle" in plan.parts:
        yield from run_idle(plan)


def run_unpaced(plan: Plan, repeat: int) -> Iterator[Cell]:
    with started(plan, FLAT_OUT_MS, repeat) as systems:
        if "unpaced" in plan.parts:
            yield from run_matrix(plan, systems, plan.flat_streams, repeat)
        if "stalled" in plan.parts:
            yield from run_stall(plan, systems, repeat)


@contextmanager
def started(plan: Plan, pace_ms: float, repeat: int) -> Iterator[list[RunningSystem]]:
    with ExitStack() as stack:
        setup, names = plan.setup(pace_ms), plan.systems_at(pace_ms, repeat)
        yield [stack.enter_context(running(name, setup)) for name in names]


def run_matrix(
    plan: Plan, systems: Sequence[RunningSystem], stream_counts: Sequence[int], repeat: int
) -> Iterator[Cell]:
    for streams in stream_counts:
        for system in systems:
            # A second request includes the cost of a reused connection; with many streams it is not needed.
            spec = load_spec(plan, system, streams, paced_requests=2 if streams < 64 else 1)
            yield measure(system, spec, "stream", repeat)


def run_stall(plan: Plan, systems: Sequence[RunningSystem], repeat: int) -> Iterator[Cell]:
    """Only unpaced: a paced server takes minutes to fill the buffers of a client."""
    for system in (each for each in systems if each.name not in NEVER_STALLED):
        spec = load_spec(plan, system, plan.stall_streams)
        yield measure(system, spec, "undisturbed", repeat)
        stalled = msgspec.structs.replace(
            spec, stalled_tokens=STALLED_TOKENS, stall_lead_s=STALL_LEAD_S, server_pids=system.pids
        )
        yield measure(system, stalled, "stalled", repeat)


def run_idle(plan: Plan) -> Iterator[Cell]:
    """Once per run: memory hardly varies, and every system must be started for it."""
    for name in plan.systems_at(IDLE_MS, 0):
        with running(name, plan.setup(IDLE_MS)) as system:
            spec = load_spec(plan, system, plan.idle_streams)
            yield measure(system, msgspec.structs.replace(spec, hold_s=HOLD_S), "idle", 0)


def measure(system: RunningSystem, spec: LoadSpec, kind: Kind, repeat: int) -> Cell:
    rss_open: dict[str, int] = {}

    def sample_memory() -> None:
        time.sleep(spec.hold_s / 2)
        rss_open.update(system.usage().rss_bytes)

    before, busy_before, began = system.usage(), busy_core_s(), time.monotonic()
    load = generate_load(spec, sample_memory)
    after, busy_s, wall_s = system.usage(), busy_core_s() - busy_before, time.monotonic() - began
    cpu_s = {role: after.cpu_s[role] - before.cpu_s[role] for role in after.cpu_s}
    foreign_s = busy_s - sum(cpu_s.values()) - load.cpu_s
    cell = Cell(
        kind=kind,
        system=system.name,
        pace_ms=system.pace_ms,
        streams=spec.streams,
        tokens_per_request=spec.tokens,
        repeat=repeat,
        load=load,
        cpu_s=cpu_s,
        rss_start_bytes=system.at_start.rss_bytes,
        rss_open_bytes=rss_open,
        foreign_cores=max(0.0, foreign_s / wall_s),
    )
    print_progress(cell)
    return cell


def generate_load(spec: LoadSpec, on_open: Callable[[], None]) -> LoadResult:
    """Run the load generator to its end; call `on_open` when all its streams are open."""
    argv = [sys.executable, "-m", "bench.load", msgspec.json.encode(spec).decode()]
    last_line = ""
    with subprocess.Popen(argv, stdout=subprocess.PIPE, text=True) as process:
        # The generator has its own timeout; this one ends a hung generator.
        guard = threading.Timer(2 * spec.request_timeout_s, process.kill)
        guard.start()
        try:
            assert process.stdout is not None
            for line in process.stdout:
                last_line = line.strip()
                if last_line == OPEN_LINE:
                    on_open()
        except BaseException:
            process.kill()
            raise
        finally:
            guard.cancel()
    if process.returncode != 0 or not last_line.startswith("{"):
        raise SystemFailed(f"the load generator ended with {process.returncode} and no result")
    return msgspec.json.decode(last_line, type=LoadResult)


def busy_core_s() -> float:
    """Busy seconds of all cores since the machine started."""
    times = psutil.cpu_times()
    return float(times.user + times.nice + times.system + times.irq + times.softirq + times.steal)


def print_progress(cell: Cell) -> None:
    load = cell.load
    rate = load.tokens / load.duration_s if load.duration_s else 0.0
    print(
        f"{cell.kind:11} {cell.system:14} pace {cell.pace_ms:6g} streams {cell.streams:5} "
        f"{rate:9.0f} tok/s  ttft {load.ttft_ms_p50:7.1f} ms  gap p99 {load.gap_ms_p99:7.1f} ms  "
        f"others {cell.foreign_cores:4.1f} cores {'' if cell.valid else f'INVALID {load.errors}'}",
        file=sys.stderr,
        flush=True,
    )


def write_results(results: Results, out: Path, tokens: int = TOKENS) -> None:
    out.mkdir(parents=True, exist_ok=True)
    encoded = msgspec.json.format(msgspec.json.encode(results), indent=1)
    name = "path" if tokens == TOKENS else f"path-{tokens}-tokens"
    (out / f"{name}-{results.date[:10]}.json").write_bytes(encoded)
    (out / f"{name}.md").write_text(to_markdown(results))


def write_profile(plan: Plan, out: Path) -> None:
    """Load Baton alone with its worker under cProfile, one token an event, and write the most expensive functions."""
    with tempfile.TemporaryDirectory(prefix="baton-profile-") as folder:
        with running("baton-eager", plan.setup(FLAT_OUT_MS, Path(folder))) as system:
            measure(system, load_spec(plan, system, PROFILE_STREAMS), "stream", 0)
        files = [str(file) for file in sorted(Path(folder).iterdir())]
        if not files:
            raise SystemFailed("the worker wrote no profile")
        out.mkdir(parents=True, exist_ok=True)
        text = io.StringIO()
        pstats.Stats(*files, stream=text).sort_stats("tottime").print_stats(PROFILE_LINES)
        table = text.getvalue().partition("\n\n")[2]  # the first paragraph is the path of the file
        (out / "path-profile.txt").write_text(re.sub(r"/\S*/(?=baton/|site-packages/|lib/python)", "", table))


def parse_plan(options: argparse.Namespace) -> Plan:
    base = QUICK if options.quick else Plan()
    return dataclasses.replace(
        base,
        systems=options.systems or base.systems,
        flat_streams=options.streams or base.flat_streams,
        paced_streams=options.streams or base.paced_streams,
        repeats=options.repeats or base.repeats,
        before=options.before,
        parts=options.parts,
        tokens=options.tokens,
        model_dir=options.model_dir or base.model_dir,
    )


def comma_separated_counts(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in text.split(","))


def comma_separated_systems(text: str) -> tuple[str, ...]:
    names = tuple(text.split(","))
    if unknown := set(names) - set(PEERS):
        raise argparse.ArgumentTypeError(f"unknown: {', '.join(sorted(unknown))}")
    return names


def comma_separated_parts(text: str) -> tuple[Part, ...]:
    if unknown := set(text.split(",")) - set(PARTS):
        raise argparse.ArgumentTypeError(f"unknown: {', '.join(sorted(unknown))}")
    return tuple(part for part in PARTS if part in text.split(","))


def parse_arguments(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m bench.path", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="a small matrix, to check that everything runs")
    parser.add_argument("--streams", type=comma_separated_counts, metavar="N,N", help="concurrent streams")
    parser.add_argument("--repeats", type=int, help="how often each cell is measured")
    parser.add_argument("--systems", type=comma_separated_systems, metavar="A,B", help=", ".join(PEERS))
    parser.add_argument("--before", type=Path, metavar="DIR", help="a checkout of an older Baton to measure beside it")
    parser.add_argument(
        "--parts", type=comma_separated_parts, default=PARTS, metavar="A,B", help=f"{', '.join(PARTS)} (all)"
    )
    parser.add_argument("--tokens", type=int, default=TOKENS, help=f"tokens of an answer ({TOKENS})")
    parser.add_argument("--out", type=Path, default=Path("bench/results"), help="folder of the results")
    parser.add_argument("--model-dir", type=Path, help="tokenizer and config for the reference worker")
    parser.add_argument("--profile", action="store_true", help="only profile Baton's worker, unpaced")
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> int:
    options = parse_arguments(arguments)
    plan = parse_plan(options)
    raise_descriptor_limit()
    # Exit by exception, so that child processes are stopped; the default action would leave them running.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    try:
        if options.profile:
            write_profile(plan, options.out)
            return 0
        return run_and_write(plan, options.out)
    except SystemFailed as failure:
        print(failure, file=sys.stderr)
        return 1


def run_and_write(plan: Plan, out: Path) -> int:
    """Run the plan and write the results, also after an interrupt; return 0 if every cell is valid."""
    cells: list[Cell] = []
    source = source_digest()
    try:
        for cell in run_plan(plan):
            cells.append(cell)
    finally:
        if cells:
            changed = source_digest() != source
            results = describe_run(cells, source_changed=changed)
            write_results(results, out, plan.tokens)
    return 0 if all(cell.valid for cell in cells) else 1


if __name__ == "__main__":
    sys.exit(main())
