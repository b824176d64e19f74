"""The tables of the disaggregation benchmark."""

from collections.abc import Callable, Sequence
from statistics import median

import msgspec

from bench.load import percentile
from bench.report import table
from bench.result_files import Machine
from bench.transfer import TransferResults, to_table


class Cell(msgspec.Struct, frozen=True, kw_only=True):
    """One system in one round; all times in seconds."""

    system: str
    round: int
    first_s: list[float]
    """Time to first token of requests sent one at a time."""
    alone_gaps_s: list[float]
    fetch_s: float
    """Time in which a decode worker fetches the KV of one such request; 0 when aggregated."""
    undisturbed_gaps_s: list[float]
    """Between the tokens of streams that decode together, without long prompts."""
    mixed_gaps_s: list[float]
    """The same while long prompts arrive."""
    short_first_s: list[float]
    long_first_s: list[float]
    busy_cores: float


class DisaggResults(msgspec.Struct, frozen=True, kw_only=True):
    date: str
    commit: str
    command: str
    source_changed: bool
    machine: Machine
    transfers: TransferResults
    cells: list[Cell]
    cancels: dict[str, list[float]]


Measure = Callable[[Cell], float]


def at(fraction: float, values: Sequence[float]) -> float:
    return percentile(sorted(values), fraction) if values else float("nan")


MEASURES: dict[str, Measure] = {
    "first token alone, p50": lambda cell: at(0.5, cell.first_s),
    "gap alone, p50": lambda cell: at(0.5, cell.alone_gaps_s),
    "gap undisturbed, p50": lambda cell: at(0.5, cell.undisturbed_gaps_s),
    "gap undisturbed, p99": lambda cell: at(0.99, cell.undisturbed_gaps_s),
    "gap with long prompts, p50": lambda cell: at(0.5, cell.mixed_gaps_s),
    "gap with long prompts, p99": lambda cell: at(0.99, cell.mixed_gaps_s),
    "longest gap with long prompts": lambda cell: max(cell.mixed_gaps_s),
    "first token of the short ones meanwhile, p50": lambda cell: at(0.5, cell.short_first_s),
    "first token of the long prompts, p50": lambda cell: at(0.5, cell.long_first_s),
}


def to_markdown(results: DisaggResults) -> str:
    machine = results.machine
    note = " **The source changed while this ran.**" if results.source_changed else ""
    busy = max(cell.busy_cores for cell in results.cells)
    lines = [
        "# Disaggregated serving against aggregated workers",
        "",
        f"{results.date}, commit {results.commit}, {machine.cores} cores of {machine.cpu}, Python {machine.python}."
        f" `{results.command}`.{note}",
        "",
        "SmolLM2-135M in bfloat16, one core per worker. Aggregated: two aggregated workers. Disaggregated:"
        " one prefill and one decode worker. Alone: prompts of 1,000 tokens, one at a time. With long prompts: 4"
        " streams of short prompts and 200 tokens each, while prompts of 2,000 tokens arrive, each a second after the"
        f" last. Milliseconds; the median of the rounds, with minimum and maximum."
        f" At most {busy:.1f} cores were busy, including the load generator.",
        "",
        table(["", "aggregated", "disaggregated", "ratio"], [row(results.cells, name) for name in MEASURES]),
        "",
        "## Cost of the handoff",
        "",
        added(results.cells),
        "",
        "## From a client disconnect to all memory freed",
        "",
        "On a model whose steps take about a millisecond, so that the running step does not dominate; from the workers'"
        " logs, to the millisecond.",
        "",
        table(["the request was in", "clients", "p50 ms", "p99 ms", "longest ms"], [*cancel_rows(results.cancels)]),
        "",
        "## KV transfer between two processes",
        "",
        "Blocks of SmolLM2's size. `first touch` is the first read of memory that this process has not touched yet.",
        "",
        to_table(results.transfers),
        "",
    ]
    return "\n".join(lines)


def by_round(cells: Sequence[Cell], system: str, measure: Measure) -> dict[int, float]:
    return {cell.round: measure(cell) * 1000 for cell in cells if cell.system == system}


def row(cells: Sequence[Cell], name: str) -> list[str]:
    aggregated, disaggregated = (by_round(cells, system, MEASURES[name]) for system in ("aggregated", "disaggregated"))
    ratios = [disaggregated[number] / aggregated[number] for number in aggregated if number in disaggregated]
    return [name, spread(list(aggregated.values())), spread(list(disaggregated.values())), f"{spread(ratios, 2)}x"]


def added(cells: Sequence[Cell]) -> str:
    measure = MEASURES["first token alone, p50"]
    aggregated, disaggregated = (by_round(cells, system, measure) for system in ("aggregated", "disaggregated"))
    shares = [
        (disaggregated[number] - aggregated[number]) / aggregated[number] * 100
        for number in aggregated
        if number in disaggregated
    ]
    later = [disaggregated[number] - aggregated[number] for number in aggregated if number in disaggregated]
    fetch = by_round(cells, "disaggregated", lambda cell: cell.fetch_s)
    step = by_round(cells, "disaggregated", MEASURES["gap alone, p50"])
    fetch_ms, step_ms = spread([*fetch.values()]), spread([*step.values()])
    return (
        f"The first token of a prompt of 1,000 tokens arrives {spread(shares)} % later than from an aggregated worker"
        f" in the same round: {spread(later)} ms. Fetching the KV takes {fetch_ms} ms of that, and the step in"
        f" which the decode worker computes the token {step_ms} ms; the rest is messages between four processes, and"
        " noise."
    )


def cancel_rows(cancels: dict[str, list[float]]) -> list[list[str]]:
    return [
        [phase, str(len(times)), *(f"{value * 1000:.1f}" for value in (at(0.5, times), at(0.99, times), max(times)))]
        for phase, times in cancels.items()
    ]


def spread(values: Sequence[float], digits: int = 1) -> str:
    if len(values) == 1:
        return f"{values[0]:.{digits}f}"
    return f"{median(values):.{digits}f} ({min(values):.{digits}f} to {max(values):.{digits}f})"
