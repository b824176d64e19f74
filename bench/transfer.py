"""Measures how fast KV moves between two processes of this host by each transport, next to memcpy of as many bytes.

The transports alternate within each repeat, so that noise affects them alike. Blocks are shaped like SmolLM2-135M's:
60 planes with 6,144 bytes of each block, and for the smallest size with 1,024.
"""

import argparse
import asyncio
import ctypes
import fcntl
import mmap
import multiprocessing
import os
import signal
import socket
import sys
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager
from multiprocessing.connection import Connection
from pathlib import Path as File
from statistics import median

import msgspec
import numpy as np
import uvloop
from numpy.typing import NDArray

from baton.ports.transfer import BlockMemory, Channel, KvShape, TransportClient, TransportServer
from baton.protocol.handoff import Ticket
from baton.transfer import nixl
from baton.transfer.block_copy import Stop, block_pairs, copy_blocks
from baton.transfer.shm import SEALS, ShmClient, ShmServer
from baton.transfer.tcp import TcpClient, TcpServer
from baton.transfer.wire import PREAMBLE_BYTES
from bench.path import busy_core_s
from bench.report import number, table
from bench.result_files import Machine, describe_machine, git_commit

PLANES = 60
SHAPE = KvShape(model="bench", dtype="bfloat16", layers=30, kv_heads=3, head_dim=64, block_size=16)
# Bytes of a block in one plane, and how many blocks: 60 KiB, 360 KiB, 1, 4, 16, 64 and 256 MiB.
SIZES = ((1024, 1), (6144, 1), (6144, 3), (6144, 12), (6144, 46), (6144, 182), (6144, 728))
PATTERNS = ("contiguous", "fragmented")
MEMCPY = "memcpy"
SAME_PROCESS = "within a process"
SHM_COLD = "shm, first touch"
START_TIMEOUT_S = 60.0
TICKET = Ticket(host="127.0.0.1", port=0, room=1, secret=b"bench")


class TransferCell(msgspec.Struct, frozen=True, kw_only=True):
    """One transport, size and pattern: the seconds of each repeat."""

    transport: str
    pattern: str
    nbytes: int
    seconds: list[float]

    @property
    def gb_per_s(self) -> list[float]:
        return [self.nbytes / each / 1e9 for each in self.seconds]


class TransferResults(msgspec.Struct, frozen=True, kw_only=True):
    commit: str
    machine: Machine
    foreign_cores: float
    """Cores kept busy by other processes during the run: an upper bound of the noise."""
    cells: list[TransferCell]


class Pool:
    """A KV cache in a sealed memory file, every page touched."""

    def __init__(self, block_bytes: int, blocks: int, fill: int) -> None:
        plane_bytes = block_bytes * blocks
        self.descriptor = os.memfd_create("baton-bench-kv", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        os.ftruncate(self.descriptor, PLANES * plane_bytes)
        fcntl.fcntl(self.descriptor, fcntl.F_ADD_SEALS, SEALS)
        self.bytes: NDArray[np.uint8] = np.frombuffer(mmap.mmap(self.descriptor, PLANES * plane_bytes), np.uint8)
        for plane in range(PLANES):
            numbers = np.arange(plane_bytes // 4, dtype=np.uint32) * np.uint32(fill + plane)
            self.bytes[plane * plane_bytes : (plane + 1) * plane_bytes] = numbers.view(np.uint8)
        self.memory = BlockMemory(
            shape=SHAPE,
            address=self.bytes.ctypes.data,
            planes=PLANES,
            plane_bytes=plane_bytes,
            block_bytes=block_bytes,
            blocks=blocks,
            descriptor=self.descriptor,
        )

    def blocks(self, numbers: Sequence[int]) -> NDArray[np.uint8]:
        """Return these blocks, plane by plane."""
        return self.bytes.reshape(PLANES, self.memory.blocks, self.memory.block_bytes)[:, list(numbers)]


class OfferedCache(msgspec.Struct, frozen=True):
    """One cache of the producer process, and how to connect to it."""

    memory: BlockMemory
    port: int
    details: dict[str, dict[str, object]]


def caches() -> list[tuple[int, int]]:
    """Return bytes of a block part, and blocks: twice the largest count of each."""
    largest = {part: max(count for size, count in SIZES if size == part) for part, _ in SIZES}
    return [(part, max(64, 2 * count)) for part, count in largest.items()]


def run_producer(parent: Connection, transports: Sequence[str]) -> None:
    """The main function of the producer process."""
    uvloop.run(offer_all(parent, transports))


async def offer_all(parent: Connection, transports: Sequence[str]) -> None:
    pools = [Pool(block_bytes, blocks, fill=7) for block_bytes, blocks in caches()]
    async with asyncio.TaskGroup() as tasks:
        offered = []
        for pool in pools:
            data = TcpServer(pool.memory, lambda *_: None)
            listener = socket.create_server(("127.0.0.1", 0))
            listener.setblocking(False)
            tasks.create_task(accept(listener, data, tasks))
            details = {transport: await build_server(transport, pool.memory, data).open() for transport in transports}
            offered.append(OfferedCache(pool.memory, listener.getsockname()[1], details))
        parent.send_bytes(msgspec.msgpack.encode(offered))
        await asyncio.Event().wait()


SERVERS: list[TransportServer] = []  # kept alive


def build_server(transport: str, memory: BlockMemory, data: TcpServer) -> TransportServer:
    builders: dict[str, Callable[[], TransportServer]] = {
        "shm": lambda: ShmServer(memory, lambda *_: None),
        "nixl": lambda: nixl.NixlServer(memory),
        "tcp": lambda: data,
    }
    SERVERS.append(builders[transport]())
    return SERVERS[-1]


async def accept(listener: socket.socket, data: TcpServer, tasks: asyncio.TaskGroup) -> None:
    loop = asyncio.get_running_loop()
    while True:
        connection, _ = await loop.sock_accept(listener)
        connection.setblocking(False)
        await loop.sock_recv(connection, PREAMBLE_BYTES)
        tasks.create_task(data.serve(connection, lambda: None))


@contextmanager
def producer(transports: Sequence[str]) -> Iterator[list[OfferedCache]]:
    """Start the producer process; it is killed afterwards."""
    spawn = multiprocessing.get_context("spawn")
    receiver, sender = spawn.Pipe()
    process = spawn.Process(target=run_producer, args=(sender, list(transports)), daemon=True)
    process.start()
    sender.close()
    try:
        if not receiver.poll(START_TIMEOUT_S):
            raise RuntimeError(f"the producer was not ready within {START_TIMEOUT_S:g} s")
        yield msgspec.msgpack.decode(receiver.recv_bytes(), type=list[OfferedCache])
    finally:
        process.kill()
        process.join()
        receiver.close()


def build_client(transport: str, memory: BlockMemory) -> TransportClient:
    builders: dict[str, Callable[[], TransportClient]] = {
        "shm": lambda: ShmClient(memory),
        "nixl": lambda: nixl.NixlClient(memory),
        "tcp": lambda: TcpClient(memory),
    }
    return builders[transport]()


class Bench:
    """The consumer's side for one cache of the producer."""

    def __init__(self, offered: OfferedCache, transports: Sequence[str]) -> None:
        self.offered = offered
        self.ticket = msgspec.structs.replace(TICKET, port=offered.port)
        self.mine = Pool(offered.memory.block_bytes, offered.memory.blocks, fill=1)
        self.theirs = Pool(offered.memory.block_bytes, offered.memory.blocks, fill=7)
        self.clients = {transport: build_client(transport, self.mine.memory) for transport in transports}
        self.channels: dict[str, Channel] = {}

    async def __aenter__(self) -> "Bench":
        for transport in self.clients:
            self.channels[transport] = await self.connect(transport)
        return self

    async def __aexit__(self, *_: object) -> None:
        for transport, client in self.clients.items():
            if transport in self.channels:
                self.channels[transport].close()
            await client.close()

    async def connect(self, transport: str) -> Channel:
        return await self.clients[transport].connect(self.ticket, self.offered.memory, self.offered.details[transport])

    async def measure(self, count: int, pattern: str, repeats: int) -> list[TransferCell]:
        """Measure every transport in turn: once as warm-up, with a check of the bytes, then `repeats` times."""
        nbytes = count * PLANES * self.offered.memory.block_bytes
        theirs, mine = block_lists(self.offered.memory.blocks, count, pattern)
        seconds: dict[str, list[float]] = {}
        for transport, channel in self.channels.items():
            self.mine.bytes[:] = 0
            await channel.fetch(self.ticket, theirs, mine)
            if not np.array_equal(self.mine.blocks(mine), self.theirs.blocks(theirs)):
                raise RuntimeError(f"{transport} moved wrong bytes")
        for _ in range(1 + repeats):
            seconds.setdefault(MEMCPY, []).append(await timed(self.memcpy(nbytes)))
            seconds.setdefault(SAME_PROCESS, []).append(await timed(self.copy_in_process(theirs, mine)))
            for transport, channel in self.channels.items():
                spent = await timed(channel.fetch(self.ticket, theirs, mine))
                seconds.setdefault(transport, []).append(spent)
            if "shm" in self.channels:
                channel = await self.connect("shm")
                seconds.setdefault(SHM_COLD, []).append(await timed(channel.fetch(self.ticket, theirs, mine)))
                channel.close()
        return [
            TransferCell(transport=transport, pattern=pattern, nbytes=nbytes, seconds=spent[1:])
            for transport, spent in seconds.items()
        ]

    async def copy_in_process(self, theirs: Sequence[int], mine: Sequence[int]) -> None:
        """Copy the same blocks from a cache of this process: the cost of the pattern alone."""
        pairs = block_pairs(self.theirs.memory, theirs, self.mine.memory, mine)
        copy_blocks(self.mine.memory, self.theirs.memory, *pairs, Stop())

    async def memcpy(self, nbytes: int) -> None:
        ctypes.memmove(self.mine.memory.address, self.theirs.memory.address, nbytes)


async def timed(work: Awaitable[None]) -> float:
    began = time.perf_counter()
    await work
    return time.perf_counter() - began


def block_lists(blocks: int, count: int, pattern: str) -> tuple[list[int], list[int]]:
    """Return the producer's blocks and their targets: one run, or scattered."""
    if pattern == "contiguous":
        return list(range(1, 1 + count)), list(range(blocks - count, blocks))
    permutations = [np.random.default_rng(seed).permutation(blocks)[:count].tolist() for seed in (1, 2)]
    return permutations[0], permutations[1]


async def run(
    caches: list[OfferedCache], transports: Sequence[str], repeats: int, max_bytes: int
) -> list[TransferCell]:
    cells: list[TransferCell] = []
    for each in caches:
        async with Bench(each, transports) as bench:
            for block_bytes, count in SIZES:
                if block_bytes != each.memory.block_bytes or block_bytes * count * PLANES > max_bytes:
                    continue
                for pattern in PATTERNS if count > 1 else PATTERNS[:1]:
                    cells += await bench.measure(count, pattern, repeats)
    return cells


def transports_here() -> list[str]:
    """Return the transports that can be measured on this machine."""
    return [transport for transport in ("shm", "tcp", "nixl") if transport != "nixl" or nixl.available()]


def measure(transports: Sequence[str], repeats: int, max_bytes: int = sys.maxsize) -> TransferResults:
    """Run everything and return the cells."""
    began, busy = time.monotonic(), busy_core_s()
    with producer(transports) as offered:
        cells = uvloop.run(run(offered, transports, repeats, max_bytes))
    # Only the CPU time of this process is known, so the rest of the busy time is an upper bound.
    foreign_s = busy_core_s() - busy - time.process_time()
    return TransferResults(
        commit=git_commit(),
        machine=describe_machine(),
        foreign_cores=max(0.0, foreign_s / (time.monotonic() - began)),
        cells=cells,
    )


def to_table(results: TransferResults) -> str:
    """Median GB/s with minimum and maximum, and the median relative to memcpy of the same size."""
    rows = []
    for cell in results.cells:
        same = (other for other in results.cells if (other.pattern, other.nbytes) == (cell.pattern, cell.nbytes))
        base = next(other for other in same if other.transport == MEMCPY)
        rates = cell.gb_per_s
        spread = f"{number(median(rates))} ({number(min(rates))}-{number(max(rates))})"
        ratio = median(base.seconds) / median(cell.seconds)
        micros = f"{median(cell.seconds) * 1e6:,.0f}"
        rows.append([f"{cell.nbytes / 1024:,.0f}", cell.pattern, cell.transport, spread, micros, f"{ratio:.2f}x"])
    return table(["KiB", "blocks", "transport", "GB/s", "us", "of memcpy"], rows)


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure and print a table; with --output write the results as JSON too."""
    parser = argparse.ArgumentParser(prog="python -m bench.transfer", description=__doc__)
    parser.add_argument("--transports", default="shm,tcp,nixl", help="comma-separated: shm, tcp, nixl")
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--largest-mib", type=int, default=256)
    parser.add_argument("--output", type=File)
    options = parser.parse_args(sys.argv[1:] if arguments is None else arguments)
    # Exit by exception, so that the producer is stopped.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    transports = [transport for transport in options.transports.split(",") if transport in transports_here()]
    results = measure(transports, options.repeats, options.largest_mib << 20)
    print(to_table(results))
    print(
        f"\n{results.machine.cores} cores of {results.machine.cpu}, at most {results.foreign_cores:.2f} busy otherwise"
    )
    if options.output:
        options.output.write_bytes(msgspec.json.encode(results))
    return 0


if __name__ == "__main__":
    sys.exit(main())
