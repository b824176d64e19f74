"""The way within one host: the lender's cache is a file in memory that the borrower maps and copies out of.

The file is passed, for reading only, over a Unix socket without a path, to who knows a room's secret and runs as the
same user. The connection stays: when the lender dies it ends, and the borrower lets go of the memory.

    borrower                      lender
    Knock  ──────────────────────►         one packet: room and secret
           ◄────────────────────── Answer  one packet with the descriptor; or why not
"""

import asyncio
import fcntl
import logging
import mmap
import os
import secrets
import socket
import struct
from collections.abc import Coroutine, Sequence
from concurrent.futures import ThreadPoolExecutor

import msgspec
import numpy as np
from numpy.typing import NDArray

from baton.errors import PeerLost
from baton.ports.transfer import Channel, Check, KvMemory
from baton.protocol.handoff import Room, Ticket
from baton.transfer.block_copy import (
    Numbers,
    Stop,
    block_pairs,
    copy_blocks,
    load_copier,
    require_alike,
    require_host,
    require_sound,
)
from baton.transfer.sockets import readable

log = logging.getLogger(__name__)

SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW
PACKET_BYTES = 4096
BACKLOG = 128
RETRY_S = 0.01
ACCEPT_AGAIN_S = 0.1
# To go to a thread and back takes as long as to copy this much.
AT_ONCE_BYTES = 1 << 20


class Knock(msgspec.Struct, frozen=True, array_like=True):
    """I have the ticket of this room."""

    room: Room
    secret: bytes


class Answer(msgspec.Struct, frozen=True, array_like=True):
    """Here it is, with so many bytes; or not at all, and why."""

    size: int = 0
    problem: str = ""


class ShmDetails(msgspec.Struct, frozen=True):
    """What a borrower needs to know."""

    socket: str


class ShmServer:
    """Hands out the file that `memory` is a mapping of. Event-loop thread only."""

    name = "shm"

    def __init__(self, memory: KvMemory, check: Check, knock_s: float = 3.0) -> None:
        self._memory = memory
        self._check = check
        self._knock_s = knock_s
        self._listener: socket.socket | None = None
        self._tasks: set[asyncio.Task[None]] = set()

    async def open(self) -> dict[str, object]:
        """Return the name of the socket, listening from now on. Raises PeerLost if the cache is no such file."""
        if self._listener is None:
            require_host(self._memory, self.name)
            if self._memory.descriptor is None:
                raise PeerLost("this KV cache is not a file that others can map")
            require_sound(self._memory, sealed_size(self._memory.descriptor))
            self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_NONBLOCK)
            self._listener.bind(f"\0baton-kv-{secrets.token_hex(16)}")
            self._listener.listen(BACKLOG)
            self._start(self._accept(self._listener))
        return {"socket": self._listener.getsockname()[1:].decode()}

    async def close(self) -> None:
        """Listen no more, and let borrowers know."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        if self._listener is not None:
            self._listener.close()
            self._listener = None

    def _start(self, work: Coroutine[None, None, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _accept(self, listener: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        while True:
            try:
                connection, _ = await loop.sock_accept(listener)
            except OSError as error:  # for example too many open files: that passes
                log.warning("cannot accept a borrower: %s", error)
                await asyncio.sleep(ACCEPT_AGAIN_S)
                continue
            connection.setblocking(False)
            self._start(self._serve(connection))

    async def _serve(self, connection: socket.socket) -> None:
        """Answer one borrower, then hold the connection until it leaves."""
        loop = asyncio.get_running_loop()
        with connection:
            try:
                async with asyncio.timeout(self._knock_s):
                    packet = await loop.sock_recv(connection, PACKET_BYTES)
                self._answer(connection, packet)
                await loop.sock_recv(connection, 1)
            except (OSError, TimeoutError) as error:
                log.debug("a borrower left: %r", error)

    def _answer(self, connection: socket.socket, packet: bytes) -> None:
        try:
            knock = msgspec.msgpack.decode(packet, type=Knock)
            if peer_uid(connection) != os.geteuid():
                raise PeerLost("only processes of the same user may map this KV cache")
            self._check(knock.room, knock.secret, ())
        except (msgspec.MsgspecError, PeerLost) as error:
            connection.send(msgspec.msgpack.encode(Answer(problem=str(error)[:1000])))
            connection.shutdown(socket.SHUT_WR)
            return
        descriptor = os.open(f"/proc/self/fd/{self._memory.descriptor}", os.O_RDONLY | os.O_CLOEXEC)
        try:
            answer = msgspec.msgpack.encode(Answer(size=self._memory.nbytes))
            socket.send_fds(connection, [answer], [descriptor])
        finally:
            os.close(descriptor)


class ShmClient:
    """Maps the caches of other processes of this host, and copies out of them into `mine`. Event-loop thread only."""

    name = "shm"

    def __init__(self, mine: KvMemory, connect_timeout_s: float = 3.0, threads: int = 2) -> None:
        self._mine = mine
        self._connect_s = connect_timeout_s
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix="baton-kv-shm")

    async def connect(self, ticket: Ticket, memory: KvMemory, details: dict[str, object]) -> Channel:
        """Map the lender's cache. Raises PeerLost, at once where the lender is on another host."""
        for side in (self._mine, memory):
            require_host(side, self.name)
        require_alike(self._mine, memory)
        try:
            name = msgspec.convert(details, ShmDetails).socket
        except msgspec.MsgspecError as error:
            raise PeerLost(f"the lender does not say where its KV cache is: {error}") from None
        await asyncio.wrap_future(self._pool.submit(load_copier))
        try:
            return await self._reach(ticket, memory, name)
        except TimeoutError:
            raise PeerLost(f"the lender has not answered within {self._connect_s:g} s") from None
        except OSError as error:
            raise PeerLost(f"the lender's KV cache cannot be mapped: {error}") from None

    async def _reach(self, ticket: Ticket, memory: KvMemory, name: str) -> Channel:
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_NONBLOCK)
        try:
            async with asyncio.timeout(self._connect_s):
                await _connect(connection, name)
                connection.send(msgspec.msgpack.encode(Knock(room=ticket.room, secret=ticket.secret)))
                await readable(connection.fileno(), None)
            return ShmChannel(self._pool, self._mine, memory, _mapped(connection, memory), connection)
        except BaseException:
            connection.close()
            raise

    async def close(self) -> None:
        """End the threads."""
        self._pool.shutdown()


class ShmChannel:
    """One lender's cache, mapped for reading. The mapping ends when nothing refers to it any more, a copy included."""

    def __init__(
        self,
        pool: ThreadPoolExecutor,
        mine: KvMemory,
        theirs: KvMemory,
        mapping: NDArray[np.uint8],
        connection: socket.socket,
    ) -> None:
        self._pool = pool
        self._mine = mine
        self._theirs = msgspec.structs.replace(theirs, address=mapping.ctypes.data, descriptor=None)
        self._mapping: NDArray[np.uint8] | None = mapping
        self._connection = connection
        self._stops: set[Stop] = set()
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(connection.fileno(), self.close)

    async def fetch(self, ticket: Ticket, theirs: Sequence[int], mine: Sequence[int]) -> None:
        """Copy, in a thread unless it is little. Cancelled, it returns when the copy has stopped."""
        if self._mapping is None:
            raise PeerLost("the lender is gone")
        source, target = block_pairs(self._theirs, theirs, self._mine, mine)
        stop = Stop()
        if len(target) * self._mine.planes * self._mine.block_bytes <= AT_ONCE_BYTES:
            copy_blocks(self._mine, self._theirs, source, target, stop)
            return
        self._stops.add(stop)
        try:
            whole = await self._copy_in_thread(source, target, stop)
        finally:
            self._stops.discard(stop)
        if not whole:
            raise PeerLost("the lender went away while its KV was copied")

    def close(self) -> None:
        """Let go of the lender's cache; a copy that is on its way stops, and then the memory is free."""
        if self._mapping is None:
            return
        self._mapping = None
        for stop in self._stops:
            stop.set()
        self._loop.remove_reader(self._connection.fileno())
        self._connection.close()

    async def _copy_in_thread(self, source: Numbers, target: Numbers, stop: Stop) -> bool:
        # The thread alone refers to the mapping: an error that somebody keeps must not keep the memory too.
        future = asyncio.wrap_future(
            self._pool.submit(_copy, self._mapping, self._mine, self._theirs, source, target, stop)
        )
        try:
            return await asyncio.shield(future)
        except asyncio.CancelledError:
            stop.set()
            while not future.done():
                try:
                    await asyncio.wait([future])
                except asyncio.CancelledError:
                    continue  # the copy still writes; the first cancellation is raised below
            raise


def _copy(mapping: object, mine: KvMemory, theirs: KvMemory, source: Numbers, target: Numbers, stop: Stop) -> bool:
    """Copy while holding on to the mapping that `theirs` lies in."""
    return copy_blocks(mine, theirs, source, target, stop)


def sealed_size(descriptor: int) -> int:
    """Return the size of the file. Raises PeerLost unless it is sure to keep it, since less would be a bus error."""
    try:
        seals = fcntl.fcntl(descriptor, fcntl.F_GET_SEALS)
        size = os.fstat(descriptor).st_size
    except OSError as error:
        raise PeerLost(f"the KV cache is no memory file: {error}") from None
    if seals & SEALS != SEALS:
        raise PeerLost("the file of the KV cache is not sealed: it could shrink while it is read")
    return size


def peer_uid(connection: socket.socket) -> int:
    """Return the user that the other side runs as."""
    credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    uid: int = struct.unpack("3i", credentials)[1]
    return uid


async def _connect(connection: socket.socket, name: str) -> None:
    while True:
        try:
            connection.connect(f"\0{name}")
            return
        except BlockingIOError:  # its backlog is full
            await asyncio.sleep(RETRY_S)
        except (OSError, ValueError) as error:
            raise PeerLost(f"the lender's KV cache is not on this host: {error}") from None


def _mapped(connection: socket.socket, memory: KvMemory) -> NDArray[np.uint8]:
    """Take the lender's answer and map what it passed. Raises PeerLost."""
    packet, descriptors, _, _ = socket.recv_fds(connection, PACKET_BYTES, 1)
    try:
        answer = msgspec.msgpack.decode(packet, type=Answer)
        if answer.problem or not descriptors:
            raise PeerLost(answer.problem or "the lender passed no KV cache")
        require_sound(memory, sealed_size(descriptors[0]))
        return np.frombuffer(mmap.mmap(descriptors[0], memory.nbytes, prot=mmap.PROT_READ), np.uint8)
    except msgspec.MsgspecError:
        raise PeerLost("the lender went away, or said something else than an answer") from None
    finally:
        for descriptor in descriptors:
            os.close(descriptor)
