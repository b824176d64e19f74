"""`python -m bench.handlers`: CPU cost of serving SGLang, in Baton and in the pattern of Dynamo's handlers.

Both serve the same double of SGLang's engine with the same runtime and the same frontend; only the worker's CPU time is
measured. Paced, every request gets a token every 20 ms, as from a decoding batch.
"""

import argparse
import io
import pstats
import re
import signal
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from statistics import median

import msgspec

import baton
from bench.load import LoadSpec, raise_descriptor_limit
from bench.path import DEADLINE_S, PROFILE_LINES, comma_separated_counts, measure
from bench.result_files import Cell, Results, describe_run, source_digest
from bench.systems import LOOPBACK_RUNTIME, Launch, RunningSystem, Setup, Site, SystemFailed, running

OURS, THEIRS, BARE = "baton", "reference", "bare"
PACED_MS = 20.0
TOKENS = 128
MODEL_DIR = Path(baton.__file__).parent / "engines" / "echo" / "model"
Measure = Callable[[Cell], float]


def launches(worker: str) -> Callable[[Setup, Site], list[Launch]]:
    """Return the function that builds the launches of `worker` and its frontend."""

    def start(setup: Setup, site: Site) -> list[Launch]:
        discovery = str(site.work_dir / "discovery")
        env = LOOPBACK_RUNTIME | {
            "DYN_FILE_KV": discovery,
            "BATON_RUNTIME_DIRECTORY": discovery,
            "BATON_MAX_IN_FLIGHT": "4096",
            "BATON_PROFILE_DIR": str(setup.profile_dir or ""),
        }
        arguments = ("--model-dir", str(setup.model_dir), "--pace-ms", str(setup.pace_ms))
        frontend = Launch(("bench.peers.reference_frontend", "--port", str(site.port)), env)
        return [frontend, Launch((f"bench.peers.{worker}", *arguments), env)]

    return start


SYSTEMS = {
    OURS: launches("baton_sglang_worker"),
    THEIRS: launches("reference_sglang_worker"),
    BARE: launches("bare_sglang_worker"),
}


def run(streams: Sequence[int], repeats: int, seconds: float) -> Iterator[Cell]:
    """Yield every cell as it is measured. The systems alternate, and so does the first one."""
    for repeat in range(repeats):
        for pace_ms, tokens in ((PACED_MS, TOKENS), (0.0, TOKENS), (0.0, 1)):
            with ExitStack() as stack:
                setup = Setup(pace_ms, MODEL_DIR)
                names = [*SYSTEMS] if repeat % 2 == 0 else [*reversed(SYSTEMS)]
                systems = [stack.enter_context(running(name, setup, SYSTEMS)) for name in names]
                for count in streams:
                    for system in systems:
                        yield measure(system, spec(system, count, tokens, seconds), "stream", repeat)


def spec(system: RunningSystem, streams: int, tokens: int, seconds: float) -> LoadSpec:
    return LoadSpec(
        port=system.port,
        streams=streams,
        tokens=tokens,
        requests=1_000_000,
        start_limit_s=seconds,
        request_timeout_s=DEADLINE_S,
    )


def per_token(cell: Cell) -> float:
    return 1e6 * cell.cpu_s["worker"] / cell.load.tokens


def per_request(cell: Cell) -> float:
    return 1e6 * cell.cpu_s["worker"] / cell.load.requests


def to_markdown(results: Results) -> str:
    lines = [
        "# CPU cost of serving SGLang",
        "",
        f"`{results.command}`, {results.date[:10]}, {results.machine.cores} cores, {results.machine.cpu}.",
        "CPU time of the worker process, median and range over the repeats. All systems serve the same double of"
        " SGLang's engine. *Reference* serves it in the pattern of Dynamo's Python handlers. *Bare* pushes each chunk"
        " of the double and does nothing else: the cost of the double and of the runtime's messages, which the others"
        " include. *Ratio* is Baton divided by reference: the median of the repeats' ratios, and their range.",
        "",
    ]
    if results.source_changed:
        lines += ["**The source changed during this run. Run it again.**", ""]
    for title, pace_ms, tokens, value in (
        (f"Microseconds per token, one every {PACED_MS:g} ms", PACED_MS, TOKENS, per_token),
        ("Microseconds per token, unpaced", 0.0, TOKENS, per_token),
        ("Microseconds per request of one token", 0.0, 1, per_request),
    ):
        cells = [c for c in results.cells if c.pace_ms == pace_ms and c.tokens_per_request == tokens and c.valid]
        lines += [f"## {title}", "", "| streams | Baton | reference | ratio | bare |", "|---|---|---|---|---|"]
        lines += [row(cells, streams, value) for streams in sorted({cell.streams for cell in cells})]
        lines += [""]
    return "\n".join(lines)


def row(cells: Sequence[Cell], streams: int, value: Measure) -> str:
    by_system = {
        name: {c.repeat: value(c) for c in cells if c.system == name and c.streams == streams} for name in SYSTEMS
    }
    both = sorted(by_system[OURS].keys() & by_system[THEIRS].keys())
    ratios = [by_system[OURS][repeat] / by_system[THEIRS][repeat] for repeat in both]
    ours, theirs, bare = [spread(list(by_system[name].values()), ".1f") for name in (OURS, THEIRS, BARE)]
    return f"| {streams} | {ours} | {theirs} | {spread(ratios, '.2f')} | {bare} |"


def spread(values: Sequence[float], form: str) -> str:
    if not values:
        return "-"
    return f"{median(values):{form}} ({min(values):{form}}-{max(values):{form}})"


def write(results: Results, out: Path) -> None:
    out.mkdir(parents=True, exist_ok=True)
    (out / "handlers.json").write_bytes(msgspec.json.format(msgspec.json.encode(results), indent=1))
    (out / "handlers.md").write_text(to_markdown(results))


def write_profile(out: Path) -> None:
    """Load Baton's worker under cProfile and write the most expensive functions."""
    with tempfile.TemporaryDirectory(prefix="baton-profile-") as folder:
        with running(OURS, Setup(PACED_MS, MODEL_DIR, profile_dir=Path(folder)), SYSTEMS) as system:
            measure(system, spec(system, 64, TOKENS, 6.0), "stream", 0)
        text = io.StringIO()
        files = [str(file) for file in sorted(Path(folder).iterdir())]
        pstats.Stats(*files, stream=text).sort_stats("tottime").print_stats(PROFILE_LINES)
        table = text.getvalue().partition("\n\n")[2]
        (out / "handlers-profile.txt").write_text(re.sub(r"/\S*/(?=baton/|site-packages/|lib/python)", "", table))


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.handlers", description=__doc__)
    parser.add_argument("--streams", type=comma_separated_counts, default=(1, 16, 64, 256), metavar="N,N")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=6.0, help="how long a cell starts requests")
    parser.add_argument("--out", type=Path, default=Path("bench/results"))
    parser.add_argument("--profile", action="store_true", help="only profile Baton's worker")
    options = parser.parse_args(arguments)
    raise_descriptor_limit()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # exit by exception, so that child processes are stopped
    try:
        if options.profile:
            write_profile(options.out)
            return 0
        source, cells = source_digest(), list(run(options.streams, options.repeats, options.seconds))
    except SystemFailed as failure:
        print(failure, file=sys.stderr)
        return 1
    changed = source_digest() != source
    write(describe_run(cells, source_changed=changed, module="bench.handlers"), options.out)
    return 0 if all(cell.valid for cell in cells) else 1


if __name__ == "__main__":
    sys.exit(main())
