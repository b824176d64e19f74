"""`python -m bench.timelines`: what recording timelines costs.

CPU time per token differs by some percent from one start of a process to the next, more than recording costs. So one
system runs, and recording is switched in its processes between short loads: on, off, off, on. The two loads without
recording, compared with each other, show the noise. Both figures are medians over many such turns and several starts.
With `--instructions` it counts instructions in such turns instead. Speed is reported, never asserted.
"""

import argparse
import datetime
import os
import platform
import statistics
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import msgspec

from bench.instructions import PROCESSES, counted_process
from bench.load import LoadSpec
from bench.path import FLAT_OUT_MS, PACED_MS, Plan, load_spec, measure
from bench.systems import LAUNCHES, Launch, RunningSystem, Setup, Site, SystemFailed, running

SWITCHED = Path(__file__).parent / "recording_switch"
SECONDS = 1.0
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


class Turn(msgspec.Struct, kw_only=True, frozen=True):
    """Microseconds of CPU per token, and tokens per second, of the loads of one turn."""

    load: str
    streams: int
    on_us: tuple[float, float]
    off_us: tuple[float, float]
    on_rate: float
    off_rate: float
    foreign_cores: float

    @property
    def ratio(self) -> float:
        """The cost with recording over that without it."""
        return sum(self.on_us) / sum(self.off_us)

    @property
    def noise(self) -> float:
        """The cost of two equal loads without recording, the later over the earlier."""
        return self.off_us[1] / self.off_us[0]


class Switch:
    """Whether the processes of a system record the requests that arrive."""

    def __init__(self, path: Path) -> None:
        self._path = path
        path.write_bytes(b"\1")

    @property
    def variables(self) -> dict[str, str]:
        """The environment of a process that the switch affects."""
        path = os.pathsep.join([str(SWITCHED), *filter(None, [os.environ.get("PYTHONPATH")])])
        return {"RECORDING_SWITCH": str(self._path), "PYTHONPATH": path}

    def launches(self, name: str) -> Callable[[Setup, Site], list[Launch]]:
        """Return how the system `name` of `bench.path` is started so that the switch affects it."""
        variables = self.variables
        return lambda setup, site: [Launch(each.argv, each.env | variables) for each in LAUNCHES[name](setup, site)]

    def set(self, on: bool) -> None:
        """Record from now on, or do not."""
        with self._path.open("r+b") as file:
            file.write(b"\1" if on else b"\0")


def run(names: Sequence[str], starts: int, turns: int, tokens: int) -> list[Turn]:
    """Measure each load in `turns` turns on each of `starts` systems."""
    plan = Plan(flat_s=SECONDS)
    done: list[Turn] = []
    for _ in range(starts):
        for name in names:
            load = LOADS[name]
            with tempfile.TemporaryDirectory(prefix="baton-bench-") as folder:
                switch = Switch(Path(folder) / "recording")
                with running(
                    load.system, plan.setup(load.pace_ms), {load.system: switch.launches(load.system)}
                ) as system:
                    measure(system, load_spec(plan, system, max(load.streams)), "stream", 0)  # warm
                    for streams in load.streams:
                        spec = msgspec.structs.replace(load_spec(plan, system, streams), tokens=tokens)
                        done += [_turn(system, switch, spec, name) for _ in range(turns)]
    return done


def _turn(system: RunningSystem, switch: Switch, spec: LoadSpec, load: str) -> Turn:
    costs: dict[bool, list[float]] = {True: [], False: []}
    rates: dict[bool, list[float]] = {True: [], False: []}
    foreign = 0.0
    for on in (True, False, False, True):
        switch.set(on)
        cell = measure(system, spec, "stream", 0)
        if not cell.load.tokens:
            raise SystemFailed(f"{system.name} returned no tokens: {cell.load.errors}")
        costs[on].append(sum(cell.cpu_s.values()) * 1e6 / cell.load.tokens)
        rates[on].append(cell.load.tokens / cell.load.duration_s)
        foreign = max(foreign, cell.foreign_cores)
    return Turn(
        load=load,
        streams=spec.streams,
        on_us=(costs[True][0], costs[True][1]),
        off_us=(costs[False][0], costs[False][1]),
        on_rate=statistics.mean(rates[True]),
        off_rate=statistics.mean(rates[False]),
        foreign_cores=foreign,
    )


class Count(msgspec.Struct, kw_only=True, frozen=True):
    """Instructions per request by process, with recording on and off, in one turn of each process."""

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


def count(starts: int, turns: int, requests: int) -> list[Count]:
    """Count the instructions of each load in `turns` turns on each of `starts` systems."""
    counts = []
    for _ in range(starts):
        for name, (tokens, variables) in COUNTED_LOADS.items():
            found = {each: _count_turns(each, variables, tokens, turns, requests) for each in PROCESSES}
            for number in range(turns):
                on, off = ({each: found[each][number][side] for each in PROCESSES} for side in (True, False))
                counts.append(Count(load=name, on=on, off=off))
                print(f"{name:32} {counts[-1].ratio:.4f}", file=sys.stderr, flush=True)
    return counts


def _count_turns(
    process: str, variables: Mapping[str, str], tokens: int, turns: int, requests: int
) -> list[dict[bool, float]]:
    """Return the instructions of a process per request, with recording on and off, in each turn."""
    with tempfile.TemporaryDirectory(prefix="baton-bench-") as folder:
        switch = Switch(Path(folder) / "recording")
        with counted_process(process, {**variables, "BATON_ECHO_PACE_MS": "0", **switch.variables}, tokens) as counted:
            return [_count_turn(switch, counted, requests) for _ in range(turns)]


def _count_turn(switch: Switch, counted: Callable[[int], float], requests: int) -> dict[bool, float]:
    found: dict[bool, list[float]] = {True: [], False: []}
    for on in (True, False, False, True):
        switch.set(on)
        found[on].append(counted(requests))
    return {on: statistics.mean(each) for on, each in found.items()}


def counts_to_markdown(counts: Sequence[Count], requests: int) -> str:
    """Return a table with the medians over the turns, and the range of the ratios."""
    lines = [
        "# Cost of timelines, in instructions",
        "",
        f"`python -m bench.timelines --instructions`, {datetime.date.today()},"
        f" {platform.processor() or platform.machine()}, echo engine, one stream, {requests} requests at a time."
        " Thousands of instructions per request, counted by valgrind in processes in which recording is switched: on,"
        " off, off, on. A ratio above 1 means that recording costs more.",
        "",
        "| request | frontend on | off | worker on | off | ratio (range) | turns |",
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


def to_markdown(turns: Sequence[Turn], tokens: int) -> str:
    """Return a table with the medians, and the quartiles of the ratios of all turns."""
    lines = [
        "# Cost of timelines",
        "",
        f"`python -m bench.timelines`, {datetime.date.today()}, {platform.processor() or platform.machine()},"
        f" echo engine, {tokens} tokens a request. CPU time of all processes of a `baton serve`, in which recording is"
        " switched between loads: on, off, off, on. A ratio above 1 means that recording costs more; noise is the ratio"
        " of the two loads without it.",
        "",
        "| load | streams | CPU us/token on | off | ratio (quartiles) | noise (quartiles) | tok/s off/on | turns |"
        " other load, cores |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for key in dict.fromkeys((turn.load, turn.streams) for turn in turns):
        lines.append(_row(key, [turn for turn in turns if (turn.load, turn.streams) == key]))
    lines += [
        "",
        f"All turns together: ratio {_quartiles([turn.ratio for turn in turns])},"
        f" noise {_quartiles([turn.noise for turn in turns])}.",
    ]
    return "\n".join(lines) + "\n"


def _row(key: tuple[str, int], turns: Sequence[Turn]) -> str:
    load, streams = key
    on_us, off_us = (statistics.median(sum(each) / 2 for each in times) for times in _times(turns))
    rates = statistics.median(turn.off_rate / turn.on_rate for turn in turns)
    foreign = statistics.median(turn.foreign_cores for turn in turns)
    return (
        f"| {load} | {streams} | {on_us:.2f} | {off_us:.2f} | {_quartiles([turn.ratio for turn in turns])} |"
        f" {_quartiles([turn.noise for turn in turns])} | {rates:.3f} | {len(turns)} | {foreign:.1f} |"
    )


def _times(turns: Sequence[Turn]) -> tuple[list[tuple[float, float]], list[tuple[float, float]]]:
    return [turn.on_us for turn in turns], [turn.off_us for turn in turns]


def _quartiles(ratios: Sequence[float]) -> str:
    first, middle, third = statistics.quantiles(ratios, n=4) if len(ratios) > 1 else [ratios[0]] * 3
    return f"{middle:.3f} ({first:.3f} to {third:.3f})"


def _write(path: Path, results: object, text: str) -> None:
    path.with_suffix(".json").write_bytes(msgspec.json.format(msgspec.json.encode(results), indent=1))
    path.with_suffix(".md").write_text(text)
    print(text)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.timelines", description=__doc__)
    parser.add_argument("--loads", nargs="+", choices=LOADS, default=list(LOADS), help="which loads to measure")
    parser.add_argument("--rounds", type=int, default=3, help="how often the systems start again")
    parser.add_argument("--turns", type=int, default=4, help="turns of each load on each of these systems")
    parser.add_argument("--tokens", type=int, default=128, help="tokens of each request")
    parser.add_argument("--instructions", action="store_true", help="count instructions, with valgrind (slow)")
    parser.add_argument("--out", type=Path, default=Path("bench/results"), help="folder of the results")
    options = parser.parse_args(arguments)
    options.out.mkdir(parents=True, exist_ok=True)
    if options.instructions:
        counts = count(options.rounds, options.turns, REQUESTS)
        _write(options.out / "timelines-instructions", counts, counts_to_markdown(counts, REQUESTS))
    else:
        turns = run(options.loads, options.rounds, options.turns, options.tokens)
        _write(options.out / "timelines", turns, to_markdown(turns, options.tokens))
    return 0


if __name__ == "__main__":
    sys.exit(main())
