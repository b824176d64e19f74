"""How fast tokens stream from SGLang itself and from Baton's adapter, in one run: `make bench-sglang-gpu`.

Every system runs in a process of its own on the one GPU. All start at the same time, and measure one after the other.
The model has the shape of Llama 8B and made-up weights; prompts and answers have 128 tokens. Streamed is from the last
first token to the first last one. `us` is the CPU time of the event loop for a token.
"""

import argparse
import asyncio
import fcntl
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import IO, Any, NamedTuple

from bench.gpu_models import CONFIGS, LLAMA_8B

LENGTH = 128
REPEATS = 4
GPU_ARGS = (
    *("--attention-backend", "fa3", "--sampling-backend", "pytorch", "--cuda-graph-backend-prefill", "disabled"),
    *("--cuda-graph-bs-decode", "1", "8", "64", "128", "256", "--load-format", "dummy", "--dtype", "bfloat16"),
    *("--mem-fraction-static", "0.9", "--max-total-tokens", "69632", "--max-running-requests", "256"),
    *("--page-size", "16", "--sleep-on-idle"),
)
SYSTEMS = ("sglang", "sglang, metrics", "baton, no metrics", "baton")

Stream = Callable[[list[int]], Awaitable[list[float]]]


class Measured(NamedTuple):
    """One run of one system."""

    system: str
    streams: int
    tokens_per_s: float
    chunks: float
    us: float


def main() -> None:
    """Run every system, or as one of them."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--systems", nargs="+", default=SYSTEMS)
    parser.add_argument("--streams", nargs="+", type=int, default=(64, 256))
    parser.add_argument("--as-system")
    parser.add_argument("--of", type=int, default=1)
    parser.add_argument("--directory", type=Path)
    options = parser.parse_args()
    if options.as_system:
        run_system(options.as_system, options.directory, options.streams, options.of)
        return
    with tempfile.TemporaryDirectory() as directory:
        run_all(options.systems, Path(directory), options.streams)


def run_all(systems: list[str], directory: Path, streams: list[int]) -> None:
    """Run the systems beside each other, and print a table."""
    write_shape(directory / "model")
    command = [sys.executable, "-m", "bench.sglang_stream", "--directory", str(directory)]
    processes = []
    for system in systems:
        asked = [*command, "--as-system", system, "--of", str(len(systems)), "--streams", *map(str, streams)]
        processes.append(subprocess.Popen(asked, stdout=subprocess.PIPE, text=True))
    found: list[Measured] = []
    for process in processes:
        output, _ = process.communicate()
        found += [Measured(*json.loads(line[1:])) for line in output.splitlines() if line.startswith("@")]
    print(heading())
    print("| system | streams | tok/s, median | runs | tokens a chunk | us of the event loop a token |")
    print("|---|---|---|---|---|---|")
    for system in systems:
        for count in streams:
            runs = [each for each in found if (each.system, each.streams) == (system, count)]
            if runs:
                print(row(runs))


def heading() -> str:
    """Return the GPU and the versions."""
    import torch

    versions = ", ".join(f"{name} {metadata.version(name)}" for name in ("sglang", "torch"))
    return (
        f"{torch.cuda.get_device_name()}, {versions}, {datetime.now(UTC):%Y-%m-%d}, `python -m bench.sglang_stream`.\n"
    )


def row(runs: list[Measured]) -> str:
    """Return a line of the table."""
    rates = [each.tokens_per_s for each in runs]
    us = statistics.median(each.us for each in runs)
    chunk = statistics.median(each.chunks for each in runs)
    shown = ", ".join(f"{rate:,.0f}" for rate in rates)
    middle = statistics.median(rates)
    return f"| {runs[0].system} | {runs[0].streams} | {middle:,.0f} | {shown} | {chunk:.2f} | {us:.1f} |"


def write_shape(directory: Path) -> None:
    """Write a model without weights, whose tokens are numbers."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    directory.mkdir()
    config = CONFIGS[LLAMA_8B]
    (directory / "config.json").write_text(json.dumps(config))
    vocabulary = {str(number): number for number in range(int(str(config["vocab_size"])))}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="0"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.save(str(directory / "tokenizer.json"))
    kind = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "2"}
    (directory / "tokenizer_config.json").write_text(json.dumps(kind))


def run_system(system: str, directory: Path, streams: list[int], systems: int) -> None:
    """Start one system, wait for its turn, and measure it."""
    import uvloop

    metrics = not system.endswith("no metrics") if system.startswith("baton") else system.endswith("metrics")
    run = run_baton if system.startswith("baton") else run_sglang

    async def measure(stream: Stream) -> None:
        file = await asyncio.to_thread(take_turn, directory, system, systems)
        for count in streams:
            for repeat in range(REPEATS):
                measured = await one_run(system, count, repeat, stream)
                if repeat:
                    print("@" + json.dumps(measured), flush=True)
        file.close()

    uvloop.install()
    run(directory / "model", metrics, measure)


def take_turn(directory: Path, system: str, systems: int) -> IO[str]:
    """Wait until all systems are ready and the others do not measure; the turn ends when the file is closed."""
    (directory / f"ready-{system}").touch()
    while len(list(directory.glob("ready-*"))) < systems:
        time.sleep(0.1)
    file = (directory / "turn").open("w")
    fcntl.flock(file, fcntl.LOCK_EX)
    return file


async def one_run(system: str, count: int, seed: int, stream: Stream) -> Measured:
    """Measure `count` streams at once."""
    draw = random.Random(f"{system}.{count}.{seed}")
    prompts = [[draw.randrange(10, 128000) for _ in range(LENGTH)] for _ in range(count)]
    cpu = time.thread_time()
    rows = await asyncio.gather(*(stream(prompt) for prompt in prompts))
    us = (time.thread_time() - cpu) * 1e6 / (count * LENGTH)
    first, last = max(row[0] for row in rows), min(row[-1] for row in rows)
    between = sum(first < moment <= last for row in rows for moment in row)
    chunks = sum(len(set(row)) for row in rows)
    return Measured(system, count, between / (last - first), count * LENGTH / chunks, us)


def run_sglang(model: Path, metrics: bool, measure: Callable[[Stream], Awaitable[None]]) -> None:
    """SGLang's own Engine, with what the adapter asks of it."""
    import sglang  # type: ignore[import-not-found, unused-ignore]
    from sglang.srt.server_args import ServerArgs  # type: ignore[import-not-found, unused-ignore]

    parser = argparse.ArgumentParser()
    ServerArgs.add_cli_args(parser)
    flags = ["--model-path", str(model), "--incremental-streaming-output", "--log-level", "error", *GPU_ARGS]
    flags += ["--enable-metrics"] if metrics else []
    engine: Any = sglang.Engine(server_args=ServerArgs.from_cli_args(parser.parse_args(flags)))
    params = {"temperature": 0.0, "max_new_tokens": LENGTH, "ignore_eos": True}

    async def stream(prompt: list[int]) -> list[float]:
        times: list[float] = []
        async for chunk in await engine.async_generate(input_ids=prompt, sampling_params=params, stream=True):
            times += [time.monotonic()] * len(chunk["output_ids"])
        return times

    engine.loop.run_until_complete(measure(stream))
    engine.shutdown()


def run_baton(model: Path, metrics: bool, measure: Callable[[Stream], Awaitable[None]]) -> None:
    """Baton's adapter."""
    from baton.config.engines import SglangOptions
    from baton.engines.sglang.adapter import SglangEngine
    from baton.engines.sglang.launch_mode import LaunchMode
    from baton.ports.engine import Work
    from baton.protocol.ids import new_request_id
    from baton.protocol.outputs import TokenDelta
    from baton.protocol.requests import Sampling, StopConditions

    async def body() -> None:
        engine = SglangEngine(SglangOptions(metrics=metrics), GPU_ARGS, model, "8b", LaunchMode())
        await engine.start()

        async def drain() -> None:
            async for _ in engine.readings():
                pass

        draining = asyncio.create_task(drain())

        async def stream(prompt: list[int]) -> list[float]:
            times: list[float] = []
            asked = Work(
                request_id=new_request_id("bench"),
                token_ids=tuple(prompt),
                max_tokens=LENGTH,
                sampling=Sampling(temperature=0.0),
                stop=StopConditions(ignore_eos=True),
            )
            reading = engine.submit(asked)
            while outputs := await reading.read():
                for output in outputs:
                    if isinstance(output, TokenDelta):
                        times += [time.monotonic()] * len(output.token_ids)
            return times

        await measure(stream)
        await engine.stop()
        await draining

    asyncio.run(body())


if __name__ == "__main__":
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    main()
