"""Turns the results of a run of the edge into a markdown table: both systems, and how they compare."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median

from bench.report import CHANGED_SOURCE, events_per_s, kib_per_stream, noise, number, table, tokens_per_s
from bench.result_files import Cell, Results

EDGE, BARE = "edge", "bare"
EAGER = "-eager"
PACED_MS = 20.0
IDLE_MS = 1000.0

Measure = Callable[[Cell], float | None]
Compare = Callable[[float, float], float]


def frontend_us_per_event(cell: Cell) -> float | None:
    return 1e6 * cell.cpu_s["frontend"] / cell.load.events if cell.load.events else None


def frontend_us_per_request(cell: Cell) -> float | None:
    return 1e6 * cell.cpu_s["frontend"] / cell.load.requests if cell.load.requests else None


def first_token_ms(cell: Cell) -> float:
    return cell.load.ttft_ms_p50


def difference(edge: float, bare: float) -> float:
    return edge - bare


def ratio(edge: float, bare: float) -> float:
    return edge / bare


@dataclass(frozen=True)
class Row:
    """One line of the table: a measure of the cells that `holds` selects, and how the two systems compare."""

    name: str
    holds: Callable[[Cell], bool]
    measure: Measure
    compare: Compare
    aim: str

    def cells(self, cells: Sequence[Cell], system: str) -> dict[int, float]:
        """The values of a system by repeat."""
        found = {
            cell.repeat: self.measure(cell)
            for cell in cells
            if cell.system.removesuffix(EAGER) == system and cell.valid and self.holds(cell)
        }
        return {repeat: value for repeat, value in found.items() if value is not None}

    def line(self, cells: Sequence[Cell]) -> list[str]:
        edge, bare = self.cells(cells, EDGE), self.cells(cells, BARE)
        pairs = [self.compare(edge[repeat], bare[repeat]) for repeat in sorted(edge.keys() & bare.keys())]
        sign = "x" if self.compare is ratio else ""
        return [self.name, spread([*edge.values()]), spread([*bare.values()]), spread(pairs, sign), self.aim]


def spread(values: Sequence[float], unit: str = "") -> str:
    """The median, and the range if there are several."""
    if not values:
        return "-"
    text = number(median(values)) + unit
    return f"{text} ({number(min(values))} to {number(max(values))})" if len(values) > 1 else text


def load(streams: int, pace_ms: float = 0.0, *, one_token: bool = False, eager: bool = False) -> Callable[[Cell], bool]:
    """Return the function that selects the cells of a load."""

    def holds(cell: Cell) -> bool:
        return (
            cell.kind == "stream"
            and (cell.streams, cell.pace_ms) == (streams, pace_ms)
            and (cell.tokens_per_request == 1, cell.system.endswith(EAGER)) == (one_token, eager)
        )

    return holds


def rows(cells: Sequence[Cell]) -> list[Row]:
    counts = sorted({cell.streams for cell in cells if cell.kind == "stream"} - {1})
    one_token = [
        Row("first token, 1 stream, ms", load(1, one_token=True), first_token_ms, difference, "at most 0.3"),
        *(
            Row(
                f"CPU per request of one token, {count} streams, us",
                load(count, one_token=True),
                frontend_us_per_request,
                difference,
                "at most 60",
            )
            for count in [1, *counts]
        ),
    ]
    by_count = [row for count in counts for row in rows_of_streams(count)]
    idle = Row(
        "memory per idle stream, KiB",
        lambda cell: cell.kind == "idle",
        kib_per_stream("frontend"),
        difference,
        "at most 12",
    )
    return [*one_token, *by_count, idle]


def rows_of_streams(count: int) -> list[Row]:
    paced, unpaced, eager = load(count, PACED_MS), load(count), load(count, eager=True)
    return [
        Row(f"CPU per event, {count} streams, paced, us", paced, frontend_us_per_event, difference, "at most 8"),
        Row(f"CPU per event, {count} streams, eager, us", eager, frontend_us_per_event, difference, "at most 8"),
        Row(f"tokens/s, {count} streams", unpaced, tokens_per_s, ratio, "at least 0.9"),
        Row(f"events/s, {count} streams, eager", eager, events_per_s, ratio, "at least 0.9"),
    ]


def to_markdown(results: Results) -> str:
    machine = results.machine
    versions = ", ".join(f"{name} {version}" for name, version in machine.versions.items())
    parts = [
        "# Cost of the edge",
        f"`{results.command}`, {results.date}, commit {results.commit or 'unknown'}. {machine.cores} cores of "
        f"{machine.cpu}, Python {machine.python}, {versions}.",
        CHANGED_SOURCE if results.source_changed else "",
        "*Edge* is `baton frontend`. *Bare* is the same Rust frontend without the edge. Both have one worker with the "
        "echo engine; client, frontend and worker share the cores. CPU is that of the frontend's process. Requests "
        "are streamed chats of 128 tokens unless said otherwise, so CPU per event includes a 128th of a request. "
        f"*Paced* is one token every {PACED_MS:g} ms per stream, *eager* is unpaced with one event per token. Values "
        "are medians over the repeats, with their range. The comparison is edge minus bare, or edge over bare (x), of "
        "each repeat.",
        table(["", EDGE, BARE, "edge against bare", "aim"], [row.line(results.cells) for row in rows(results.cells)]),
        noise(results.cells),
    ]
    return "\n\n".join(part for part in parts if part) + "\n"
