"""Turns the figures of the GPU bench into markdown: each row beside transformers, and beside SGLang where given."""

import msgspec

from bench.report import number, table
from bench.result_files import Machine

BATON = "Baton"
TRANSFORMERS = "transformers"
SGLANG = "SGLang 0.5.23"

# SGLang 0.5.23 with fa3, measured on an H200 with the same shapes and dummy weights, in runs of its own.
SGLANG_ON_H200: dict[tuple[str, str], float] = {
    ("Llama-8B shape", "decode, batch 1"): 211,
    ("Llama-8B shape", "decode, batch 8"): 1634,
    ("Llama-8B shape", "decode, batch 64"): 10850,
    ("Llama-8B shape", "decode, batch 256"): 23470,
    ("Llama-8B shape", "decode, batch 256, streamed"): 22900,
    ("Llama-8B shape", "prefill, 2048 tokens"): 41070,
    ("Llama-8B shape", "prefill, 8192 tokens"): 38020,
    ("Qwen3-0.6B shape", "decode, batch 1"): 601,
    ("Qwen3-0.6B shape", "decode, batch 8"): 5001,
    ("Qwen3-0.6B shape", "decode, batch 64"): 29645,
    ("Qwen3-0.6B shape", "one stream, context 8192"): 535,
    ("Qwen3-0.6B shape", "256 requests, 100-1024 in and out"): 23084,
}


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
        " Prompts never share a prefix. The files of the models are in memory. transformers is `generate` with a padded"
        " batch, in the same run;"
        f" {SGLANG} (fa3) was measured on an H200 in runs of its own, so its column is for that GPU only.",
        "",
    ]
    for model in dict.fromkeys(figure.model for figure in results.figures):
        first, later = results.first_ready_s[model], results.ready_s[model]
        ready = f"Ready after {first:.1f} s, kernels compiled; a second engine of the process after {later:.1f} s."
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
    rows = []
    for row in dict.fromkeys(figure.row for figure in figures):
        by_system = {figure.system: figure for figure in figures if figure.row == row}
        peer = SGLANG_ON_H200.get((model, row)) if "H200" in results.gpu else None
        rows.append(
            [row, _cell(by_system.get(BATON)), _cell(by_system.get(TRANSFORMERS)), number(peer) if peer else ""]
        )
    return table(["", BATON, TRANSFORMERS, SGLANG], rows)


def _cell(figure: Figure | None) -> str:
    if figure is None:
        return ""
    low, high = min(figure.rounds), max(figure.rounds)
    spread = f" ({number(low)}-{number(high)})" if len(figure.rounds) > 1 else ""
    return number(figure.median) + spread
