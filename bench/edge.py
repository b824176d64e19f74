"""`python -m bench.edge`: what the edge costs, beside the same Rust frontend without it, in the same run.

Both systems have one frontend and one worker with the echo engine. They alternate in every cell, and the first one
alternates between repeats. Speed is reported, never asserted.
"""

import argparse
import dataclasses
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

import msgspec

import baton
from bench.edge_report import BARE, EAGER, EDGE, IDLE_MS, PACED_MS, to_markdown
from bench.load import LoadSpec, raise_descriptor_limit
from bench.path import ANY_NUMBER, DEADLINE_S, HOLD_S, TOKENS, measure
from bench.result_files import Cell, Results, describe_run, source_digest
from bench.systems import Launch, RunningSystem, Setup, Site, SystemFailed, running

MODEL_DIR = Path(baton.__file__).parent / "engines" / "echo" / "model"
EAGER_SETTINGS = {"BATON_FLUSH_INTERVAL_MS": "0", "BATON_ECHO_BURST": "1"}
PACED_REQUESTS = 2


def launches(frontend: Sequence[str], settings: dict[str, str]) -> Callable[[Setup, Site], list[Launch]]:
    """Return the function that builds the launches of `frontend` and its worker."""

    def build(setup: Setup, site: Site) -> list[Launch]:
        env = settings | {
            "BATON_ECHO_PACE_MS": str(setup.pace_ms),
            "BATON_MAX_IN_FLIGHT": "4096",
            "BATON_RUNTIME_DIRECTORY": str(site.work_dir / "discovery"),
            "BATON_LOG_DIR": "-",
        }
        worker = ("baton", "worker", "--engine", "echo", "--system-port", "0")
        return [Launch((*frontend, "--port", str(site.port)), env), Launch(worker, env)]

    return build


EDGE_FRONTEND = ("baton", "frontend")
BARE_FRONTEND = ("bench.peers.bare_frontend",)
SYSTEMS = {
    EDGE: launches(EDGE_FRONTEND, {}),
    BARE: launches(BARE_FRONTEND, {}),
    EDGE + EAGER: launches(EDGE_FRONTEND, EAGER_SETTINGS),
    BARE + EAGER: launches(BARE_FRONTEND, EAGER_SETTINGS),
}


@dataclass(frozen=True)
class Plan:
    streams: tuple[int, ...] = (64, 256)
    idle_streams: int = 1024
    repeats: int = 5
    seconds: float = 4.0
    """How long an unpaced cell starts requests."""


QUICK = Plan(streams=(8,), idle_streams=64, repeats=1, seconds=0.5)


def run(plan: Plan) -> Iterator[Cell]:
    """Yield every cell as it is measured, so that an interrupted run keeps its results so far."""
    for repeat in range(plan.repeats):
        with started(0.0, repeat) as systems:
            yield from cells(systems, unpaced(plan, 1, tokens=1), repeat)
            for streams in plan.streams:
                yield from cells(systems, unpaced(plan, streams, tokens=1), repeat)
                yield from cells(systems, unpaced(plan, streams, TOKENS), repeat)
        with started(0.0, repeat, EAGER) as systems:
            for streams in plan.streams:
                yield from cells(systems, unpaced(plan, streams, TOKENS), repeat)
        with started(PACED_MS, repeat) as systems:
            for streams in plan.streams:
                yield from cells(systems, paced(streams), repeat)
        yield from idle(plan, repeat)


@contextmanager
def started(pace_ms: float, repeat: int, kind: str = "") -> Iterator[list[RunningSystem]]:
    with ExitStack() as stack:
        setup = Setup(pace_ms, MODEL_DIR)
        yield [stack.enter_context(running(name + kind, setup, SYSTEMS)) for name in order(repeat)]


def order(repeat: int) -> list[str]:
    return [EDGE, BARE] if repeat % 2 == 0 else [BARE, EDGE]


def cells(systems: Sequence[RunningSystem], spec: LoadSpec, repeat: int) -> Iterator[Cell]:
    for system in systems:
        yield measure(system, msgspec.structs.replace(spec, port=system.port), "stream", repeat)


def idle(plan: Plan, repeat: int) -> Iterator[Cell]:
    """In processes that have served one request: memory that an earlier load has left is not counted as free."""
    spec = msgspec.structs.replace(paced(plan.idle_streams), requests=1, hold_s=HOLD_S)
    for name in order(repeat):
        with running(name, Setup(IDLE_MS, MODEL_DIR), SYSTEMS) as system:
            yield measure(system, msgspec.structs.replace(spec, port=system.port), "idle", repeat)


def unpaced(plan: Plan, streams: int, tokens: int) -> LoadSpec:
    return LoadSpec(
        port=0,
        streams=streams,
        tokens=tokens,
        requests=ANY_NUMBER,
        start_limit_s=plan.seconds,
        request_timeout_s=DEADLINE_S,
    )


def paced(streams: int) -> LoadSpec:
    return LoadSpec(
        port=0,
        streams=streams,
        tokens=TOKENS,
        requests=PACED_REQUESTS,
        start_limit_s=DEADLINE_S,
        request_timeout_s=DEADLINE_S,
    )


def write(results: Results, out: Path) -> None:
    out.mkdir(parents=True, exist_ok=True)
    (out / "edge.json").write_bytes(msgspec.json.format(msgspec.json.encode(results), indent=1))
    (out / "edge.md").write_text(to_markdown(results))


def parse_arguments(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m bench.edge", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="few streams, once, to check that everything runs")
    parser.add_argument("--repeats", type=int, help="how often each cell is measured")
    parser.add_argument("--seconds", type=float, help="how long an unpaced cell starts requests")
    parser.add_argument("--out", type=Path, default=Path("bench/results"), help="folder of the results")
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> int:
    options = parse_arguments(arguments)
    base = QUICK if options.quick else Plan()
    plan = dataclasses.replace(base, repeats=options.repeats or base.repeats, seconds=options.seconds or base.seconds)
    raise_descriptor_limit()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # exit by exception, so that child processes are stopped
    measured: list[Cell] = []
    source = source_digest()
    try:
        for cell in run(plan):
            measured.append(cell)
    except SystemFailed as failure:
        print(failure, file=sys.stderr)
        return 1
    finally:
        if measured:
            changed = source_digest() != source
            write(describe_run(measured, source_changed=changed, module="bench.edge"), options.out)
    return 0 if all(cell.valid for cell in measured) else 1


if __name__ == "__main__":
    sys.exit(main())
