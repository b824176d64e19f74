"""Turns the results of a path run into markdown tables: medians with their spread, and ratios to peers."""

import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from statistics import median

import msgspec

from bench.result_files import Cell, Kind, Results
from bench.systems import BEFORE

OURS = ("baton", "baton-eager")
# With fewer streams, memory growth depends on the allocator and not on the streams.
MIN_STREAMS_FOR_MEMORY = 64

# A cell is noisy if other processes kept more than this many cores busy.
NOISY_CORES = 0.25
OLDER = " `before` is an older Baton, with one event per token."
CHANGED_SOURCE = "**The source changed during this run: the results of Baton mix versions. Run it again.**"

Measure = Callable[[Cell], float | None]
Rows = Iterable[Sequence[str]]


def tokens_per_s(cell: Cell) -> float:
    return cell.load.tokens / cell.load.duration_s


def events_per_s(cell: Cell) -> float:
    return cell.load.events / cell.load.duration_s


def tokens_per_event(cell: Cell) -> float:
    return cell.load.tokens / cell.load.events


def cpu_us_per_token(*roles: str) -> Measure:
    """CPU of these roles, or of all without arguments; None if the system has no such process."""

    def measure(cell: Cell) -> float | None:
        spent = [cpu_s for role, cpu_s in cell.cpu_s.items() if not roles or role in roles]
        return 1e6 * sum(spent) / cell.load.tokens if spent else None

    return measure


def cpu_us_per_event(cell: Cell) -> float:
    return 1e6 * sum(cell.cpu_s.values()) / cell.load.events


def load_cpu_us_per_token(cell: Cell) -> float:
    return 1e6 * cell.load.cpu_s / cell.load.tokens


def kib_per_stream(*roles: str) -> Measure:
    def measure(cell: Cell) -> float | None:
        growth = [
            size - cell.rss_start_bytes[role]
            for role, size in cell.rss_open_bytes.items()
            if not roles or role in roles
        ]
        if not growth or (cell.streams < MIN_STREAMS_FOR_MEMORY and cell.kind != "idle"):
            return None
        return sum(growth) / cell.streams / 1024

    return measure


def over_ideal(request_ms: float, cell: Cell) -> float | None:
    return request_ms / (cell.tokens_per_request * cell.pace_ms) if cell.pace_ms else None


CELL_MEASURES: dict[str, Measure] = {
    "tokens/s": tokens_per_s,
    "TTFT p50 ms": lambda cell: cell.load.ttft_ms_p50,
    "TTFT p99 ms": lambda cell: cell.load.ttft_ms_p99,
    "gap p99 ms": lambda cell: cell.load.gap_ms_p99,
    "tokens/event": tokens_per_event,
    "events/s": events_per_s,
    "worker CPU us/token": cpu_us_per_token("worker"),
    "frontend CPU us/token": cpu_us_per_token("frontend"),
    "all CPU us/event": cpu_us_per_event,
    "load CPU us/token": load_cpu_us_per_token,
}
PACED_MEASURES: dict[str, Measure] = {
    "request/ideal p50": lambda cell: over_ideal(cell.load.request_ms_p50, cell),
    "request/ideal p99": lambda cell: over_ideal(cell.load.request_ms_p99, cell),
    "worker KiB/stream": kib_per_stream("worker"),
    "frontend KiB/stream": kib_per_stream("frontend"),
}
STALL_KINDS: tuple[Kind, ...] = ("undisturbed", "stalled")
STALL_MEASURES: dict[str, Measure] = {
    "gap p99 ms": lambda cell: cell.load.gap_ms_p99,
    "tokens/s": tokens_per_s,
}
IDLE_MEASURES: dict[str, Measure] = {
    "worker KiB/stream": kib_per_stream("worker"),
    "frontend KiB/stream": kib_per_stream("frontend"),
    "all KiB/stream": kib_per_stream(),
}
RATIO_MEASURES: dict[str, Measure] = {
    "tokens/s": tokens_per_s,
    "events/s": events_per_s,
    "TTFT p50": lambda cell: cell.load.ttft_ms_p50,
    "gap p99": lambda cell: cell.load.gap_ms_p99,
    "CPU/token": cpu_us_per_token(),
    "CPU/event": cpu_us_per_event,
}


def to_markdown(results: Results) -> str:
    parts = [heading(results), CHANGED_SOURCE if results.source_changed else ""]
    for pace_ms in sorted({cell.pace_ms for cell in results.cells if cell.kind == "stream"}):
        parts += pace_section(results.cells, pace_ms)
    parts += stall_section(results.cells)
    parts += idle_section(results.cells)
    parts.append(noise(results.cells))
    return "\n\n".join(part for part in parts if part) + "\n"


def heading(results: Results) -> str:
    machine = results.machine
    versions = ", ".join(f"{name} {version}" for name, version in machine.versions.items())
    return (
        "# Cost of the request path\n\n"
        f"`{results.command}`, {results.date}, commit {results.commit or 'unknown'}. "
        f"{machine.cores} cores of {machine.cpu}, Python {machine.python}, {versions}.\n\n"
        "Streamed chat completions over loopback; client, frontend and worker share the cores. "
        "Each value is the median of the repeats, with minimum and maximum in brackets. "
        "A gap is the time between two events of a stream. More than one token per event means that a system "
        "merged tokens, which makes each cheaper: compare tokens/s of two systems only at the same tokens/event; "
        "otherwise see events/s and CPU/event. `baton-eager` is Baton with one event per token, like the peers "
        "(`flush_interval_ms` 0, `echo.burst` 1). `reference` is the same runtime with a pull handler that yields "
        "one dict per token; `push` sends them from the event loop, which is the least that a worker in Python can do. "
        "Paced, Baton's echo engine generates a token of each stream at once, by the clock, and so do `push` and "
        "`reference-steps`, the same pull handler. The other peers sleep before each token of a stream: delays add up, "
        "and streams are spread over time." + OLDER * any(cell.system == BEFORE for cell in results.cells)
    )


def pace_section(cells: Sequence[Cell], pace_ms: float) -> list[str]:
    chosen = [cell for cell in cells if cell.kind == "stream" and cell.pace_ms == pace_ms]
    measures = CELL_MEASURES | (PACED_MEASURES if pace_ms else {})
    return [
        f"## {pace_name(pace_ms)}",
        table(["streams", "system", *measures], cell_rows(chosen, measures)),
        ratio_table(chosen),
    ]


def pace_name(pace_ms: float) -> str:
    return f"Paced at {pace_ms:g} ms per token" if pace_ms else "Unpaced"


def cell_rows(cells: Sequence[Cell], measures: dict[str, Measure]) -> Rows:
    for streams in stream_counts(cells):
        for system in systems_of(cells):
            repeats = [cell for cell in cells if (cell.streams, cell.system) == (streams, system)]
            yield [f"{streams:,}", system, *(summary(repeats, measure) for measure in measures.values())]


def ratio_table(cells: Sequence[Cell]) -> str:
    """Baton's median over each peer's, per measure; empty when Baton or every peer is missing."""
    systems = systems_of(cells)
    peers = [name for name in systems if name not in OURS]
    if not peers or len(peers) == len(systems):
        return ""
    columns = [f"{name} / {peer}" for name in RATIO_MEASURES for peer in peers]
    return table(["streams", "system", *columns], ratio_rows(cells, peers))


def ratio_rows(cells: Sequence[Cell], peers: Sequence[str]) -> Rows:
    for streams in stream_counts(cells):
        same_load = [cell for cell in cells if cell.streams == streams]
        for name in systems_of(cells):
            if name in OURS:
                ratios = [
                    ratio(same_load, measure, name, peer) for measure in RATIO_MEASURES.values() for peer in peers
                ]
                yield [f"{streams:,}", name, *ratios]


def ratio(cells: Sequence[Cell], measure: Measure, name: str, peer: str) -> str:
    ours = values([cell for cell in cells if cell.system == name], measure)
    theirs = values([cell for cell in cells if cell.system == peer], measure)
    if not ours or not theirs or not median(theirs):
        return "-"
    return f"{median(ours) / median(theirs):.2f}x"


def stall_section(cells: Sequence[Cell]) -> list[str]:
    """Each measure without and with the stalled client. Only full buffers can delay the other streams."""
    chosen = [cell for cell in cells if cell.kind in STALL_KINDS]
    if not chosen:
        return []
    header = ["streams", "system", *(f"{name}, {kind}" for name in STALL_MEASURES for kind in STALL_KINDS)]
    groups = sorted({(cell.streams, cell.system) for cell in chosen})
    return [
        "## One more client that never reads, unpaced",
        table(
            [*header, "runs with its buffers full", "unread KiB"],
            [stall_row(chosen, streams, system) for streams, system in groups],
        ),
    ]


def stall_row(cells: Sequence[Cell], streams: int, system: str) -> list[str]:
    undisturbed, stalled = (
        [cell for cell in cells if (cell.streams, cell.system, cell.kind) == (streams, system, kind)]
        for kind in STALL_KINDS
    )
    measured = [summary(group, measure) for measure in STALL_MEASURES.values() for group in (undisturbed, stalled)]
    full = sum(cell.load.stalled_full for cell in stalled)
    unread = summary(stalled, lambda cell: cell.load.stalled_unread_bytes / 1024)
    return [f"{streams:,}", system, *measured, f"{full} of {len(stalled)}", unread]


def idle_section(cells: Sequence[Cell]) -> list[str]:
    chosen = [cell for cell in cells if cell.kind == "idle"]
    if not chosen:
        return []
    return [
        "## Memory of an open, nearly idle stream",
        table(["streams", "system", *IDLE_MEASURES], cell_rows(chosen, IDLE_MEASURES)),
    ]


def noise(cells: Sequence[Cell]) -> str:
    invalid = sum(not cell.valid for cell in cells)
    noisy = sum(cell.foreign_cores > NOISY_CORES for cell in cells)
    highest = max(cell.foreign_cores for cell in cells)
    return (
        f"{len(cells)} cells, {invalid} invalid (an error, or tokens missing), {noisy} noisy (other work kept more "
        f"than {NOISY_CORES} cores busy meanwhile; {highest:.2f} at the most)."
    )


def stream_counts(cells: Sequence[Cell]) -> list[int]:
    return sorted({cell.streams for cell in cells})


def systems_of(cells: Sequence[Cell]) -> list[str]:
    return sorted({cell.system for cell in cells}, key=lambda name: (name not in OURS, name))


def values(cells: Sequence[Cell], measure: Measure) -> list[float]:
    found = (measure(cell) for cell in cells if cell.valid)
    return [value for value in found if value is not None]


def summary(cells: Sequence[Cell], measure: Measure) -> str:
    """Median and spread of the valid repeats, and the number of invalid ones."""
    found = values(cells, measure)
    invalid = sum(not cell.valid for cell in cells)
    parts = []
    if found:
        parts.append(number(median(found)))
    if len(found) > 1:
        parts.append(f"({number(min(found))}-{number(max(found))})")
    if invalid:
        parts.append(f"{invalid} invalid")
    return " ".join(parts) or "-"


def number(value: float) -> str:
    """Format with three significant digits and a separator for thousands."""
    if abs(value) >= 100:
        return f"{value:,.0f}"
    return f"{value:.1f}" if abs(value) >= 10 else f"{value:.2f}"


def table(header: Sequence[str], rows: Rows) -> str:
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def main() -> None:
    """Print the tables of a results file given on the command line."""
    results = msgspec.json.decode(Path(sys.argv[1]).read_bytes(), type=Results)
    print(to_markdown(results), end="")


if __name__ == "__main__":
    main()
