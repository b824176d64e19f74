"""KV caches with content that is known on both sides, and lenders that are real processes."""

import asyncio
import fcntl
import gc
import mmap
import multiprocessing
import os
import socket
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from multiprocessing.connection import Connection
from pathlib import Path

import msgspec
import numpy as np
from numpy.typing import NDArray

from baton.errors import PeerLost
from baton.ports.transfer import KvMemory, KvShape
from baton.protocol.handoff import Ticket
from baton.transfer.nixl import NixlServer
from baton.transfer.shm import SEALS, ShmServer
from baton.transfer.tcp import TcpServer
from baton.transfer.wire import PREAMBLE_BYTES

SHAPE = KvShape(model="tiny", dtype="bfloat16", layers=2, kv_heads=2, head_dim=8, block_size=4)
ROOM, SECRET = 7, b"0123456789abcdef"
SPAWN = multiprocessing.get_context("spawn")
PATIENCE_S = 30.0


class Cache:
    """A cache in a memory file. Its bytes follow from its seed."""

    def __init__(
        self,
        seed: int,
        planes: int = 4,
        blocks: int = 32,
        block_bytes: int = 512,
        spare_bytes: int = 0,
        sealed: bool = True,
        name: str = "baton-test-kv",
    ) -> None:
        plane_bytes = blocks * block_bytes + spare_bytes
        self.descriptor = os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        os.ftruncate(self.descriptor, planes * plane_bytes)
        if sealed:
            fcntl.fcntl(self.descriptor, fcntl.F_ADD_SEALS, SEALS)
        self.bytes = np.frombuffer(mmap.mmap(self.descriptor, planes * plane_bytes), np.uint8)
        self.bytes[:] = content(seed, self.bytes.size)
        self.memory = KvMemory(
            shape=SHAPE,
            address=self.bytes.ctypes.data,
            planes=planes,
            plane_bytes=plane_bytes,
            block_bytes=block_bytes,
            blocks=blocks,
            descriptor=self.descriptor,
        )

    def __del__(self) -> None:
        os.close(self.descriptor)


def content(seed: int, nbytes: int) -> NDArray[np.uint8]:
    """Bytes of which no stretch is like another."""
    return np.frombuffer(np.random.default_rng(seed).bytes(nbytes), np.uint8)


def parts(memory: KvMemory, data: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """The cache as planes, blocks and bytes."""
    planes = data.reshape(memory.planes, memory.plane_bytes)[:, : memory.blocks * memory.block_bytes]
    return planes.reshape(memory.planes, memory.blocks, memory.block_bytes)


def expected(
    mine: Cache, before: NDArray[np.uint8], theirs: KvMemory, seed: int, pairs: Sequence[tuple[int, int]]
) -> NDArray[np.uint8]:
    """What the whole of `mine` must be after each (their block, my block) was copied, worked out block by block."""
    after = before.copy()
    source, target = parts(theirs, content(seed, theirs.nbytes)), parts(mine.memory, after)
    for their_block, my_block in pairs:
        target[:, my_block] = source[:, their_block]
    return after


class Lent(msgspec.Struct, frozen=True):
    """How a lender is set up."""

    transport: str
    seed: int = 1
    planes: int = 4
    blocks: int = 32
    block_bytes: int = 512
    spare_bytes: int = 0
    lent: tuple[int, ...] | None = None  # None is every block
    checksum: bool = False
    stall_timeout_s: float = 5.0
    host: str = "127.0.0.1"
    env: dict[str, str] = {}
    use_uvloop: bool = False


class Producer:
    """A lender in a process of its own, seen from here."""

    def __init__(self, process: "multiprocessing.process.BaseProcess", memory: KvMemory, told: dict[str, object]):
        self.process = process
        self.memory = memory
        self.details: dict[str, object] = dict(told)
        self.port = int(str(self.details.pop("port", 0)))
        self.host = str(self.details.pop("host", "127.0.0.1"))
        self.ticket = Ticket(host=self.host, port=self.port, room=ROOM, secret=SECRET)

    def signal(self, number: int) -> None:
        assert self.process.pid is not None
        os.kill(self.process.pid, number)


@contextmanager
def producer(setup: Lent) -> Iterator[Producer]:
    """A lender that has been opened. It is gone afterwards."""
    ours, its = SPAWN.Pipe()
    process = SPAWN.Process(target=offer, args=(its, setup), daemon=True)
    process.start()
    its.close()
    try:
        assert ours.poll(PATIENCE_S), "the lender did not start"
        memory, told = ours.recv()
        yield Producer(process, memory, told)
    finally:
        process.kill()
        process.join(PATIENCE_S)
        process.close()
        ours.close()


def offer(told: Connection, setup: Lent) -> None:
    """The program of a lender's process."""
    os.environ.update(setup.env)
    main = _offer(told, setup)
    if setup.use_uvloop:
        import uvloop

        uvloop.run(main)
    else:
        asyncio.run(main)


async def _offer(told: Connection, setup: Lent) -> None:
    cache = Cache(setup.seed, setup.planes, setup.blocks, setup.block_bytes, setup.spare_bytes)
    check = only(setup.lent)
    if setup.transport == "shm":
        shared = ShmServer(cache.memory, check)
        told.send((cache.memory, await shared.open()))
    elif setup.transport == "nixl":
        registered = NixlServer(cache.memory)
        told.send((cache.memory, await registered.open()))
    else:
        source = TcpServer(cache.memory, check, setup.checksum, setup.stall_timeout_s)
        listener = listening(setup.host)
        told.send((cache.memory, await source.open() | {"host": setup.host, "port": listener.getsockname()[1]}))
        await serve_all(source, listener)
    await asyncio.Event().wait()


def only(blocks: Sequence[int] | None) -> Callable[[int, bytes, Sequence[int]], None]:
    """A check that knows one room."""

    def check(room: int, secret: bytes, wanted: Sequence[int]) -> None:
        if (room, secret) != (ROOM, SECRET):
            raise PeerLost("there is no such room, or its secret is another")
        if blocks is not None and not set(wanted) <= set(blocks):
            raise PeerLost("not all of these blocks are lent")

    return check


def listening(host: str) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
    listener.bind((host, 0))
    listener.listen()
    return listener


async def serve_all(source: TcpServer, listener: socket.socket) -> None:
    """Give the source every connection, as the listener of a worker does."""
    loop = asyncio.get_running_loop()
    async with asyncio.TaskGroup() as tasks:
        while True:
            connection, _ = await loop.sock_accept(listener)
            connection.setblocking(False)
            assert len(await loop.sock_recv(connection, PREAMBLE_BYTES)) == PREAMBLE_BYTES
            tasks.create_task(source.serve(connection))


class Proxy:
    """Stands between a borrower and a lender; calls `meddle` with what the lender sends, and sends on what it returns.

    `meddle` gets the number of bytes that went by before, and runs in a thread of the proxy's.
    """

    def __init__(self, target: tuple[str, int], meddle: Callable[[int, bytes], bytes]) -> None:
        self._target = target
        self._meddle = meddle
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._sockets: list[socket.socket] = [self._listener]
        self.port = int(self._listener.getsockname()[1])
        self._threads = [threading.Thread(target=self._run, daemon=True)]
        self._threads[0].start()

    def close(self) -> None:
        for each in self._sockets:
            with suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)
            each.close()
        for thread in self._threads:
            thread.join(PATIENCE_S)

    def _run(self) -> None:
        with suppress(OSError):
            while True:
                consumer, _ = self._listener.accept()
                lender_side = socket.create_connection(self._target)
                self._sockets += [consumer, lender_side]
                for pump in (self._there, self._back):
                    self._threads.append(threading.Thread(target=pump, args=(consumer, lender_side), daemon=True))
                    self._threads[-1].start()

    def _there(self, consumer: socket.socket, lender_side: socket.socket) -> None:
        with suppress(OSError):
            while data := consumer.recv(65536):
                lender_side.sendall(data)
            lender_side.shutdown(socket.SHUT_WR)

    def _back(self, consumer: socket.socket, lender_side: socket.socket) -> None:
        passed = 0
        with suppress(OSError):
            while data := lender_side.recv(65536):
                consumer.sendall(self._meddle(passed, data))
                passed += len(data)
            consumer.shutdown(socket.SHUT_WR)


@contextmanager
def proxy(target: tuple[str, int], meddle: Callable[[int, bytes], bytes]) -> Iterator[Proxy]:
    between = Proxy(target, meddle)
    try:
        yield between
    finally:
        between.close()


def settled_holdings() -> tuple[int, int, int]:
    """The same, when what earlier tests left for the garbage collector is gone."""
    gc.collect()
    return holdings()


def holdings(name: str = "baton-test-kv") -> tuple[int, int, int]:
    """How many descriptors, threads, and mappings of a test's caches this process has."""
    maps = Path("/proc/self/maps").read_text().count(f"/memfd:{name}")
    return len(os.listdir("/proc/self/fd")), threading.active_count(), maps
