"""The results of `bench.router`: their records, and the report as markdown."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from statistics import median
from typing import Literal

import msgspec

from bench.result_files import Machine

DIRECT, OURS, MANY, THEIRS = "direct", "baton", "baton-many", "reference"
SYSTEMS = (DIRECT, OURS, THEIRS, MANY)
# File discovery takes two inotify instances for each pool, and Linux allows a user 128 by default.
POOLS = {OURS: 4, THEIRS: 4, MANY: 32}
TITLES = {
    DIRECT: "no router",
    OURS: f"Baton, {POOLS[OURS]} pools",
    THEIRS: f"Dynamo's pattern, {POOLS[THEIRS]} pools",
    MANY: f"Baton, {POOLS[MANY]} pools",
}
PACE_MS = 20.0
MANY_STREAMS = 64

Kind = Literal["paced", "one-token"]


class Cell(msgspec.Struct, frozen=True, kw_only=True):
    """One load on one system.

    The latencies of `paced` streams are the ages of their chunks at the client; those of `one-token` requests are the
    durations of whole requests.
    """

    kind: Kind
    system: str
    streams: int
    repeat: int
    requests: int
    chunks: int
    seconds: float
    p50_us: float
    p99_us: float
    router_cpu_s: float
    """0 without a router."""
    foreign_cores: float
    """Cores kept busy by other processes during the measurement."""


class Memory(msgspec.Struct, frozen=True, kw_only=True):
    """Resident bytes of a router after its start, and with all `streams` open."""

    system: str
    repeat: int
    streams: int
    before_bytes: int
    open_bytes: int


class Selection(msgspec.Struct, frozen=True, kw_only=True):
    """Nanoseconds to select a pool by the grid alone, and to select the first pool of a route with retries."""

    pools: int
    repeat: int
    select_ns: float
    route_ns: float


class RouterResults(msgspec.Struct, kw_only=True):
    date: str
    commit: str
    command: str
    machine: Machine
    source_changed: bool = False
    """Whether Baton's source files changed during the run."""
    selections: list[Selection] = []
    memories: list[Memory] = []
    cells: list[Cell] = []


def to_markdown(results: RouterResults) -> str:
    """Return the report."""
    return "\n".join(
        [*_head(results), *_selections(results), *_chunks(results), *_requests(results), *_memory(results)]
    )


def _head(results: RouterResults) -> Iterator[str]:
    foreign = [cell.foreign_cores for cell in results.cells] or [0.0]
    yield "# Cost of the global router"
    yield ""
    yield f"`{results.command}`, {results.date[:10]}, {results.machine.cores} cores, {results.machine.cpu}."
    yield (
        "A client, one worker and the router between them, each in its own process on the same cores. *Dynamo's"
        " pattern* is a router that forwards as Dynamo's does. Median and range over the repeats; differences are taken"
        " within a repeat. Other programs kept"
        f" {median(foreign):.1f} cores busy (at most {max(foreign):.1f})."
    )
    yield ""
    if results.source_changed:
        yield "**The source changed during this run. Run it again.**"
        yield ""


def _selections(results: RouterResults) -> Iterator[str]:
    yield "## Selecting a pool, nanoseconds"
    yield ""
    yield "| pools | by the grid alone | with retries: the pool to try first |"
    yield "|---|---|---|"
    for pools in sorted({one.pools for one in results.selections}):
        found = [one for one in results.selections if one.pools == pools]
        yield _row(
            str(pools),
            spread((one.select_ns for one in found), ",.0f"),
            spread((one.route_ns for one in found), ",.0f"),
        )
    yield ""


def _chunks(results: RouterResults) -> Iterator[str]:
    for streams in (1, MANY_STREAMS):
        cells = [cell for cell in results.cells if cell.kind == "paced" and cell.streams == streams]
        yield f"## Age of a chunk at the client, microseconds: {_streams(streams)}, a token every {PACE_MS:g} ms"
        yield ""
        yield "| | p50 | p99 | p50 more than without | p99 more than without | router CPU a chunk |"
        yield "|---|---|---|---|---|---|"
        yield from _latencies(cells, lambda cell: cell.chunks)


def _requests(results: RouterResults) -> Iterator[str]:
    cells = [cell for cell in results.cells if cell.kind == "one-token"]
    yield "## A request of one token, one after the other, microseconds"
    yield ""
    yield "| | p50 | p99 | p50 more than without | p99 more than without | router CPU a request |"
    yield "|---|---|---|---|---|---|"
    yield from _latencies([cell for cell in cells if cell.streams == 1], lambda cell: cell.requests)
    yield from _throughput([cell for cell in cells if cell.streams == MANY_STREAMS])


def _throughput(cells: Sequence[Cell]) -> Iterator[str]:
    yield f"## Requests of one token, {MANY_STREAMS} at a time"
    yield ""
    yield "| | a second | of those without | router CPU a request, microseconds |"
    yield "|---|---|---|---|"
    direct = by_repeat(cells, DIRECT, _rate)
    for system in SYSTEMS:
        rates = by_repeat(cells, system, _rate)
        compared = ["", ""]
        if system != DIRECT:
            cpu_us = by_repeat(cells, system, lambda cell: 1e6 * cell.router_cpu_s / cell.requests)
            shares = [rate / base for rate, base in paired(rates, direct)]
            compared = [spread(shares, ".2f"), spread(cpu_us.values(), ".0f")]
        yield _row(TITLES[system], spread(rates.values(), ",.0f"), *compared)
    yield ""


def _memory(results: RouterResults) -> Iterator[str]:
    yield "## Memory of the router, MiB"
    yield ""
    yield "| | just started | more for every 1,000 open streams |"
    yield "|---|---|---|"
    for system in (OURS, THEIRS):
        found = [one for one in results.memories if one.system == system]
        yield _row(
            TITLES[system],
            spread((one.before_bytes / 2**20 for one in found), ".0f"),
            spread(((one.open_bytes - one.before_bytes) / 2**20 / one.streams * 1000 for one in found), ".0f"),
        )
    yield ""


def _latencies(cells: Sequence[Cell], count: Callable[[Cell], int]) -> Iterator[str]:
    def cpu_us(cell: Cell) -> float:
        return 1e6 * cell.router_cpu_s / count(cell)

    p50s, p99s = by_repeat(cells, DIRECT, _p50), by_repeat(cells, DIRECT, _p99)
    for system in SYSTEMS:
        p50, p99 = by_repeat(cells, system, _p50), by_repeat(cells, system, _p99)
        more = ["", "", ""]
        if system != DIRECT:
            more = [
                spread((ours - base for ours, base in paired(*both)), ",.0f") for both in ((p50, p50s), (p99, p99s))
            ]
            more += [spread(by_repeat(cells, system, cpu_us).values(), ".0f")]
        yield _row(TITLES[system], spread(p50.values(), ",.0f"), spread(p99.values(), ",.0f"), *more)
    yield ""


def by_repeat(cells: Sequence[Cell], system: str, value: Callable[[Cell], float]) -> dict[int, float]:
    """Return a value of a system for every repeat that has it."""
    return {cell.repeat: value(cell) for cell in cells if cell.system == system}


def paired(ours: dict[int, float], base: dict[int, float]) -> list[tuple[float, float]]:
    """Return the values of two systems that are from the same repeat."""
    return [(ours[repeat], base[repeat]) for repeat in sorted(ours.keys() & base.keys())]


def spread(values: Iterable[float], form: str) -> str:
    """Return the median and the range."""
    found = list(values)
    if not found:
        return "-"
    return f"{median(found):{form}} ({min(found):{form}} to {max(found):{form}})"


def _p50(cell: Cell) -> float:
    return cell.p50_us


def _p99(cell: Cell) -> float:
    return cell.p99_us


def _rate(cell: Cell) -> float:
    return cell.requests / cell.seconds


def _streams(count: int) -> str:
    return "1 stream" if count == 1 else f"{count} streams, staggered"


def _row(*columns: str) -> str:
    return f"| {' | '.join(columns)} |"
