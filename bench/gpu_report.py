"""Turns the figures of the GPU bench into markdown: each row beside transformers, and beside SGLang where given."""

import msgspec

from bench.report import number, table
from bench.result_files import Machine

BATON = "Baton"
TRANSFORMERS = "transformers"


class Figure(msgspec.Struct, frozen=True, kw_only=True):
    """Tokens per second of one system in one row: the median of `rounds`."""

    model: str
    row: str
    system: str
    rounds: list[float]

    @property
    def median(self) -> float:
        return sorted(self.rounds)[len(self.rounds) // 2]


class KernelTimes(msgspec.Struct, frozen=True, kw_only=True):
    """Where the GPU's time goes in one load: milliseconds by kernel."""

    model: str
    load: str
    milliseconds: dict[str, float]


class GpuResults(msgspec.Struct, frozen=True, kw_only=True):
    date: str
    commit: str
    command: str
    gpu: str
    torch: str
    machine: Machine
    first_ready_s: dict[str, float]
    """Of the first engine on a machine, which compiles the kernels; `ready_s` is of the next in the same process."""
    ready_s: dict[str, float]
    sglang_ready_s: dict[str, float] = {}
    """By model and attention."""
    figures: list[Figure]
    kernels: list[KernelTimes]


def to_markdown(results: GpuResults) -> str:
    """Return the page of a run."""
    lines = [
        "# Speed on a GPU",
        "",
        f"{results.gpu}, torch {results.torch}, {results.machine.system}. {results.date}, commit {results.commit}:"
        f" `{results.command}`.",
        "",
        "Random weights in bfloat16; tokens per second, the median of the rounds, with their range. Decode is what a"
        " batch of prompts of 128 tokens with answers of 128 takes beyond one with answers of one token. Prefill is a"
        " prompt with one token. Answers are read a few times a second, as by a client that does not stream, unless the"
        " row says streamed. One stream is a prompt of that length with an answer of 128 tokens, after its first token."
        " Prompts never share a prefix. The files of the models are in memory. All systems are measured in the same"
        " run, each in a process of its own: transformers is `generate` with a padded batch, SGLang its own `Engine`,"
        " asked for whole answers, with CUDA graphs for these batches and none for prompts.",
        "",
    ]
    for model in dict.fromkeys(figure.model for figure in results.figures):
        first, later = results.first_ready_s[model], results.ready_s[model]
        ready = f"Ready after {first:.1f} s, kernels compiled; a second engine of the process after {later:.1f} s."
        peers = [f"{name.rpartition(', ')[2]} {s:.1f} s" for name, s in results.sglang_ready_s.items() if model in name]
        ready += f" SGLang: {', '.join(peers)}." if peers else ""
        lines += [f"## {model}", "", ready, ""]
        lines += [_rows(results, model), ""]
    lines += ["## Where the time of the GPU goes", ""]
    for part in results.kernels:
        total = sum(part.milliseconds.values())
        lines += [f"{part.model}, {part.load}: {total:.0f} ms in these kernels.", ""]
        lines += [
            table(
                ["kernel", "ms", "share"],
                [
                    [f"`{name[:60]}`", f"{spent:.1f}", f"{spent / total:.0%}"]
                    for name, spent in part.milliseconds.items()
                ],
            ),
            "",
        ]
    return "\n".join(lines)


def _rows(results: GpuResults, model: str) -> str:
    figures = [figure for figure in results.figures if figure.model == model]
    by_place = {(figure.row, figure.system): figure for figure in figures}
    systems = list(dict.fromkeys(figure.system for figure in figures))
    rows = [
        [row, *(_cell(by_place.get((row, system))) for system in systems)]
        for row in dict.fromkeys(figure.row for figure in figures)
    ]
    return table(["", *systems], rows)


def _cell(figure: Figure | None) -> str:
    if figure is None:
        return ""
    low, high = min(figure.rounds), max(figure.rounds)
    spread = f" ({number(low)}-{number(high)})" if len(figure.rounds) > 1 else ""
    return number(figure.median) + spread
