"""SGLang's own Engine on a GPU, measured for `bench.gpu` as the built-in engine is, where SGLang is installed."""

import argparse
import importlib.util
import time
from collections.abc import Iterator, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

from bench.gpu_loads import BATCHES, LENGTHS, MIXED, MIXED_MODEL, PROMPT, ROUNDS, TOKENS, Load, Rates
from bench.gpu_models import CONFIGS
from bench.gpu_report import Figure

BACKENDS = ("fa3", "triton")
# Of the mixed workload, whose batch shrinks. Prompts of these lengths gain nothing by graphs.
EVERY_BATCH = (1, 2, 4, *range(8, 257, 8))
FLAGS = (
    *("--sampling-backend", "pytorch", "--cuda-graph-backend-prefill", "disabled", "--max-running-requests", "256"),
    *("--mem-fraction-static", "0.85", "--dtype", "bfloat16", "--skip-tokenizer-init", "--log-level", "error"),
)


def is_installed() -> bool:
    return importlib.util.find_spec("sglang") is not None


class SglangRun:
    """A started engine."""

    def __init__(self, directory: Path, backend: str, batches: Sequence[int]) -> None:
        import sglang  # type: ignore[import-not-found, unused-ignore]
        from sglang.srt.server_args import ServerArgs  # type: ignore[import-not-found, unused-ignore]

        began = time.monotonic()
        parser = argparse.ArgumentParser()
        ServerArgs.add_cli_args(parser)
        flags = ["--model-path", str(directory), "--attention-backend", backend, *FLAGS]
        flags += ["--cuda-graph-bs-decode", *map(str, batches)]
        self._engine: Any = sglang.Engine(server_args=ServerArgs.from_cli_args(parser.parse_args(flags)))
        self.ready_s = time.monotonic() - began

    def close(self) -> None:
        """End its processes."""
        self._engine.shutdown()

    def run(self, loads: Sequence[Load], temperature: float = 0.0) -> float:
        """Answer all requests at once; return the seconds it took."""
        params = [{"temperature": temperature, "max_new_tokens": load.tokens, "ignore_eos": True} for load in loads]
        prompts = [list(load.prompt) for load in loads]
        began = time.monotonic()
        answers = self._engine.generate(input_ids=prompts, sampling_params=params)
        taken = time.monotonic() - began
        if [len(answer["output_ids"]) for answer in answers] != [load.tokens for load in loads]:
            raise RuntimeError("SGLang gave another number of tokens than it was asked for")
        return taken


def measure_sglang(model: str, directory: Path, backend: str) -> tuple[float, list[Figure]]:
    """Return the seconds until it was ready, and its rows."""
    name = f"SGLang {metadata.version('sglang')} ({backend})"
    run = SglangRun(directory, backend, EVERY_BATCH if model == MIXED_MODEL else BATCHES[model])
    figures: list[Figure] = []
    try:
        for row, rounds in _rows(Rates(run, int(str(CONFIGS[model]["vocab_size"]))), model):
            figures.append(Figure(model=model, row=row, system=name, rounds=rounds))
            print(f"{model}, {row}: {name} {figures[-1].median:.0f} tok/s", flush=True)
    finally:
        run.close()
    return run.ready_s, figures


def _rows(rates: Rates, model: str) -> Iterator[tuple[str, list[float]]]:
    for batch in BATCHES[model]:
        rates.decode(batch, PROMPT, 16)
        yield f"decode, batch {batch}", [rates.decode(batch, PROMPT, TOKENS) for _ in range(ROUNDS)]
    for length in LENGTHS:
        rates.prefill(length, 2)
        yield f"prefill, {length} tokens", [rates.prefill(length) for _ in range(ROUNDS)]
        yield f"one stream, context {length}", [rates.decode(1, length, TOKENS) for _ in range(ROUNDS)]
    if model == MIXED_MODEL:
        rates.mixed()
        yield MIXED, [rates.mixed() for _ in range(2)]
