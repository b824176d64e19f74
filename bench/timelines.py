"""`python -m bench.timelines`: what recording timelines costs, with the ring on and off in the same run.

Two equal systems run at the same time; short loads are sent to one and then the other, in turn, and which of them is
first alternates. So other load on the machine affects both alike. CPU time per token is the figure that other load
disturbs least. It differs by some percent from one start of a process to the next, so both start again in each round.
With `--instructions` it counts instructions instead, which differ less. Speed is reported, never asserted.
"""

import argparse
import datetime
import platform
import statistics
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import NamedTuple

import msgspec

from bench.instructions import PROCESSES, count_instructions
from bench.path import FLAT_OUT_MS, PACED_MS, Plan, load_spec, measure
from bench.systems import LAUNCHES, Launch, RunningSystem, Setup, Site, SystemFailed, running

ON, OFF = "recorded", "unrecorded"
SECONDS = 2.0
REQUESTS = 50


class Load(NamedTuple):
    """What is asked of both systems: which of the systems of `bench.path` it is, its pace and its streams."""

    system: str
    pace_ms: float
    streams: tuple[int, ...]


LOADS = {
    "unpaced, tokens merged": Load("baton", FLAT_OUT_MS, (1, 16, 64)),
    "unpaced, one token an event": Load("baton-eager", FLAT_OUT_MS, (1, 16, 64)),
    "one token in 20 ms": Load("baton", PACED_MS, (64, 256)),
}


class Pair(msgspec.Struct, kw_only=True, frozen=True):
    """Microseconds of CPU per token of both systems, and their tokens per second, in one round."""

    load: str
    streams: int
    on_us: float
    off_us: float
    on_rate: float
    off_rate: float
    foreign_cores: float


def systems(load: Load) -> dict[str, Callable[[Setup, Site], list[Launch]]]:
    """Return how the system of a load is started with the ring on, and off."""
    launches = LAUNCHES[load.system]

    def unrecorded(setup: Setup, site: Site) -> list[Launch]:
        return [Launch(each.argv, each.env | {"BATON_TIMELINE_REQUESTS": "0"}) for each in launches(setup, site)]

    return {ON: launches, OFF: unrecorded}


def run(names: Sequence[str], rounds: int, tokens: int) -> list[Pair]:
    """Measure each load in `rounds` rounds. Both systems start again in each, in turns which of them first."""
    plan = Plan(flat_s=SECONDS)
    pairs: list[Pair] = []
    for number in range(rounds):
        order = (ON, OFF) if number % 2 else (OFF, ON)
        for name in names:
            load = LOADS[name]
            with ExitStack() as stack:
                setup, launches = plan.setup(load.pace_ms), systems(load)
                both = {each: stack.enter_context(running(each, setup, launches)) for each in order}
                for each in both.values():  # warm
                    measure(each, load_spec(plan, each, load.streams[0]), "stream", 0)
                for count in load.streams:
                    asked = order if number // 2 % 2 else order[::-1]
                    pairs.append(_measure(plan, both, asked, name, count, tokens, number))
    return pairs


class Count(msgspec.Struct, kw_only=True, frozen=True):
    """Instructions per request of both processes, by process, with the ring on and off, in one round."""

    load: str
    on: dict[str, float]
    off: dict[str, float]

    @property
    def ratio(self) -> float:
        return sum(self.on.values()) / sum(self.off.values())


_ONE_AN_EVENT = {"BATON_FLUSH_INTERVAL_MS": "0", "BATON_ECHO_BURST": "1"}
COUNTED_LOADS = {
    "128 tokens, one token an event": (128, _ONE_AN_EVENT),
    "128 tokens, merged": (128, {}),
    "1 token": (1, {}),
}


def count(rounds: int, requests: int) -> list[Count]:
    """Count the instructions of each load in `rounds` rounds."""
    counts = []
    for number in range(rounds):
        for name, (tokens, variables) in COUNTED_LOADS.items():
            found: dict[str, dict[str, float]] = {}
            for ring in ("1000", "0") if number % 2 else ("0", "1000"):
                both = variables | {"BATON_ECHO_PACE_MS": "0", "BATON_TIMELINE_REQUESTS": ring}
                found[ring] = {each: count_instructions(each, both, requests, tokens) for each in PROCESSES}
            counts.append(Count(load=name, on=found["1000"], off=found["0"]))
            print(f"{name:32} {counts[-1].ratio:.4f}", file=sys.stderr, flush=True)
    return counts


def counts_to_markdown(counts: Sequence[Count], requests: int) -> str:
    """Return a table with the medians over the rounds, and the range of the ratios."""
    lines = [
        "# Cost of timelines, in instructions",
        "",
        f"`python -m bench.timelines --instructions`, {datetime.date.today()},"
        f" {platform.processor() or platform.machine()}, echo engine, one stream, {requests} requests. Thousands of"
        " instructions per request, counted by valgrind. A ratio above 1 means that recording costs more.",
        "",
        "| request | frontend on | off | worker on | off | ratio (range) | rounds |",
        "|---|---|---|---|---|---|---|",
    ]
    for name in dict.fromkeys(each.load for each in counts):
        rows = [each for each in counts if each.load == name]
        cells = [
            f"{statistics.median(getattr(row, side)[process] for row in rows) / 1000:.0f}"
            for process in PROCESSES
            for side in ("on", "off")
        ]
        ratios = sorted(row.ratio for row in rows)
        lines.append(
            f"| {name} | {' | '.join(cells)} | {statistics.median(ratios):.4f} ({ratios[0]:.4f} to {ratios[-1]:.4f})"
            f" | {len(rows)} |"
        )
    return "\n".join(lines) + "\n"


def _measure(
    plan: Plan,
    both: Mapping[str, RunningSystem],
    order: Sequence[str],
    load: str,
    streams: int,
    tokens: int,
    number: int,
) -> Pair:
    cost: dict[str, float] = {}
    rate: dict[str, float] = {}
    foreign = 0.0
    for name in order:
        spec = msgspec.structs.replace(load_spec(plan, both[name], streams), tokens=tokens)
        cell = measure(both[name], spec, "stream", number)
        if not cell.load.tokens:
            raise SystemFailed(f"{name} returned no tokens: {cell.load.errors}")
        cost[name] = sum(cell.cpu_s.values()) * 1e6 / cell.load.tokens
        rate[name] = cell.load.tokens / cell.load.duration_s
        foreign = max(foreign, cell.foreign_cores)
    return Pair(
        load=load,
        streams=streams,
        on_us=cost[ON],
        off_us=cost[OFF],
        on_rate=rate[ON],
        off_rate=rate[OFF],
        foreign_cores=foreign,
    )


def to_markdown(pairs: Sequence[Pair], tokens: int) -> str:
    """Return a table with the medians, and of the ratios of each round the median and the quartiles."""
    lines = [
        "# Cost of timelines",
        "",
        f"`python -m bench.timelines`, {datetime.date.today()}, {platform.processor() or platform.machine()},"
        f" echo engine, {tokens} tokens a request. Two `baton serve` run at the same time, one with"
        " `--timeline-requests 0`; loads alternate. A ratio above 1 means that recording costs more.",
        "",
        "| load | streams | CPU us/token on | off | ratio (quartiles) | tok/s on | off | ratio | rounds | other load,"
        " cores |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for key in dict.fromkeys((pair.load, pair.streams) for pair in pairs):
        lines.append(_row(key, [pair for pair in pairs if (pair.load, pair.streams) == key]))
    every = [pair.on_us / pair.off_us for pair in pairs]
    lines += ["", f"All rounds together: CPU per token {statistics.median(every):.3f} times that without recording."]
    return "\n".join(lines) + "\n"


def _row(key: tuple[str, int], pairs: Sequence[Pair]) -> str:
    load, streams = key
    ratios = [pair.on_us / pair.off_us for pair in pairs]
    quartiles = statistics.quantiles(ratios, n=4) if len(ratios) > 1 else [ratios[0]] * 3
    rates = statistics.median(pair.off_rate / pair.on_rate for pair in pairs)
    middle = {
        name: statistics.median(getattr(pair, name) for pair in pairs)
        for name in ("on_us", "off_us", "on_rate", "off_rate", "foreign_cores")
    }
    return (
        f"| {load} | {streams} | {middle['on_us']:.2f} | {middle['off_us']:.2f} | {statistics.median(ratios):.3f}"
        f" ({quartiles[0]:.3f} to {quartiles[2]:.3f}) | {middle['on_rate']:.0f} | {middle['off_rate']:.0f} |"
        f" {rates:.3f} | {len(pairs)} | {middle['foreign_cores']:.1f} |"
    )


def _write(path: Path, results: object, text: str) -> None:
    path.with_suffix(".json").write_bytes(msgspec.json.format(msgspec.json.encode(results), indent=1))
    path.with_suffix(".md").write_text(text)
    print(text)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.timelines", description=__doc__)
    parser.add_argument("--loads", nargs="+", choices=LOADS, default=list(LOADS), help="which loads to measure")
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--tokens", type=int, default=128, help="tokens of each request")
    parser.add_argument("--instructions", action="store_true", help="count instructions, with valgrind (slow)")
    parser.add_argument("--out", type=Path, default=Path("bench/results"), help="folder of the results")
    options = parser.parse_args(arguments)
    options.out.mkdir(parents=True, exist_ok=True)
    if options.instructions:
        counts = count(options.rounds, REQUESTS)
        _write(options.out / "timelines-instructions", counts, counts_to_markdown(counts, REQUESTS))
    else:
        pairs = run(options.loads, options.rounds, options.tokens)
        _write(options.out / "timelines", pairs, to_markdown(pairs, options.tokens))
    return 0


if __name__ == "__main__":
    sys.exit(main())
