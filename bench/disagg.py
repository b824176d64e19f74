"""Measures prefill and decode on separate workers against workers that do both, on the same cores.

Three measurements of both systems, alternating round by round:

    alone    one request of 1,000 tokens at a time: how much later is the first token after a handoff?
    mixed    a few streams decode while long prompts arrive: how long are the gaps between their tokens?
    cancel   a client disconnects: how long until both workers have freed the memory of the request?

The rate of the KV transfer alone is measured by `bench.transfer`, which runs first.
"""

import argparse
import asyncio
import re
import shutil
import tempfile
import time
import urllib.request
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import datetime
from pathlib import Path

import msgspec
import psutil
import uvloop
from tokenizers import Tokenizer

from baton.config.directories import cache_directory
from baton.config.settings import Settings
from baton.models.demo import DEMOS, prepare_demo
from bench import transfer
from bench.disagg_client import HOST, TimedResponse, disconnect, request_bytes, stream_completion
from bench.disagg_report import Cell, DisaggResults, to_markdown
from bench.engine_prompts import make_prompt
from bench.path import busy_core_s
from bench.result_files import describe_machine, git_commit, source_digest
from bench.systems import Launch, SystemFailed, free_port, start, stop
from tests.doubles.tiny_models import make_tiny_model

SYSTEMS = {"aggregated": ("--workers", "2"), "disaggregated": ("--prefill", "1", "--decode", "1")}
ALONE_TOKENS, ALONE_NEW_TOKENS = 1000, 16
STREAMS, SHORT_TOKENS, SHORT_NEW_TOKENS = 4, 32, 200
LONG_TOKENS, LONG_PAUSE_S = 2000, 1.0
CANCEL_TOKENS, CANCEL_STEP = 3000, 16
START_TIMEOUT_S = 120.0
END_POLLS = 20
RESULTS = Path("bench/results")
ENDED = re.compile(r"^(\S+ \S+) INFO baton\.request \S+ (prefill|decode) .* trace=(\S+)", re.MULTILINE)
FETCHED = re.compile(r"^baton_transfer_seconds_sum{.*} (\S+)$", re.MULTILINE)

Encode = Callable[[str], list[int]]


class Deployment:
    """One running `baton serve`."""

    def __init__(self, port: int, decode_port: int, logs: Path) -> None:
        self.port = port
        self.logs = logs
        self._decode_port = decode_port

    def fetch_s(self) -> float:
        """Seconds that the second worker (the decode worker when disaggregated) has spent fetching KV."""
        with urllib.request.urlopen(f"http://{HOST}:{self._decode_port}/metrics", timeout=10) as response:
            text = response.read().decode()
        return sum(map(float, FETCHED.findall(text)))

    def ends(self, trace_id: str) -> dict[str, float]:
        """Wall-clock time at which each worker finished a request, by role."""
        found = [match for file in self.logs.glob("*.log") for match in ENDED.finditer(file.read_text())]
        return {
            role: datetime.strptime(when, "%Y-%m-%d %H:%M:%S,%f").timestamp()
            for when, role, trace in (match.groups() for match in found)
            if trace == trace_id
        }


@contextmanager
def serving(model: Path, name: str, flags: Sequence[str]) -> Iterator[Deployment]:
    """Run `baton serve` for the duration of the block."""
    work_dir = Path(tempfile.mkdtemp(prefix="baton-bench-disagg-"))
    port = free_port()
    locations = ("--port", str(port), "--system-port", str(port + 1), "--log-dir", str(work_dir / "logs"))
    process = start(Launch(("baton", "serve", "--model", str(model), "--name", name, *locations, *flags), {}), work_dir)
    try:
        _await_ready(process, work_dir / "log")
        yield Deployment(port, port + 2, work_dir / "logs")
    finally:
        stop([process])
        shutil.rmtree(work_dir, ignore_errors=True)


def _await_ready(process: psutil.Popen, log: Path) -> None:
    deadline = time.monotonic() + START_TIMEOUT_S
    while "Serving" not in log.read_text(errors="replace"):
        if time.monotonic() > deadline or process.poll() is not None:
            raise SystemFailed(f"baton serve did not start:\n{log.read_text(errors='replace')[-2000:]}")
        time.sleep(0.1)


class Prompts:
    """Prompts of any length, none of them used before."""

    def __init__(self, encode: Encode, round_number: int) -> None:
        self._encode = encode
        self._next = round_number * 100_000

    def make(self, length: int) -> list[int]:
        self._next += 1
        return make_prompt(self._encode, length, self._next)


async def complete(deployment: Deployment, prompt: Sequence[int], new_tokens: int) -> TimedResponse:
    return await stream_completion(deployment.port, request_bytes("smollm2", prompt, new_tokens))


async def measure_alone(deployment: Deployment, prompts: Prompts, count: int) -> list[TimedResponse]:
    """One request at a time, after one as warm-up."""
    await complete(deployment, prompts.make(ALONE_TOKENS), ALONE_NEW_TOKENS)
    return [await complete(deployment, prompts.make(ALONE_TOKENS), ALONE_NEW_TOKENS) for _ in range(count)]


async def measure_mixed(
    deployment: Deployment, prompts: Prompts, seconds: float, long: bool
) -> tuple[list[TimedResponse], list[TimedResponse]]:
    """Run streams that decode all the time and, with `long`, one long prompt after the other; return both responses."""
    stop_at = time.perf_counter() + seconds
    shorts: list[TimedResponse] = []
    longs: list[TimedResponse] = []

    async def stream() -> None:
        while time.perf_counter() < stop_at:
            shorts.append(await complete(deployment, prompts.make(SHORT_TOKENS), SHORT_NEW_TOKENS))

    async def arrive() -> None:
        while long and time.perf_counter() < stop_at:
            await asyncio.sleep(LONG_PAUSE_S)
            longs.append(await complete(deployment, prompts.make(LONG_TOKENS), 1))

    await asyncio.gather(*(stream() for _ in range(STREAMS)), arrive())
    return shorts, longs


async def measure_cancel(deployment: Deployment, prompts: Prompts, count: int) -> dict[str, list[float]]:
    """Seconds from a client disconnect until the last worker finished the request, by the phase of the request."""
    freed_s: dict[str, list[float]] = {}
    for number in range(count):
        for phase, after_s, after_events in (("prefill", 0.01 + number % 20 * 0.002, 0), ("decode", 0.005, 3)):
            trace_id = uuid.uuid4().hex
            request = request_bytes("tiny", prompts.make(CANCEL_TOKENS), 1000, trace_id)
            disconnected_at = await disconnect(deployment.port, request, after_s, after_events)
            if ends := await both_ends(deployment, trace_id):
                freed_s.setdefault(phase, []).append(max(0.0, max(ends.values()) - disconnected_at))
    return freed_s


async def both_ends(deployment: Deployment, trace_id: str) -> dict[str, float]:
    """The end times at both workers, or at one after a timeout: not every request reaches both."""
    for _ in range(END_POLLS):
        await asyncio.sleep(0.1)
        if len(ends := deployment.ends(trace_id)) == 2:
            break
    return ends


def run_round(number: int, model: Path, encode: Encode, options: argparse.Namespace) -> Iterator[Cell]:
    names = list(SYSTEMS) if number % 2 == 0 else list(reversed(SYSTEMS))
    for system in names:
        with serving(model, "smollm2", SYSTEMS[system]) as deployment:
            cell = measure_system(deployment, system, number, Prompts(encode, number + 1), options)
        yield cell


def measure_system(
    deployment: Deployment, system: str, number: int, prompts: Prompts, options: argparse.Namespace
) -> Cell:
    before, began = busy_core_s(), time.monotonic()
    fetched = deployment.fetch_s()
    alone = uvloop.run(measure_alone(deployment, prompts, options.requests))
    fetched = (deployment.fetch_s() - fetched) / (options.requests + 1)
    undisturbed, _ = uvloop.run(measure_mixed(deployment, prompts, options.seconds / 2, long=False))
    mixed, longs = uvloop.run(measure_mixed(deployment, prompts, options.seconds, long=True))
    busy = (busy_core_s() - before) / (time.monotonic() - began)
    return Cell(
        system=system,
        round=number,
        first_s=first_tokens_s(alone),
        fetch_s=fetched,
        alone_gaps_s=gaps_s(alone),
        undisturbed_gaps_s=gaps_s(undisturbed),
        mixed_gaps_s=gaps_s(mixed),
        short_first_s=first_tokens_s(mixed),
        long_first_s=first_tokens_s(longs),
        busy_cores=busy,
    )


def first_tokens_s(responses: Sequence[TimedResponse]) -> list[float]:
    return [response.first_s for response in responses]


def gaps_s(responses: Sequence[TimedResponse]) -> list[float]:
    return [gap for response in responses for gap in response.gaps_s]


def run_cancel(encode: Encode, options: argparse.Namespace) -> dict[str, list[float]]:
    """Use a tiny model: its steps take about a millisecond, so they hardly add to the measured time."""
    with tempfile.TemporaryDirectory() as directory:
        model = make_tiny_model(Path(directory) / "tiny", vocab_size=50_000)
        flags = (*SYSTEMS["disaggregated"], "--torch-batch-tokens", str(CANCEL_STEP), "--torch-blocks", "2048")
        with serving(model, "tiny", flags) as deployment:
            return uvloop.run(measure_cancel(deployment, Prompts(encode, 99), options.cancels))


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3, help="how often each system is started and measured")
    parser.add_argument("--requests", type=int, default=8, help="requests sent one at a time, in each round")
    parser.add_argument("--seconds", type=float, default=40.0, help="seconds of mixed load, in each round")
    parser.add_argument("--cancels", type=int, default=100, help="client disconnects in each phase")
    parser.add_argument("--repeats", type=int, default=7, help="repeats of the transfers")
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder of the results")
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> int:
    options = parse(arguments)
    digest = source_digest()
    model = prepare_demo(DEMOS["smollm2"], cache_directory(Settings()) / "models")
    tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))

    def encode(text: str) -> list[int]:
        return list(tokenizer.encode(text, add_special_tokens=False).ids)

    transfers = transfer.measure(transfer.transports_here(), options.repeats)
    cells: list[Cell] = []
    for number in range(options.rounds):
        for cell in run_round(number, model, encode, options):
            cells.append(cell)
            print(f"round {number + 1}: {cell.system} measured", flush=True)
    results = DisaggResults(
        date=time.strftime("%Y-%m-%d"),
        commit=git_commit(),
        command=f'make bench-disagg ARGS="--rounds {options.rounds} --seconds {options.seconds:g}"',
        source_changed=digest != source_digest(),
        machine=describe_machine(),
        transfers=transfers,
        cells=cells,
        cancels=run_cancel(encode, options),
    )
    options.out.mkdir(parents=True, exist_ok=True)
    (options.out / "disagg.json").write_bytes(msgspec.json.encode(results))
    text = to_markdown(results)
    (options.out / "disagg.md").write_text(text)
    print(text)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
