"""KV caches with known content, and producers that are real processes."""

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
from baton.ports.transfer import BlockMemory, KvShape
from baton.protocol.handoff import Ticket
from baton.transfer.nixl import NixlServer
from baton.transfer.shm import SEALS, ShmServer
from baton.transfer.tcp import TcpServer
from baton.transfer.wire import PREAMBLE_BYTES

SHAPE = KvShape(model="tiny", dtype="bfloat16", layers=2, kv_heads=2, head_dim=8, block_size=4)
ROOM, SECRET = 7, b"0123456789abcdef"
SPAWN = multiprocessing.get_context("spawn")
TIMEOUT_S = 30.0


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
        shape: KvShape = SHAPE,
    ) -> None:
        plane_bytes = blocks * block_bytes + spare_bytes
        self.descriptor = os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        os.ftruncate(self.descriptor, planes * plane_bytes)
        if sealed:
            fcntl.fcntl(self.descriptor, fcntl.F_ADD_SEALS, SEALS)
        self.bytes = np.frombuffer(mmap.mmap(self.descriptor, planes * plane_bytes), np.uint8)
        self.bytes[:] = content(seed, self.bytes.size)
        self.memory = BlockMemory(
            shape=shape,
            address=self.bytes.ctypes.data,
            planes=planes,
            plane_bytes=plane_bytes,
            block_bytes=block_bytes,
            blocks=blocks,
            descriptor=self.descriptor,
        )

    @property
    def blocks(self) -> NDArray[np.uint8]:
        """The bytes as planes, blocks and bytes of a block."""
        return parts(self.memory, self.bytes)

    def __del__(self) -> None:
        os.close(self.descriptor)


def content(seed: int, nbytes: int) -> NDArray[np.uint8]:
    """Pseudo-random bytes."""
    return np.frombuffer(np.random.default_rng(seed).bytes(nbytes), np.uint8)


def parts(memory: BlockMemory, data: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """The cache as planes, blocks and bytes."""
    planes = data.reshape(memory.planes, memory.plane_bytes)[:, : memory.blocks * memory.block_bytes]
    return planes.reshape(memory.planes, memory.blocks, memory.block_bytes)


def expected(
    mine: Cache, before: NDArray[np.uint8], theirs: BlockMemory, seed: int, pairs: Sequence[tuple[int, int]]
) -> NDArray[np.uint8]:
    """The expected bytes of `mine` after each (their block, my block) was copied."""
    after = before.copy()
    source, target = parts(theirs, content(seed, theirs.nbytes)), parts(mine.memory, after)
    for their_block, my_block in pairs:
        target[:, my_block] = source[:, their_block]
    return after


class ProducerSetup(msgspec.Struct, frozen=True):
    """How a producer is set up."""

    transport: str
    seed: int = 1
    planes: int = 4
    blocks: int = 32
    block_bytes: int = 512
    spare_bytes: int = 0
    offered: tuple[int, ...] | None = None  # None is every block
    checksum: bool = False
    stall_timeout_s: float = 5.0
    host: str = "127.0.0.1"
    env: dict[str, str] = {}
    use_uvloop: bool = False


class Producer:
    """A producer in another process."""

    def __init__(self, process: "multiprocessing.process.BaseProcess", memory: BlockMemory, details: dict[str, object]):
        self.process = process
        self.memory = memory
        self.details: dict[str, object] = dict(details)
        self.port = int(str(self.details.pop("port", 0)))
        self.host = str(self.details.pop("host", "127.0.0.1"))
        self.ticket = Ticket(host=self.host, port=self.port, room=ROOM, secret=SECRET)

    def signal(self, number: int) -> None:
        assert self.process.pid is not None
        os.kill(self.process.pid, number)


@contextmanager
def producer(setup: ProducerSetup) -> Iterator[Producer]:
    """Start a producer; it is killed afterwards."""
    ours, its = SPAWN.Pipe()
    process = SPAWN.Process(target=run_producer, args=(its, setup), daemon=True)
    process.start()
    its.close()
    try:
        assert ours.poll(TIMEOUT_S), "the producer did not start"
        memory, details = ours.recv()
        yield Producer(process, memory, details)
    finally:
        process.kill()
        process.join(TIMEOUT_S)
        process.close()
        ours.close()


def run_producer(parent: Connection, setup: ProducerSetup) -> None:
    """The main function of a producer process."""
    os.environ.update(setup.env)
    main = _run_producer(parent, setup)
    if setup.use_uvloop:
        import uvloop

        uvloop.run(main)
    else:
        asyncio.run(main)


async def _run_producer(parent: Connection, setup: ProducerSetup) -> None:
    cache = Cache(setup.seed, setup.planes, setup.blocks, setup.block_bytes, setup.spare_bytes)
    check = only(setup.offered)
    if setup.transport == "shm":
        shm = ShmServer(cache.memory, check)
        parent.send((cache.memory, await shm.open()))
    elif setup.transport == "nixl":
        nixl = NixlServer(cache.memory)
        parent.send((cache.memory, await nixl.open()))
    else:
        tcp = TcpServer(cache.memory, check, setup.checksum, setup.stall_timeout_s)
        listener = listening(setup.host)
        parent.send((cache.memory, await tcp.open() | {"host": setup.host, "port": listener.getsockname()[1]}))
        await serve_all(tcp, listener)
    await asyncio.Event().wait()


def only(blocks: Sequence[int] | None) -> Callable[[int, bytes, Sequence[int]], None]:
    """A check that accepts one room, and these blocks of it."""

    def check(room: int, secret: bytes, wanted: Sequence[int]) -> None:
        if (room, secret) != (ROOM, SECRET):
            raise PeerLost("no such room, or a wrong secret")
        if blocks is not None and not set(wanted) <= set(blocks):
            raise PeerLost("not all of these blocks are offered")

    return check


def listening(host: str) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
    listener.bind((host, 0))
    listener.listen()
    return listener


async def serve_all(server: TcpServer, listener: socket.socket) -> None:
    """Pass every connection to `server`, as the room server does."""
    loop = asyncio.get_running_loop()
    async with asyncio.TaskGroup() as tasks:
        while True:
            connection, _ = await loop.sock_accept(listener)
            connection.setblocking(False)
            assert len(await loop.sock_recv(connection, PREAMBLE_BYTES)) == PREAMBLE_BYTES
            tasks.create_task(server.serve(connection, lambda: None))


class Proxy:
    """Forwards between a consumer and a producer; `intercept` may change what the producer sends.

    `intercept` gets the number of bytes forwarded before and the next bytes, and runs in a thread of the proxy.
    """

    def __init__(self, target: tuple[str, int], intercept: Callable[[int, bytes], bytes]) -> None:
        self._target = target
        self._intercept = intercept
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
            thread.join(TIMEOUT_S)

    def _run(self) -> None:
        with suppress(OSError):
            while True:
                consumer, _ = self._listener.accept()
                upstream = socket.create_connection(self._target)
                self._sockets += [consumer, upstream]
                for pump in (self._forward_requests, self._forward_answers):
                    self._threads.append(threading.Thread(target=pump, args=(consumer, upstream), daemon=True))
                    self._threads[-1].start()

    def _forward_requests(self, consumer: socket.socket, upstream: socket.socket) -> None:
        with suppress(OSError):
            while data := consumer.recv(65536):
                upstream.sendall(data)
            upstream.shutdown(socket.SHUT_WR)

    def _forward_answers(self, consumer: socket.socket, upstream: socket.socket) -> None:
        forwarded = 0
        with suppress(OSError):
            while data := upstream.recv(65536):
                consumer.sendall(self._intercept(forwarded, data))
                forwarded += len(data)
            consumer.shutdown(socket.SHUT_WR)


@contextmanager
def proxy(target: tuple[str, int], intercept: Callable[[int, bytes], bytes]) -> Iterator[Proxy]:
    between = Proxy(target, intercept)
    try:
        yield between
    finally:
        between.close()


def settled_holdings() -> tuple[int, int, int]:
    """Return the holdings after a garbage collection."""
    gc.collect()
    return holdings()


def holdings(name: str = "baton-test-kv") -> tuple[int, int, int]:
    """Return the number of descriptors, threads and mapped test caches of this process."""
    maps = Path("/proc/self/maps").read_text().count(f"/memfd:{name}")
    return len(os.listdir("/proc/self/fd")), threading.active_count(), maps
