"""Measures the view with a large fake deployment: `python -m tests.view.measure --processes 500`.

The deployment runs in a process of its own, so that its cost is not the view's.
"""

import argparse
import asyncio
import multiprocessing
import resource
import time
from collections.abc import Sequence
from multiprocessing.connection import Connection
from typing import Any

import aiohttp

from baton.views.deployment import ProcessAddress
from baton.views.server import ViewServer
from tests.view.fake_deployment import TOKEN, disaggregated


def run_fake(pipe: Connection, prefill: int, decode: int, rate: float) -> None:
    async def run() -> None:
        fake = disaggregated(prefill, decode, 1)
        await fake.start()
        fake.history(60, rate)
        pipe.send([(each.name, each.url) for each in fake.processes])
        await fake.traffic(rate)

    resource.setrlimit(resource.RLIMIT_NOFILE, (8192, 8192))
    asyncio.run(run())


class Given:
    def __init__(self, processes: Sequence[tuple[str, str]]) -> None:
        self._addresses = [ProcessAddress(name=name, url=url, token=TOKEN) for name, url in processes]

    async def find(self) -> Sequence[ProcessAddress]:
        return self._addresses


async def measure(view: ViewServer, count: int, seconds: float) -> dict[str, Any]:
    """Watch the view as a browser does, and return what it took."""
    started, events, size = time.monotonic(), 0, 0
    from_s, all_seen = started, None
    busy = time.process_time()
    seen: set[str] = set()
    async with aiohttp.ClientSession(read_bufsize=1 << 24) as session, session.get(f"{view.url}api/events") as reply:
        while time.monotonic() - started < seconds:
            line = await reply.content.readline()
            if not line.startswith(b"data: "):
                continue
            events, size = events + 1, size + len(line)
            seen = {name for name, each in view.collector.processes.items() if each.about is not None}
            if all_seen is None and len(seen) == count:
                all_seen = time.monotonic() - started
                busy, events, size, from_s = time.process_time(), 0, 0, time.monotonic()
    took = time.monotonic() - from_s
    return {
        "processes": count,
        "all shown after s": round(all_seen, 1) if all_seen is not None else f"only {len(seen)} shown",
        "cpu share of the view": round((time.process_time() - busy) / took, 3),
        "events per s": round(events / took, 1),
        "KB per s to a browser": round(size / took / 1000),
        "requests kept": len(view.collector.traces),
        "resident MB": round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024),
    }


async def main(options: argparse.Namespace) -> None:
    here, there = multiprocessing.Pipe()
    third = (options.processes - 2) // 3
    sizes = (third, options.processes - 2 - third)
    fake = multiprocessing.get_context("spawn").Process(
        target=run_fake, args=(there, *sizes, options.rate), daemon=True
    )
    fake.start()
    processes = await asyncio.to_thread(here.recv)
    view = ViewServer(Given(processes), port=options.port)
    await view.start()
    print(view.url, flush=True)
    try:
        for name, value in (await measure(view, len(processes), options.seconds)).items():
            print(f"{name:24} {value}")
        await asyncio.sleep(options.stay)
    finally:
        await view.aclose()
        fake.kill()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--processes", type=int, default=500)
    parser.add_argument("--rate", type=float, default=50.0)
    parser.add_argument("--seconds", type=float, default=30.0)
    parser.add_argument("--stay", type=float, default=0.0)
    parser.add_argument("--port", type=int, default=0)
    resource.setrlimit(resource.RLIMIT_NOFILE, (8192, 8192))
    asyncio.run(main(parser.parse_args()))
