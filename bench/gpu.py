"""`python -m bench.gpu`: the built-in engine on a GPU beside transformers, and beside SGLang where that is installed.

On random weights of known shapes: nothing is downloaded. Speed is reported, never asserted.
"""

import argparse
import multiprocessing
import shlex
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import msgspec
import torch

from bench.gpu_engine import EngineRun
from bench.gpu_loads import BATCHES, LENGTHS, MIXED, MIXED_MODEL, PROMPT, ROUNDS, TOKENS, Rates
from bench.gpu_models import CONFIGS, LLAMA_8B, QWEN3_06B, write_model
from bench.gpu_report import BATON, TRANSFORMERS, Figure, GpuResults, KernelTimes, to_markdown
from bench.gpu_sglang import BACKENDS, is_installed, measure_sglang
from bench.result_files import describe_machine, git_commit

T = TypeVar("T")

RESULTS = Path(__file__).parent / "results"
PEER_BATCHES = {LLAMA_8B: (1, 64, 256), QWEN3_06B: (64,)}


class Measured(NamedTuple):
    """What the built-in engine reached with one model."""

    first_ready_s: float
    ready_s: float
    figures: list[Figure]
    kernels: list[KernelTimes]


def measure_baton(model: str, directory: Path) -> Measured:
    """Measure all rows of one model, then where the GPU's time goes: a profiler slows down what comes after it."""
    torch.zeros(1, device="cuda")  # the driver starts once, and not as a part of the engine
    first = EngineRun(directory, model)
    first.close()
    run = EngineRun(directory, model)
    rates = Rates(run, int(str(CONFIGS[model]["vocab_size"])))
    figures: list[Figure] = []

    def add(row: str, measure: Callable[[], float], rounds: int = ROUNDS) -> None:
        figures.append(Figure(model=model, row=row, system=BATON, rounds=[measure() for _ in range(rounds)]))
        print(f"{model}, {row}: {figures[-1].median:.0f} tok/s", flush=True)

    try:
        for batch in BATCHES[model]:
            run.run(rates.loads(batch, PROMPT, 16))
            add(f"decode, batch {batch}", partial(rates.decode, batch, PROMPT, TOKENS))
        run.streamed(True)
        last = BATCHES[model][-1]
        add(f"decode, batch {last}, streamed", partial(rates.decode, last, PROMPT, TOKENS))
        run.streamed(False)
        for length in LENGTHS:
            rates.prefill(length, 2)
            add(f"prefill, {length} tokens", partial(rates.prefill, length))
            add(f"one stream, context {length}", partial(rates.decode, 1, length, TOKENS))
        if model == MIXED_MODEL:
            rates.mixed()
            add(MIXED, rates.mixed, 2)
        kernels = [
            KernelTimes(model=model, load=load, milliseconds=run.kernel_times(rates.loads(batch, prompt, tokens)))
            for load, batch, prompt, tokens in (
                ("batch 1, 128 in and 64 out", 1, PROMPT, 64),
                (f"batch {last}, 128 in and 64 out", last, PROMPT, 64),
                ("a prompt of 8192", 1, LENGTHS[-1], 1),
            )
        ]
        return Measured(first.ready_s, run.ready_s, figures, kernels)
    finally:
        run.close()


def measure_transformers(model: str, directory: Path) -> list[Figure]:
    """Return the rows that `generate` has: padded batches from start to end."""
    import transformers

    config = transformers.AutoConfig.from_pretrained(directory)
    with torch.device("cuda"):
        peer: Any = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)  # type: ignore[no-untyped-call]
    peer.eval()
    peer.generation_config.eos_token_id = None
    return _generate_figures(model, peer, int(config.vocab_size))


def _generate_figures(model: str, peer: Any, vocab: int) -> list[Figure]:
    def seconds(batch: int, prompt: int, tokens: int) -> float:
        ids = torch.randint(3, vocab, (batch, prompt), device="cuda")
        torch.cuda.synchronize()
        began = time.monotonic()
        with torch.inference_mode():
            peer.generate(
                ids, attention_mask=torch.ones_like(ids), max_new_tokens=tokens, do_sample=False, pad_token_id=0
            )
        torch.cuda.synchronize()
        return time.monotonic() - began

    figures = []
    for batch in PEER_BATCHES[model]:
        seconds(batch, PROMPT, 4)
        rate = batch * (TOKENS - 1) / (seconds(batch, PROMPT, TOKENS) - seconds(batch, PROMPT, 1))
        figures.append(Figure(model=model, row=f"decode, batch {batch}", system=TRANSFORMERS, rounds=[rate]))
    for length in LENGTHS:
        seconds(1, length, 1)
        rates = [length / seconds(1, length, 1) for _ in range(ROUNDS)]
        figures.append(Figure(model=model, row=f"prefill, {length} tokens", system=TRANSFORMERS, rounds=rates))
    return figures


def in_process(measure: Callable[..., T], *args: object) -> T:
    """Measure in a process of its own, so that no system has what another has left."""
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
        return pool.submit(measure, *args).result()


def main() -> None:
    """Measure, and write both result files."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--models", nargs="+", choices=sorted(CONFIGS), default=[LLAMA_8B, QWEN3_06B])
    parser.add_argument("--out", type=Path, default=RESULTS, help="directory of gpu.md and gpu.json")
    parser.add_argument("--scratch", type=Path, default=Path("/dev/shm"), help="where the models are written")
    given = parser.parse_args()
    if not torch.cuda.is_available():
        sys.exit("there is no GPU here; bench.engine measures the CPU")
    measured: dict[str, Measured] = {}
    figures: list[Figure] = []
    sglang_ready_s: dict[str, float] = {}
    for model in given.models:
        with tempfile.TemporaryDirectory(dir=given.scratch) as directory:
            write_model(model, Path(directory))
            measured[model] = in_process(measure_baton, model, Path(directory))
            figures += measured[model].figures
            for backend in BACKENDS if is_installed() else ():
                sglang_ready_s[f"{model}, {backend}"], found = in_process(
                    measure_sglang, model, Path(directory), backend
                )
                figures += found
            figures += in_process(measure_transformers, model, Path(directory))
    results = GpuResults(
        date=datetime.now(UTC).isoformat(timespec="seconds"),
        commit=git_commit(),
        command=shlex.join(["python", "-m", "bench.gpu", *sys.argv[1:]]),
        gpu=torch.cuda.get_device_name(),
        torch=str(torch.__version__),
        machine=describe_machine(),
        first_ready_s={model: own.first_ready_s for model, own in measured.items()},
        ready_s={model: own.ready_s for model, own in measured.items()},
        sglang_ready_s=sglang_ready_s,
        figures=figures,
        kernels=[times for own in measured.values() for times in own.kernels],
    )
    given.out.mkdir(parents=True, exist_ok=True)
    (given.out / "gpu.json").write_bytes(msgspec.json.format(msgspec.json.encode(results)))
    (given.out / "gpu.md").write_text(to_markdown(results))
    print(to_markdown(results))


if __name__ == "__main__":
    main()
