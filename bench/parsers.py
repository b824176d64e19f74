"""`python -m bench.parsers`: what HTTP servers cost per request and per streamed event, beside the edge's parts.

Each server runs in a process of its own with one route that answers a small body and one that streams events, each of
which is written alone. The servers take turns. Needs aiohttp, granian and uvicorn; what is not installed is left out.
"""

import argparse
import asyncio
import importlib.util
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import psutil
import uvloop

from bench.chat import HOST
from bench.peers.parser_servers import EVENTS, SERVERS
from bench.systems import free_port, process_trees

CONNECTIONS = 8
START_TIMEOUT_S = 30.0
STOP_TIMEOUT_S = 10.0
END_OF_BODY = b"0\r\n\r\n"


class Plan(NamedTuple):
    """How much is requested."""

    requests: int = 20_000
    streams: int = 400
    repeats: int = 3


QUICK = Plan(requests=400, streams=16, repeats=1)


class Cost(NamedTuple):
    """Processor time of a server, in microseconds."""

    request_us: float
    event_us: float


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.parsers", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="few requests, once, to check that everything runs")
    parser.add_argument("--out", type=Path, default=Path("bench/results"), help="folder of the results")
    options = parser.parse_args(arguments)
    plan = QUICK if options.quick else Plan()
    names = [name for name in SERVERS if importlib.util.find_spec(SERVERS[name].package) is not None]
    costs: dict[str, list[Cost]] = {name: [] for name in names}
    for repeat in range(plan.repeats):
        for name in names[repeat % len(names) :] + names[: repeat % len(names)]:
            costs[name].append(measure(name, plan))
            print(repeat, name, costs[name][-1], file=sys.stderr, flush=True)
    options.out.mkdir(parents=True, exist_ok=True)
    (options.out / "edge-parsers.md").write_text(to_markdown(costs, plan))
    return 0


def measure(name: str, plan: Plan) -> Cost:
    """Start a server and return what it costs."""
    with running(name) as (process, port):
        uvloop.run(load(port, b"/small", CONNECTIONS * 10))
        small = spent(process, port, b"/small", plan.requests)
        stream = spent(process, port, b"/stream", plan.streams)
    return Cost(
        small / plan.requests * 1e6, (stream - small / plan.requests * plan.streams) / plan.streams / EVENTS * 1e6
    )


def spent(process: psutil.Process, port: int, path: bytes, requests: int) -> float:
    before = cpu_s(process)
    uvloop.run(load(port, path, requests))
    return cpu_s(process) - before


def cpu_s(process: psutil.Process) -> float:
    times = [each.cpu_times() for each in process_trees([process])]
    return float(sum(each.user + each.system for each in times))


async def load(port: int, path: bytes, requests: int) -> None:
    """Send requests one after the other on each connection."""
    async with asyncio.TaskGroup() as group:
        for _ in range(CONNECTIONS):
            group.create_task(ask(port, path, requests // CONNECTIONS))


async def ask(port: int, path: bytes, requests: int) -> None:
    reader, writer = await asyncio.open_connection(HOST, port)
    for _ in range(requests):
        writer.write(b"GET " + path + b" HTTP/1.1\r\nhost: bench\r\naccept: */*\r\nuser-agent: bench\r\n\r\n")
        head = await reader.readuntil(b"\r\n\r\n")
        if not head.startswith(b"HTTP/1.1 200"):
            raise RuntimeError(f"a server answered {head!r}")
        lower = head.lower()
        if b"content-length: " in lower:
            await reader.readexactly(int(lower.partition(b"content-length: ")[2].partition(b"\r\n")[0]))
        else:
            await reader.readuntil(END_OF_BODY)
    writer.close()


@contextmanager
def running(name: str) -> Iterator[tuple[psutil.Process, int]]:
    port = free_port()
    process = psutil.Popen(
        [sys.executable, "-m", "bench.peers.parser_servers", name, str(port)],
        stdout=subprocess.DEVNULL,
        start_new_session=True,
    )
    try:
        wait_for_port(process, port)
        yield process, port
    finally:
        tree = process_trees([process])
        process.terminate()
        for left in psutil.wait_procs(tree, timeout=STOP_TIMEOUT_S)[1]:
            left.kill()


def wait_for_port(process: psutil.Popen, port: int) -> None:
    deadline = time.monotonic() + START_TIMEOUT_S
    while time.monotonic() < deadline and process.poll() is None:
        try:
            uvloop.run(ask(port, b"/small", 1))
        except OSError:
            time.sleep(0.1)
        else:
            return
    raise RuntimeError("a server did not start")


def to_markdown(costs: dict[str, list[Cost]], plan: Plan) -> str:
    rows = [
        f"| {SERVERS[name].title} | {spread([cost.request_us for cost in measured])}"
        f" | {spread([cost.event_us for cost in measured])} |"
        for name, measured in costs.items()
    ]
    return "\n".join(
        [
            "# HTTP servers for the edge",
            "",
            f"`python -m bench.parsers`: processor time of the server in microseconds, median of {plan.repeats} runs"
            f" that take turns (least-most). {plan.requests:,} requests for a small body, and {plan.streams} streams of"
            f" {EVENTS} events, on {CONNECTIONS} connections. One process each, with uvloop where it takes one.",
            "",
            "| server | us per request | us per event |",
            "|---|---|---|",
            *rows,
            "",
        ]
    )


def spread(values: list[float]) -> str:
    return f"{statistics.median(values):.1f} ({min(values):.1f}-{max(values):.1f})"


if __name__ == "__main__":
    sys.exit(main())
