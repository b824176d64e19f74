"""Turns the runs of the engine bench into markdown: medians with their spread, ratios round by round, agreement."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from statistics import median
from typing import Literal, NamedTuple

import msgspec

from bench.engine_runs import Measured, Output, Run
from bench.report import CHANGED_SOURCE, NOISY_CORES, number, table
from bench.result_files import Machine

OURS = "baton"
REFERENCE = "transformers-fp32"
NOISY_SPREAD = 0.25
NOISY_MARK = "~"
SAMPLE_CHARACTERS = 60

Values = Callable[[Measured], list[float]]
Decode = Callable[[Sequence[int]], str]


class Sizes(msgspec.Struct, frozen=True, kw_only=True):
    """The size of a run."""

    batches: tuple[int, ...] = (1, 8, 32)
    prompt_tokens: int = 64
    new_tokens: int = 128
    prefill_tokens: int = 1000
    rounds: int = 3
    """How often each engine is started, alternating with the others."""
    repeats: int = 2
    """How often each cell is measured in a round."""


class Agreement(msgspec.Struct, frozen=True, kw_only=True):
    """How far an engine's greedy outputs agree with those of transformers in float32."""

    rows: int
    equal_rows: int
    leading_tokens: float
    """Mean number of tokens per row before the first difference."""
    sample: str


class EngineResults(msgspec.Struct, frozen=True, kw_only=True):
    date: str
    commit: str
    command: str
    source_changed: bool
    threads: int
    sizes: Sizes
    machine: Machine
    runs: list[Run]
    agreement: dict[str, Agreement]


class Spread(NamedTuple):
    median: float
    minimum: float
    maximum: float

    @property
    def noisy(self) -> bool:
        return self.maximum - self.minimum > NOISY_SPREAD * self.median


class Measure(NamedTuple):
    """One column: its title, and its values in a round."""

    title: str
    values: Values

    def spread(self, rounds: Iterable[Measured]) -> Spread:
        return spread_of([value for found in rounds for value in self.values(found)])


def spread_of(values: Sequence[float]) -> Spread:
    return Spread(median(values), min(values), max(values))


def format_spread(spread: Spread, mark: bool = False) -> str:
    range_ = "" if spread.minimum == spread.maximum else f" ({number(spread.minimum)}-{number(spread.maximum)})"
    return f"{NOISY_MARK if mark or spread.noisy else ''}{number(spread.median)}{range_}"


def decode_cell(batch: int) -> str:
    return f"decode-{batch}"


PREFILL_CELL = "prefill"


def decode_measures(sizes: Sizes) -> list[Measure]:
    return [Measure(f"decode, batch {batch}", rates(decode_cell(batch), "decode")) for batch in sizes.batches]


def wall_measures(sizes: Sizes) -> list[Measure]:
    return [Measure(f"whole, batch {batch}", rates(decode_cell(batch), "wall")) for batch in sizes.batches]


def rates(cell: str, kind: Literal["decode", "prefill", "wall"]) -> Values:
    return lambda found: [getattr(rate, kind) for rate in found.cells[cell]]


def main_measures(sizes: Sizes) -> list[Measure]:
    return [
        *decode_measures(sizes),
        Measure("prefill", rates(PREFILL_CELL, "prefill")),
        Measure("ready, s", lambda found: [found.ready_s]),
        Measure("memory, GB", lambda found: [found.peak_bytes / 1e9]),
    ]


def to_markdown(results: EngineResults) -> str:
    runs, sizes = results.runs, results.sizes
    measures = main_measures(sizes)
    parts = [
        heading(results),
        CHANGED_SOURCE if results.source_changed else "",
        table(["engine", *(measure.title for measure in measures)], rows_of(runs, measures)),
        "Tokens per second; ready in seconds, memory in GB.",
        "## End to end, from the prompts to the last token",
        table(["engine", *(measure.title for measure in wall_measures(sizes))], rows_of(runs, wall_measures(sizes))),
        *ratio_sections(runs, [*measures, *wall_measures(sizes)]),
        *agreement_section(results),
        *failure_section(runs),
        noise(runs, [*measures, *wall_measures(sizes)]),
    ]
    return "\n\n".join(part for part in parts if part) + "\n"


def heading(results: EngineResults) -> str:
    machine, sizes = results.machine, results.sizes
    versions = {
        name: version for run in results.runs if run.measured for name, version in run.measured.versions.items()
    }
    versions["baton-serve"] = machine.versions.get("baton-serve", "unknown")
    named = ", ".join(f"{name} {version}" for name, version in sorted(versions.items()))
    return (
        "# The built-in engine next to its peers, on a CPU\n\n"
        f"`{results.command}`, {results.date}, commit {results.commit or 'unknown'}. {results.threads} threads on "
        f"{machine.cores} cores of {machine.cpu}, Python {machine.python}, {named}.\n\n"
        f"SmolLM2-135M-Instruct. Decode: prompts of {sizes.prompt_tokens} tokens that differ, {sizes.new_tokens} new "
        "tokens each, greedy, EOS ignored, all submitted at once; timed from the moment every row has its first token "
        f"to the moment the first row has its last. Prefill: a prompt of {sizes.prefill_tokens:,} tokens to its first "
        "new one. Ready: from the start of the process to a first token. Memory: the peak resident size of the "
        "process and its children. Each engine runs alone in its own process, "
        f"{sizes.rounds} rounds in turn, every cell {sizes.repeats} times a round (prefill twice as often). A value is "
        f"the median with minimum and maximum in brackets; {NOISY_MARK} marks a spread above {NOISY_SPREAD:.0%} of "
        "the median. Weights differ between engines: q4_1 and q8_0 read fewer bytes per token than 16 bits."
    )


def rows_of(runs: Sequence[Run], measures: Sequence[Measure]) -> Iterator[list[str]]:
    for engine in engines_of(runs):
        found = measured_rounds(runs, engine).values()
        columns = [format_spread(measure.spread(found)) for measure in measures] if found else ["-"] * len(measures)
        yield [engine, *columns]


def ratio_sections(runs: Sequence[Run], measures: Sequence[Measure]) -> Iterator[str]:
    """Ours over each peer's, round by round: noise in a round affects both."""
    engines = [engine for engine in engines_of(runs) if measured_rounds(runs, engine)]
    for ours in engines:
        if ours.startswith(OURS) and len(engines) > 1:
            yield f"## {ours}, as a multiple of each"
            peers = [engine for engine in engines if engine != ours]
            yield table(["engine", *(measure.title for measure in measures)], ratio_rows(runs, ours, peers, measures))


def ratio_rows(
    runs: Sequence[Run], ours: str, peers: Sequence[str], measures: Sequence[Measure]
) -> Iterator[list[str]]:
    for peer in peers:
        yield [peer, *(ratio(runs, ours, peer, measure) for measure in measures)]


def ratio(runs: Sequence[Run], ours: str, peer: str, measure: Measure) -> str:
    left, right = measured_rounds(runs, ours), measured_rounds(runs, peer)
    found = round_ratios(left, right, measure)
    noisy = any(measure.spread(rounds.values()).noisy for rounds in (left, right))
    return format_spread(spread_of(found), mark=noisy) + "x" if found else "-"


def round_ratios(ours: dict[int, Measured], theirs: dict[int, Measured], measure: Measure) -> list[float]:
    return [
        median(measure.values(ours[turn])) / median(measure.values(theirs[turn]))
        for turn in sorted(ours.keys() & theirs.keys())
    ]


def agreement_section(results: EngineResults) -> Iterator[str]:
    if not results.agreement:
        return
    yield "## Agreement of the outputs"
    yield (
        f"The outputs of the decode prompts compared with those of {REFERENCE}: how many rows are equal, and after how "
        "many tokens, on average, the first differs. Rounding to 16 bits changes near-ties, and from there on the "
        "texts diverge; 32 bits should agree throughout."
    )
    yield table(
        ["engine", "equal rows", "leading tokens that agree", "start of the first output"],
        [
            [engine, f"{found.equal_rows} of {found.rows}", f"{found.leading_tokens:.1f}", f"`{found.sample}`"]
            for engine, found in results.agreement.items()
        ],
    )


def agreements(runs: Sequence[Run], decode: Decode) -> dict[str, Agreement]:
    """Compare every engine's first outputs with the reference's; empty when the reference is missing."""
    first = {run.engine: run.measured for run in reversed(runs) if run.measured}
    reference = first.get(REFERENCE)
    if reference is None:
        return {}
    return {engine: agreement(reference, first[engine], decode) for engine in engines_of(runs) if engine in first}


def agreement(reference: Measured, other: Measured, decode: Decode) -> Agreement:
    pairs = [
        (expected.tokens or [], output)
        for cell, outputs in reference.outputs.items()
        if cell != PREFILL_CELL
        for expected, output in zip(outputs, other.outputs[cell], strict=True)
    ]
    leading = [leading_tokens(expected, output, decode) for expected, output in pairs]
    first_output = pairs[0][1]
    text = first_output.text if first_output.text is not None else decode(first_output.tokens or [])
    return Agreement(
        rows=len(pairs),
        equal_rows=sum(count == len(expected) for count, (expected, _) in zip(leading, pairs, strict=True)),
        leading_tokens=sum(leading) / len(leading),
        sample=" ".join(text.split())[:SAMPLE_CHARACTERS].replace("`", "'").replace("|", "/"),
    )


def leading_tokens(expected: Sequence[int], output: Output, decode: Decode) -> int:
    """The number of tokens before the first difference; compares text when the engine returns no token ids."""
    if output.tokens is not None:
        return sum(1 for _ in common_prefix(expected, output.tokens))
    text = output.text or ""
    return next(
        (count - 1 for count in range(1, len(expected) + 1) if not text.startswith(decode(expected[:count]))),
        len(expected),
    )


def common_prefix(left: Sequence[int], right: Sequence[int]) -> Iterator[int]:
    for one, other in zip(left, right, strict=False):
        if one != other:
            return
        yield one


def failure_section(runs: Sequence[Run]) -> Iterator[str]:
    failed = [run for run in runs if run.failure]
    if failed:
        yield "## Failed runs"
        yield "\n".join(
            f"- {engine}, {sum(run.engine == engine for run in failed)} of {sum(run.engine == engine for run in runs)} "
            f"rounds: {next(run.failure for run in failed if run.engine == engine)}"
            for engine in engines_of(failed)
        )


def noise(runs: Sequence[Run], measures: Sequence[Measure]) -> str:
    found = [rounds for engine in engines_of(runs) if (rounds := measured_rounds(runs, engine).values())]
    noisy = [measure.spread(rounds).noisy for rounds in found for measure in measures]
    disturbed = sum(run.foreign_cores > NOISY_CORES for run in runs)
    maximum = max(run.foreign_cores for run in runs)
    return (
        f"{sum(noisy)} of {len(noisy)} cells are noisy ({NOISY_MARK}). In {disturbed} of {len(runs)} runs other work "
        f"kept more than {NOISY_CORES} cores busy meanwhile ({maximum:.2f} at the most)."
    )


def engines_of(runs: Sequence[Run]) -> list[str]:
    """In the order of the first round."""
    return list(dict.fromkeys(run.engine for run in sorted(runs, key=lambda run: run.round)))


def measured_rounds(runs: Sequence[Run], engine: str) -> dict[int, Measured]:
    return {run.round: run.measured for run in runs if run.engine == engine and run.measured}
