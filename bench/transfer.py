"""Measures how fast KV moves between two processes of this host by each transport, next to memcpy of as many bytes.

The ways take turns within each repeat, so that a noisy moment harms them alike. Blocks are shaped like SmolLM2-135M's:
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

from baton.ports.transfer import Channel, KvMemory, KvShape, TransportClient, TransportServer
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
WITHIN = "within a process"
SHM_COLD = "shm, first touch"
START_S = 60.0
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
    """Cores kept busy meanwhile by anything but the two processes: how quiet the machine was."""
    cells: list[TransferCell]


class Pool:
    """A cache in a sealed memory file, every page touched."""

    def __init__(self, block_bytes: int, blocks: int, fill: int) -> None:
        plane_bytes = block_bytes * blocks
        self.descriptor = os.memfd_create("baton-bench-kv", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        os.ftruncate(self.descriptor, PLANES * plane_bytes)
        fcntl.fcntl(self.descriptor, fcntl.F_ADD_SEALS, SEALS)
        self.bytes: NDArray[np.uint8] = np.frombuffer(mmap.mmap(self.descriptor, PLANES * plane_bytes), np.uint8)
        for plane in range(PLANES):
            numbers = np.arange(plane_bytes // 4, dtype=np.uint32) * np.uint32(fill + plane)
            self.bytes[plane * plane_bytes : (plane + 1) * plane_bytes] = numbers.view(np.uint8)
        self.memory = KvMemory(
            shape=SHAPE,
            address=self.bytes.ctypes.data,
            planes=PLANES,
            plane_bytes=plane_bytes,
            block_bytes=block_bytes,
            blocks=blocks,
            descriptor=self.descriptor,
        )

    def blocks(self, numbers: Sequence[int]) -> NDArray[np.uint8]:
        """These blocks, plane by plane."""
        return self.bytes.reshape(PLANES, self.memory.blocks, self.memory.block_bytes)[:, list(numbers)]


class Told(msgspec.Struct, frozen=True):
    """What the lender's process says about one of its caches."""

    memory: KvMemory
    port: int
    details: dict[str, dict[str, object]]


def caches() -> list[tuple[int, int]]:
    """Bytes of a block part, and blocks: room for the largest list of each, twice."""
    largest = {part: max(count for size, count in SIZES if size == part) for part, _ in SIZES}
    return [(part, max(64, 2 * count)) for part, count in largest.items()]


def offer(told: Connection, transports: Sequence[str]) -> None:
    """The program of the lender's process."""
    uvloop.run(lend_all(told, transports))


async def lend_all(told: Connection, transports: Sequence[str]) -> None:
    pools = [Pool(block_bytes, blocks, fill=7) for block_bytes, blocks in caches()]
    async with asyncio.TaskGroup() as tasks:
        answers = []
        for pool in pools:
            data = TcpServer(pool.memory, lambda *_: None)
            listener = socket.create_server(("127.0.0.1", 0))
            listener.setblocking(False)
            tasks.create_task(accept(listener, data, tasks))
            details = {transport: await source_of(transport, pool.memory, data).open() for transport in transports}
            answers.append(Told(pool.memory, listener.getsockname()[1], details))
        told.send_bytes(msgspec.msgpack.encode(answers))
        await asyncio.Event().wait()


HELD: list[TransportServer] = []


def source_of(transport: str, memory: KvMemory, data: TcpServer) -> TransportServer:
    made: dict[str, Callable[[], TransportServer]] = {
        "shm": lambda: ShmServer(memory, lambda *_: None),
        "nixl": lambda: nixl.NixlServer(memory),
        "tcp": lambda: data,
    }
    HELD.append(made[transport]())
    return HELD[-1]


async def accept(listener: socket.socket, data: TcpServer, tasks: asyncio.TaskGroup) -> None:
    loop = asyncio.get_running_loop()
    while True:
        connection, _ = await loop.sock_accept(listener)
        connection.setblocking(False)
        await loop.sock_recv(connection, PREAMBLE_BYTES)
        tasks.create_task(data.serve(connection))


@contextmanager
def producer(transports: Sequence[str]) -> Iterator[list[Told]]:
    """The other process; it is gone afterwards."""
    spawn = multiprocessing.get_context("spawn")
    ours, its = spawn.Pipe()
    process = spawn.Process(target=offer, args=(its, list(transports)), daemon=True)
    process.start()
    its.close()
    try:
        if not ours.poll(START_S):
            raise RuntimeError(f"the lender was not ready within {START_S:g} s")
        yield msgspec.msgpack.decode(ours.recv_bytes(), type=list[Told])
    finally:
        process.kill()
        process.join()
        ours.close()


def reach_of(transport: str, memory: KvMemory) -> TransportClient:
    made: dict[str, Callable[[], TransportClient]] = {
        "shm": lambda: ShmClient(memory),
        "nixl": lambda: nixl.NixlClient(memory),
        "tcp": lambda: TcpClient(memory),
    }
    return made[transport]()


class Bench:
    """The borrower's side for one cache of the lender."""

    def __init__(self, told: Told, transports: Sequence[str]) -> None:
        self.told = told
        self.ticket = msgspec.structs.replace(TICKET, port=told.port)
        self.mine = Pool(told.memory.block_bytes, told.memory.blocks, fill=1)
        self.theirs = Pool(told.memory.block_bytes, told.memory.blocks, fill=7)
        self.reaches = {transport: reach_of(transport, self.mine.memory) for transport in transports}
        self.paths: dict[str, Channel] = {}

    async def __aenter__(self) -> "Bench":
        for transport in self.reaches:
            self.paths[transport] = await self.connect(transport)
        return self

    async def __aexit__(self, *_: object) -> None:
        for transport, connect in self.reaches.items():
            if transport in self.paths:
                self.paths[transport].close()
            await connect.close()

    async def connect(self, transport: str) -> Channel:
        return await self.reaches[transport].connect(self.ticket, self.told.memory, self.told.details[transport])

    async def measure(self, count: int, pattern: str, repeats: int) -> list[TransferCell]:
        """Every transport in turn: once to warm up, with a look at the bytes, then `repeats` times."""
        nbytes = count * PLANES * self.told.memory.block_bytes
        theirs, places = block_lists(self.told.memory.blocks, count, pattern)
        seconds: dict[str, list[float]] = {}
        for transport, path in self.paths.items():
            self.mine.bytes[:] = 0
            await path.fetch(self.ticket, theirs, places)
            if not np.array_equal(self.mine.blocks(places), self.theirs.blocks(theirs)):
                raise RuntimeError(f"{transport} moved wrong bytes")
        for _ in range(1 + repeats):
            seconds.setdefault(MEMCPY, []).append(await timed(self.memcpy(nbytes)))
            seconds.setdefault(WITHIN, []).append(await timed(self.within(theirs, places)))
            for transport, path in self.paths.items():
                spent = await timed(path.fetch(self.ticket, theirs, places))
                seconds.setdefault(transport, []).append(spent)
            if "shm" in self.paths:
                path = await self.connect("shm")
                seconds.setdefault(SHM_COLD, []).append(await timed(path.fetch(self.ticket, theirs, places)))
                path.close()
        return [
            TransferCell(transport=transport, pattern=pattern, nbytes=nbytes, seconds=spent[1:])
            for transport, spent in seconds.items()
        ]

    async def within(self, theirs: Sequence[int], places: Sequence[int]) -> None:
        """The same blocks, out of a cache of this process: what the pattern alone costs."""
        pairs = block_pairs(self.theirs.memory, theirs, self.mine.memory, places)
        copy_blocks(self.mine.memory, self.theirs.memory, *pairs, Stop())

    async def memcpy(self, nbytes: int) -> None:
        ctypes.memmove(self.mine.memory.address, self.theirs.memory.address, nbytes)


async def timed(work: Awaitable[None]) -> float:
    began = time.perf_counter()
    await work
    return time.perf_counter() - began


def block_lists(blocks: int, count: int, pattern: str) -> tuple[list[int], list[int]]:
    """Which blocks of the lender go where: runs as long as they can be, or no two neighbours together."""
    if pattern == "contiguous":
        return list(range(1, 1 + count)), list(range(blocks - count, blocks))
    order = [np.random.default_rng(seed).permutation(blocks)[:count].tolist() for seed in (1, 2)]
    return order[0], order[1]


async def run(told: list[Told], transports: Sequence[str], repeats: int, largest: int) -> list[TransferCell]:
    cells: list[TransferCell] = []
    for each in told:
        async with Bench(each, transports) as bench:
            for block_bytes, count in SIZES:
                if block_bytes != each.memory.block_bytes or block_bytes * count * PLANES > largest:
                    continue
                for pattern in PATTERNS if count > 1 else PATTERNS[:1]:
                    cells += await bench.measure(count, pattern, repeats)
    return cells


def transports_here() -> list[str]:
    """The ways that can be measured on this machine."""
    return [transport for transport in ("shm", "tcp", "nixl") if transport != "nixl" or nixl.available()]


def measure(transports: Sequence[str], repeats: int, largest: int = sys.maxsize) -> TransferResults:
    """Run everything and return the cells."""
    began, busy = time.monotonic(), busy_core_s()
    with producer(transports) as told:
        cells = uvloop.run(run(told, transports, repeats, largest))
    # What the two processes used is known for ours only; the rest of the busy time is an upper bound.
    foreign_s = busy_core_s() - busy - time.process_time()
    return TransferResults(
        commit=git_commit(),
        machine=describe_machine(),
        foreign_cores=max(0.0, foreign_s / (time.monotonic() - began)),
        cells=cells,
    )


def to_table(results: TransferResults) -> str:
    """Median GB/s with the least and the most, and the median over memcpy's of the same size."""
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
    parser.add_argument("--ways", default="shm,tcp,nixl", help="of shm, tcp and nixl")
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--largest-mib", type=int, default=256)
    parser.add_argument("--output", type=File)
    options = parser.parse_args(sys.argv[1:] if arguments is None else arguments)
    # Leaving by exception stops the lender.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    transports = [transport for transport in options.transports.split(",") if transport in transports_here()]
    results = measure(transports, options.repeats, options.largest_mib << 20)
    print(to_table(results))
    print(
        f"\n{results.machine.cores} cores of {results.machine.cpu}, {results.foreign_cores:.2f} busy elsewhere at most"
    )
    if options.output:
        options.output.write_bytes(msgspec.json.encode(results))
    return 0


if __name__ == "__main__":
    sys.exit(main())
