"""The results of the multimodal benchmark and their tables."""

from collections.abc import Callable, Iterable, Sequence
from statistics import median
from typing import TypeVar

import msgspec

from bench.disagg_report import at, spread
from bench.report import table
from bench.result_files import Machine

T = TypeVar("T")
ALL_IN_ONE, SEPARATE = "all in one", "E/PD, shm"
AGGREGATED, ENCODE_PD = "two aggregated", "encode + PD"


class RequestCell(msgspec.Struct, frozen=True, kw_only=True):
    """One request, sent alone; all times in seconds."""

    model: str
    system: str
    images: int
    cache: str
    """Whether the pictures were in the embedding caches: `warm`, or `cold`."""
    repeat: int
    first_s: float
    encode_s: float
    """At the encode worker, from the admission of the request until its rows are offered."""
    transfer_s: float
    transfer_bytes: float
    misses: float


class MixedCell(msgspec.Struct, frozen=True, kw_only=True):
    """One system in one round of mixed load; all times in seconds."""

    system: str
    round: int
    undisturbed_gaps_s: list[float]
    """Between the tokens of text streams, without pictures."""
    paced_gaps_s: list[float]
    """While pictures arrive at a fixed interval."""
    paced_first_s: list[float]
    saturated_gaps_s: list[float]
    """While clients send pictures one after the other."""
    saturated_first_s: list[float]
    images_per_s: float
    tokens_per_s: float
    busy_cores: float


class EncodeCell(msgspec.Struct, frozen=True, kw_only=True):
    """One way to encode, in one repeat."""

    model: str
    variant: str
    at_once: int
    threads: int
    repeat: int
    images_per_s: float
    cpu_s: float
    """CPU time of a picture, over all threads: other processes hardly change it."""


class MultimodalResults(msgspec.Struct, frozen=True, kw_only=True):
    date: str
    commit: str
    command: str
    source_changed: bool
    machine: Machine
    requests: list[RequestCell]
    mixed: list[MixedCell]
    encoding: list[EncodeCell]


MIXED_MEASURES: dict[str, Callable[[MixedCell], float]] = {
    "image requests/s, saturated": lambda cell: cell.images_per_s,
    "text tokens/s, saturated": lambda cell: cell.tokens_per_s,
    "gap undisturbed, p50, ms": lambda cell: 1000 * at(0.5, cell.undisturbed_gaps_s),
    "gap undisturbed, p99, ms": lambda cell: 1000 * at(0.99, cell.undisturbed_gaps_s),
    "gap at one picture a second, p50, ms": lambda cell: 1000 * at(0.5, cell.paced_gaps_s),
    "gap at one picture a second, p99, ms": lambda cell: 1000 * at(0.99, cell.paced_gaps_s),
    "gap saturated, p50, ms": lambda cell: 1000 * at(0.5, cell.saturated_gaps_s),
    "gap saturated, p99, ms": lambda cell: 1000 * at(0.99, cell.saturated_gaps_s),
    "longest gap saturated, ms": lambda cell: 1000 * max(cell.saturated_gaps_s, default=float("nan")),
    "first token of a picture, one a second, p50, ms": lambda cell: 1000 * at(0.5, cell.paced_first_s),
    "first token of a picture, saturated, p50, ms": lambda cell: 1000 * at(0.5, cell.saturated_first_s),
}


def to_markdown(results: MultimodalResults) -> str:
    machine = results.machine
    note = " **The source changed while this ran.**" if results.source_changed else ""
    lines = [
        "# Images: separate encode workers, embedding transfer and the encoder",
        "",
        f"{results.date}, commit {results.commit}, {machine.cores} cores of {machine.cpu}, Python {machine.python}."
        f" `{results.command}`.{note}",
        "",
        "`smolsee` is SmolLM2-135M with a tower of 8 layers x 256 for pictures of 128 pixels (64 patches, 16 rows)."
        " `larger` has the same language weights and a random tower of 12 layers x 384 for 384 pixels (576 patches, 36"
        " rows): it sees nothing, and encoding costs about as much as with a real small tower. Every worker has one"
        " compute thread. Pictures are PNG files of 384 x 384 pixels in data URLs. Each figure is the median of the"
        " repeats, with minimum and maximum; ratios are within a repeat.",
        "",
        "## First token",
        "",
        "One request at a time, milliseconds. Cold: pictures that no worker has seen. Warm: the same pictures after"
        " another text, so their rows are in the embedding caches and their KV is not in the prefix cache.",
        "",
        table(["model", "images", "cache", ALL_IN_ONE, SEPARATE, "difference"], first_token_rows(results.requests)),
        "",
        "## Transfer of embeddings against encoding",
        "",
        "Cold requests to one encode worker and one worker that computes prompts; times from the workers' metrics."
        " Encoding is the time from the admission of a request at the encode worker until its rows are offered, with"
        " all pictures of the request. Transfer is the copy of the rows, without the messages before and after it."
        " Aim: under 2 %.",
        "",
        table(
            ["model", "images", "transport", "KB", "encode, ms", "transfer, ms", "transfer / encode, %"],
            transfer_rows(results.requests),
        ),
        "",
        *mixed_lines(results.mixed),
        "## Encoder",
        "",
        "Pictures per second, in one process, float32. From files: PNG decoding, preprocessing, tower and connector."
        " Baton gets each picture as a request of its own, all at the same time. transformers takes them one after the"
        " other, or as one batch. Aims: as fast as transformers with 1, twice as fast with 8 at once. The ratio is"
        " Baton's rate to that of this line, from files or tower alone.",
        "",
        table(
            ["model", "at once", "threads", "", "pictures/s", "Baton / this", "CPU ms of a picture"],
            encode_rows(results.encoding),
        ),
        "",
    ]
    return "\n".join(lines)


def mixed_lines(cells: Sequence[MixedCell]) -> list[str]:
    busy = max((cell.busy_cores for cell in cells), default=0.0)
    return [
        "## Text streams while pictures arrive",
        "",
        "The model `larger`, two workers with one core each: two that do everything, or one that encodes and one that"
        " computes prompts and decodes. 4 text streams of 200 tokens decode all the time. New pictures arrive one a"
        " second, or 4 clients send one after the other (saturated)."
        f" At most {busy:.1f} cores were busy, including the load generator.",
        "",
        table(["", AGGREGATED, ENCODE_PD, "ratio"], [mixed_row(cells, name) for name in MIXED_MEASURES]),
        "",
    ]


def first_token_rows(cells: Sequence[RequestCell]) -> list[list[str]]:
    rows = []
    for model, images, cache in unique((cell.model, cell.images, cell.cache) for cell in cells):
        same = [cell for cell in cells if (cell.model, cell.images, cell.cache) == (model, images, cache)]
        together, apart = (
            {cell.repeat: 1000 * cell.first_s for cell in same if cell.system == system}
            for system in (ALL_IN_ONE, SEPARATE)
        )
        later = [apart[repeat] - together[repeat] for repeat in together if repeat in apart]
        rows.append([model, str(images), cache, *map(spread_or_dash, (together.values(), apart.values(), later))])
    return rows


def transfer_rows(cells: Sequence[RequestCell]) -> list[list[str]]:
    groups: dict[tuple[str, int, str], list[RequestCell]] = {}
    for cell in cells:
        if cell.cache == "cold" and cell.encode_s > 0:
            groups.setdefault((cell.model, cell.images, cell.system), []).append(cell)
    return [
        [model, str(images), system.removeprefix("E/PD, "), *transfer_figures(same)]
        for (model, images, system), same in groups.items()
    ]


def transfer_figures(cells: Sequence[RequestCell]) -> list[str]:
    return [
        f"{median(cell.transfer_bytes for cell in cells) / 1000:.0f}",
        spread([1000 * cell.encode_s for cell in cells]),
        spread([1000 * cell.transfer_s for cell in cells], 2),
        spread([100 * cell.transfer_s / cell.encode_s for cell in cells], 2),
    ]


def mixed_row(cells: Sequence[MixedCell], name: str) -> list[str]:
    measure = MIXED_MEASURES[name]
    aggregated, separate = (
        {cell.round: measure(cell) for cell in cells if cell.system == system} for system in (AGGREGATED, ENCODE_PD)
    )
    ratios = [
        separate[number] / aggregated[number] for number in aggregated if aggregated[number] and number in separate
    ]
    return [name, *map(spread_or_dash, (aggregated.values(), separate.values())), spread_or_dash(ratios, 2)]


def encode_rows(cells: Sequence[EncodeCell]) -> list[list[str]]:
    rows = []
    for key in unique((cell.model, cell.at_once, cell.threads, cell.variant) for cell in cells):
        same = [cell for cell in cells if (cell.model, cell.at_once, cell.threads, cell.variant) == key]
        model, at_once, threads, variant = key
        rates = [cell.images_per_s for cell in same]
        ratios = [ours / cell.images_per_s for cell in same for ours in ours_beside(cell, cells)]
        cpu_ms = [1000 * cell.cpu_s for cell in same]
        rows.append(
            [model, str(at_once), str(threads), variant, spread(rates), spread_or_dash(ratios, 2), spread(cpu_ms)]
        )
    return rows


def ours_beside(cell: EncodeCell, cells: Sequence[EncodeCell]) -> list[float]:
    """Baton's rate in the same repeat, for the same work; nothing for Baton itself."""
    library, _, work = cell.variant.partition(", ")
    ours = f"Baton, {work.removesuffix(', one batch')}"
    return [
        other.images_per_s
        for other in cells
        if library != "Baton"
        and other.variant == ours
        and (other.model, other.at_once, other.threads, other.repeat)
        == (cell.model, cell.at_once, cell.threads, cell.repeat)
    ]


def spread_or_dash(values: Iterable[float], digits: int = 1) -> str:
    found = list(values)
    return spread(found, digits) if found else "-"


def unique(values: Iterable[T]) -> list[T]:
    """In the order of their first appearance."""
    return list(dict.fromkeys(values))
