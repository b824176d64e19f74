"""KV between two processes on one GPU: mapped memory (shm), NIXL and TCP, beside each other.

The caches have the shape of a Llama with 8 billion parameters: 64 planes, and blocks of 16 tokens with 32 KiB in each
plane. One process produces; the other fetches the blocks of prompts, which lie together or scattered. Prints a table,
and writes what it measured with `--output`.
"""

import argparse
import asyncio
import json
import multiprocessing
import random
import socket
import statistics
import time
from collections.abc import Coroutine, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch

from baton.engine_kit.cuda.driver import find_driver
from baton.engine_kit.cuda.regions import Region
from baton.errors import PeerLost
from baton.ports.transfer import BlockMemory, KvShape, TransportClient, TransportServer
from baton.protocol.handoff import Ticket
from baton.transfer import nixl
from baton.transfer.device_copy import DeviceCopier, Staging
from baton.transfer.shm import ShmClient, ShmServer
from baton.transfer.tcp import TcpClient, TcpServer
from baton.transfer.wire import PREAMBLE_BYTES

PLANES, BLOCK_BYTES, BLOCK_TOKENS = 64, 32 << 10, 16
PROMPTS = (128, 1024, 8192)
BLOCKS = 2 * max(PROMPTS) // BLOCK_TOKENS
SHAPE = KvShape(model="bench", dtype="bfloat16", layers=32, kv_heads=8, head_dim=128, block_size=BLOCK_TOKENS)
TRANSPORTS = ("shm", "nixl on torch's memory", "nixl on a region", "tcp")
SECRET = b"0123456789abcdef"
LIMIT_S = 120.0
# A slow transport makes fewer rounds: no more begin after this.
SLOW_S = 4.0


class Cache:
    """A cache on the GPU: in a region, or in memory of torch."""

    def __init__(self, is_region: bool, value: int) -> None:
        driver = find_driver()
        if driver is None:
            raise SystemExit("there is no GPU")
        torch.cuda.init()  # type: ignore[no-untyped-call]
        nbytes = PLANES * BLOCKS * BLOCK_BYTES
        self.driver = driver
        self.region = Region(driver, 0, nbytes) if is_region else None
        self.tensor = torch.empty(0 if is_region else nbytes, dtype=torch.uint8, device="cuda")
        address = self.region.address if self.region is not None else self.tensor.data_ptr()
        self.view = torch.as_tensor(_Array(address, nbytes), device="cuda").view(PLANES, BLOCKS, BLOCK_BYTES)
        self.view.fill_(value)
        self.view[:, :, 0] = torch.arange(BLOCKS, device="cuda").to(torch.uint8)
        torch.cuda.synchronize()
        self.memory = BlockMemory(
            shape=SHAPE,
            address=address,
            planes=PLANES,
            plane_bytes=BLOCKS * BLOCK_BYTES,
            block_bytes=BLOCK_BYTES,
            blocks=BLOCKS,
            device="cuda:0",
        )


class _Array:
    def __init__(self, address: int, nbytes: int) -> None:
        self.__cuda_array_interface__ = {
            "shape": (nbytes,),
            "typestr": "|u1",
            "data": (address, False),
            "strides": None,
            "version": 2,
        }


def produce(parent: Connection, transport: str) -> None:
    """The main function of the producing process."""
    asyncio.run(_produce(parent, transport))


async def _produce(parent: Connection, transport: str) -> None:
    cache = Cache(transport != TRANSPORTS[1], 7)
    try:
        if transport == "tcp":
            await _serve_tcp(parent, cache)
        server: TransportServer = (
            ShmServer(cache.memory, _allow, region=cache.region)
            if transport == "shm"
            else nixl.NixlServer(cache.memory)
        )
        parent.send((cache.memory, await server.open(), 0))
    except PeerLost as error:
        parent.send(error.message)
    await asyncio.Event().wait()


async def _serve_tcp(parent: Connection, cache: Cache) -> None:
    server = TcpServer(cache.memory, _allow, staging=Staging(cache.memory, cache.driver))
    listener = socket.create_server(("127.0.0.1", 0))
    listener.setblocking(False)
    parent.send((cache.memory, await server.open(), listener.getsockname()[1]))
    loop = asyncio.get_running_loop()
    async with asyncio.TaskGroup() as tasks:
        while True:
            connection, _ = await loop.sock_accept(listener)
            connection.setblocking(False)
            await loop.sock_recv(connection, PREAMBLE_BYTES)
            tasks.create_task(server.serve(connection, lambda: None))


def _allow(room: int, secret: bytes, blocks: Sequence[int]) -> None:
    """Every room may be read."""


def _client(transport: str, cache: Cache) -> TransportClient:
    if transport == "shm":
        return ShmClient(cache.memory, copier=DeviceCopier(cache.memory, cache.driver))
    if transport == "tcp":
        return TcpClient(cache.memory, staging=Staging(cache.memory, cache.driver))
    return nixl.NixlClient(cache.memory)


async def measure(parent: Connection, transport: str, rounds: int) -> list[dict[str, Any]]:
    """Fetch prompts of each length; return seconds and rates. Raises PeerLost."""
    started = parent.recv()
    if isinstance(started, str):
        raise PeerLost(started)
    memory, details, port = started
    cache = Cache(transport != TRANSPORTS[1], 1)
    client = _client(transport, cache)
    ticket = Ticket(host="127.0.0.1", port=port, room=1, secret=SECRET)
    began = time.perf_counter()
    channel = await client.connect(ticket, memory, details)
    connected_s = time.perf_counter() - began
    rows: list[dict[str, Any]] = []
    for tokens in PROMPTS:
        for layout in ("together", "scattered"):
            count = tokens // BLOCK_TOKENS
            theirs, mine = _numbers(count, layout, 1), _numbers(count, layout, 2)
            times: list[float] = []
            while len(times) < 3 or (len(times) <= rounds and sum(times) < SLOW_S):
                began = time.perf_counter()
                await channel.fetch(ticket, theirs, mine)
                times.append(time.perf_counter() - began)
            _check(cache, theirs, mine)
            nbytes = count * PLANES * BLOCK_BYTES
            middle = statistics.median(times[1:])
            rows.append(
                {
                    "transport": transport,
                    "tokens": tokens,
                    "layout": layout,
                    "bytes": nbytes,
                    "rounds": len(times) - 1,
                    "first_ms": times[0] * 1e3,
                    "median_ms": middle * 1e3,
                    "gb_per_s": nbytes / middle / 1e9,
                    "connect_ms": connected_s * 1e3,
                }
            )
    channel.close()
    await client.close()
    return rows


def _numbers(count: int, layout: str, seed: int) -> list[int]:
    if layout == "together":
        return list(range(seed, seed + count))
    return random.Random(seed).sample(range(BLOCKS), count)


def _check(cache: Cache, theirs: list[int], mine: list[int]) -> None:
    found = cache.view[:, mine]
    assert bool((found[:, :, 1:] == 7).all()), "the bytes are the producer's"
    wanted = torch.tensor(theirs, device="cuda").to(torch.uint8)
    assert bool((found[:, :, 0] == wanted).all()), "each block is where it belongs"


def run(transport: str, rounds: int) -> list[dict[str, Any]]:
    """Measure one transport between two new processes."""
    ours, its = multiprocessing.get_context("spawn").Pipe()
    process = multiprocessing.get_context("spawn").Process(target=produce, args=(its, transport), daemon=True)
    process.start()
    try:
        return asyncio.run(_within_limit(measure(ours, transport, rounds)))
    except (PeerLost, TimeoutError) as error:
        return [{"transport": transport, "problem": str(error) or f"not within {LIMIT_S:g} s"}]
    finally:
        process.kill()
        process.join()


async def _within_limit(measuring: Coroutine[Any, Any, list[dict[str, Any]]]) -> list[dict[str, Any]]:
    async with asyncio.timeout(LIMIT_S):
        return await measuring


def _line(row: dict[str, Any]) -> str:
    if "problem" in row:
        return f"| {row['transport']} | {row['problem']} |"
    return (
        f"| {row['transport']} | {row['tokens']} | {row['layout']} | {row['connect_ms']:.0f} |"
        f" {row['first_ms']:.2f} | {row['median_ms']:.2f} | {row['gb_per_s']:.1f} |"
    )


def main() -> None:
    """Measure, print and write."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--transports", default=",".join(TRANSPORTS))
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    print(torch.cuda.get_device_name())
    print("| transport | prompt | blocks | connect ms | first ms | median ms | GB/s |\n|---|---|---|---|---|---|---|")
    rows: list[dict[str, Any]] = []
    for transport in options.transports.split(","):
        for row in run(transport, options.rounds):
            rows.append(row)
            print(_line(row), flush=True)
    if options.output is not None:
        text = json.dumps({"device": torch.cuda.get_device_name(), "rounds": options.rounds, "rows": rows}, indent=1)
        options.output.write_text(text + "\n")


if __name__ == "__main__":
    main()
