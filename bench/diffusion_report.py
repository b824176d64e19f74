"""Turns the cells of the diffusion bench into markdown: speed, forward passes and right answers, variant by variant."""

from collections.abc import Callable, Iterator, Sequence

import msgspec

from bench.engine_report import format_spread, spread_of
from bench.report import CHANGED_SOURCE, NOISY_CORES, number, table
from bench.result_files import Machine

LEFT_TO_RIGHT = "left to right"


class DiffusionCell(msgspec.Struct, frozen=True, kw_only=True):
    """One variant in one round with one number of requests at once."""

    variant: str
    at_once: int
    round: int
    tokens: int
    seconds: float
    later_tokens: int
    """Tokens after the first event of their request; `later_seconds` is the sum over all requests of their time."""
    later_seconds: float
    passes: int
    """Forward passes of the engine; those of prompts are among them, and requests at once share them."""
    answers: int
    right: int
    foreign_cores: float

    @property
    def tokens_per_s(self) -> float:
        return self.tokens / self.seconds

    @property
    def stream_tokens_per_s(self) -> float:
        return self.later_tokens / self.later_seconds

    @property
    def passes_per_token(self) -> float:
        return self.passes / self.tokens


Rate = Callable[[DiffusionCell], float]
RATES: dict[str, Rate] = {
    "tokens per second": lambda cell: cell.tokens_per_s,
    "of one request, after its first event": lambda cell: cell.stream_tokens_per_s,
}


class DiffusionResults(msgspec.Struct, frozen=True, kw_only=True):
    date: str
    commit: str
    command: str
    source_changed: bool
    gpu: str
    threads: int
    problems: int
    machine: Machine
    cells: list[DiffusionCell]


def to_markdown(results: DiffusionResults) -> str:
    cells, machine = results.cells, results.machine
    counts = sorted({cell.at_once for cell in cells})
    parts = [
        f"# Block diffusion and left-to-right decoding, on {results.gpu or 'a CPU'}",
        f"`{results.command}`, {results.date}, commit {results.commit}. {results.threads} threads on {machine.cores}"
        f" cores of {machine.cpu}, Python {machine.python}.",
        f"smoldiff answers {results.problems} problems that training never had; *{LEFT_TO_RIGHT}* is the same tensors"
        " as a Qwen3, which writes as many tokens after the same prompts, and what it writes is ignored. Tokens per"
        " second from the first request to the last token, prompts included, without a prefix cache; and of one request"
        " after its first event (a token, or a block), where the prompt no longer counts. *Passes* are"
        " forward passes of the engine per token, those of prompts included. All variants in turn in every round: the"
        " median with minimum and maximum in brackets, and ratios to left to right round by round; ~ marks a"
        " spread above 25% of the median. *Right*: exact answers.",
        CHANGED_SOURCE if results.source_changed else "",
        *(section(cells, count) for count in counts),
        noise(cells),
    ]
    return "\n\n".join(part for part in parts if part) + "\n"


def section(cells: Sequence[DiffusionCell], at_once: int) -> str:
    chosen = [cell for cell in cells if cell.at_once == at_once]
    header = ["variant", *(f"{name}{of}" for name in RATES for of in ("", ", ratio")), "passes per token", "right"]
    title = "One request at a time" if at_once == 1 else f"{at_once} requests at once"
    return f"## {title}\n\n{table(header, rows_of(chosen))}"


def rows_of(cells: Sequence[DiffusionCell]) -> Iterator[list[str]]:
    base = [cell for cell in cells if cell.variant == LEFT_TO_RIGHT]
    for variant in dict.fromkeys(cell.variant for cell in cells):
        same = [cell for cell in cells if cell.variant == variant]
        yield [
            variant,
            *(text for rate in RATES.values() for text in (summary(same, rate), ratio(same, base, rate))),
            summary(same, lambda cell: cell.passes_per_token),
            "-" if variant == LEFT_TO_RIGHT else right(same),
        ]


def ratio(cells: Sequence[DiffusionCell], base: Sequence[DiffusionCell], rate: Rate) -> str:
    """Return the rate as a multiple of that of `base` in the same round."""
    rates = {cell.round: rate(cell) for cell in base}
    ratios = [rate(cell) / rates[cell.round] for cell in cells if cell.round in rates]
    return f"{format_spread(spread_of(ratios))}x" if ratios else "-"


def right(cells: Sequence[DiffusionCell]) -> str:
    return f"{sum(cell.right for cell in cells) / sum(cell.answers for cell in cells):.1%}"


def summary(cells: Sequence[DiffusionCell], value: Rate) -> str:
    return format_spread(spread_of([value(cell) for cell in cells]))


def noise(cells: Sequence[DiffusionCell]) -> str:
    noisy = sum(cell.foreign_cores > NOISY_CORES for cell in cells)
    highest = max(cell.foreign_cores for cell in cells)
    return (
        f"{len(cells)} cells, {noisy} noisy (other work kept more than {NOISY_CORES} cores busy meanwhile;"
        f" {number(highest)} at the most)."
    )
