"""The transport within one host: the producer's cache is memory that the consumer maps and copies from.

It is a memory file, or memory of a GPU that the driver exports as a descriptor; both workers use the same GPU then, or
ones that reach each other's memory. The descriptor, of a file for reading only, is passed over an abstract Unix socket,
to a process of the same user that knows a room's secret. Every local process can connect to such a socket: those of
other users are disconnected at once. The connection of a consumer stays open: when the producer dies it ends, and the
consumer unmaps the memory.

    consumer                        producer
    MapRequest ────────────────────►            one packet: room and secret
               ◄──────────────────── MapAnswer  one packet with the descriptor, or the problem
"""

import asyncio
import fcntl
import functools
import logging
import mmap
import os
import secrets
import socket
import struct
from collections.abc import Callable, Coroutine, Sequence
from concurrent.futures import ThreadPoolExecutor

import msgspec
import numpy as np
from numpy.typing import NDArray

from baton.engine_kit.cuda.driver import CudaError
from baton.engine_kit.cuda.regions import Region
from baton.engine_kit.threads import post
from baton.errors import PeerLost
from baton.ports.transfer import BlockMemory, Channel, Check
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
    wait_for_thread,
)
from baton.transfer.device_copy import DeviceCopier
from baton.transfer.gpu_channel import GpuChannel
from baton.transfer.sockets import readable, shut_down

log = logging.getLogger(__name__)

SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW
PACKET_BYTES = 4096
BACKLOG = 128
CONNECT_RETRY_S = 0.01
ACCEPT_RETRY_S = 0.1
CLOSED = "the producer closed the connection: it serves processes of the same user only, and kv.max_connections of them"
# A round trip to a thread takes as long as copying this much.
INLINE_BYTES = 1 << 20


class MapRequest(msgspec.Struct, frozen=True, array_like=True):
    """The sender has the ticket of this room and wants to map the cache."""

    room: Room
    secret: bytes


class MapAnswer(msgspec.Struct, frozen=True, array_like=True):
    """The size of the cache whose descriptor comes with this packet, or the problem."""

    size: int = 0
    problem: str = ""


class ShmDetails(msgspec.Struct, frozen=True):
    """What a consumer needs to connect."""

    socket: str


class ShmServer:
    """Passes the file that `memory` maps to consumers, or the GPU's `region` that it is in. Event-loop thread only."""

    name = "shm"

    def __init__(
        self,
        memory: BlockMemory,
        check: Check,
        max_connections: int = 1024,
        request_timeout_s: float = 3.0,
        region: Region | None = None,
    ) -> None:
        self._memory = memory
        self._region = region
        self._ignore_drops: Callable[[], None] = lambda: None
        self._check = check
        self._max_connections = max_connections
        self._request_timeout_s = request_timeout_s
        self._listener: socket.socket | None = None
        self.connections = 0  # that are served now
        self._mapping: set[socket.socket] = set()  # connections of consumers that have the descriptor
        self._tasks: set[asyncio.Task[None]] = set()

    async def open(self) -> dict[str, object]:
        """Start listening if need be; return the socket's name. Raises PeerLost if the cache cannot be mapped."""
        if self._listener is None:
            self._require_mappable()
            self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_NONBLOCK)
            self._listener.bind(f"\0baton-kv-{secrets.token_hex(16)}")
            self._listener.listen(BACKLOG)
            self._start(self._accept(self._listener))
        return {"socket": self._listener.getsockname()[1:].decode()}

    async def close(self) -> None:
        """Stop listening and close every connection."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        if self._listener is not None:
            self._listener.close()
            self._listener = None
        self._ignore_drops()

    def _require_mappable(self) -> None:
        """Raise PeerLost unless the cache is a sealed file or a GPU's region."""
        if self._region is not None:
            require_sound(self._memory, self._region.nbytes)
            loop = asyncio.get_running_loop()
            self._ignore_drops = self._region.on_drop(lambda: post(loop, self._disconnect))
            return
        require_host(self._memory, self.name)
        if self._memory.descriptor is None:
            raise PeerLost("this KV cache is not a file that other processes can map")
        require_sound(self._memory, sealed_size(self._memory.descriptor))

    def _disconnect(self) -> None:
        """Make consumers unmap memory that has been released: it exists until they do."""
        for connection in self._mapping:
            shut_down(connection)

    def _start(self, work: Coroutine[None, None, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _accept(self, listener: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        while True:
            try:
                connection, _ = await loop.sock_accept(listener)
            except OSError as error:  # usually too many open files, which passes
                log.warning("cannot accept a consumer: %s", error)
                await asyncio.sleep(ACCEPT_RETRY_S)
                continue
            if self._may_serve(connection):
                connection.setblocking(False)
                self.connections += 1
                self._start(self._serve(connection))
            else:
                connection.close()

    def _may_serve(self, connection: socket.socket) -> bool:
        if (uid := peer_uid(connection)) != os.geteuid():
            log.debug("a process of user %d tried to map the KV cache; only those of the same user may", uid)
            return False
        if self.connections >= self._max_connections:
            log.warning("a consumer was refused: %d are connected (kv.max_connections)", self.connections)
            return False
        return True

    async def _serve(self, connection: socket.socket) -> None:
        """Answer one consumer; unless it is refused, hold the connection until it disconnects."""
        loop = asyncio.get_running_loop()
        with connection:
            try:
                async with asyncio.timeout(self._request_timeout_s):
                    packet = await loop.sock_recv(connection, PACKET_BYTES)
                if self._answer(connection, packet):
                    self._mapping.add(connection)
                    await loop.sock_recv(connection, 1)
            except (OSError, TimeoutError) as error:
                log.debug("a consumer disconnected: %r", error)
            finally:
                self._mapping.discard(connection)
                self.connections -= 1

    def _answer(self, connection: socket.socket, packet: bytes) -> bool:
        """Pass the descriptor, or the reason for a refusal; return whether it was passed."""
        try:
            request = msgspec.msgpack.decode(packet, type=MapRequest)
            self._check(request.room, request.secret, ())
            descriptor = self._new_descriptor()
        except (msgspec.MsgspecError, PeerLost, CudaError) as error:
            connection.send(msgspec.msgpack.encode(MapAnswer(problem=str(error)[:1000])))
            return False
        try:
            answer = msgspec.msgpack.encode(MapAnswer(size=self._memory.nbytes))
            socket.send_fds(connection, [answer], [descriptor])
        finally:
            os.close(descriptor)
        return True

    def _new_descriptor(self) -> int:
        """Return a descriptor for a consumer. Raises CudaError if the memory has been released."""
        if self._region is not None:
            return self._region.export()
        return os.open(f"/proc/self/fd/{self._memory.descriptor}", os.O_RDONLY | os.O_CLOEXEC)


class ShmClient:
    """Maps the caches of other processes on this host and copies from them into `mine`. Event-loop thread only.

    For `mine` in GPU memory, `copier` copies.
    """

    name = "shm"

    def __init__(
        self,
        mine: BlockMemory,
        connect_timeout_s: float = 3.0,
        threads: int = 2,
        copier: DeviceCopier | None = None,
    ) -> None:
        self._mine = mine
        self._connect_timeout_s = connect_timeout_s
        self._copier = copier
        self._pool = ThreadPoolExecutor(threads if copier is None else 1, thread_name_prefix="baton-kv-shm")

    async def connect(self, ticket: Ticket, memory: BlockMemory, details: dict[str, object]) -> Channel:
        """Map the producer's cache. Raises PeerLost, immediately if the producer is on another host."""
        for side in (self._mine, memory) if self._copier is None else ():
            require_host(side, self.name)
        require_alike(self._mine, memory)
        try:
            name = msgspec.convert(details, ShmDetails).socket
        except msgspec.MsgspecError as error:
            raise PeerLost(f"the producer sent invalid transport details: {error}") from None
        if self._copier is not None:
            return await self._map_gpu(self._copier, ticket, memory, name)
        await asyncio.wrap_future(self._pool.submit(load_copier))
        connection, descriptor = await self._request(name, ticket)
        try:
            mapping = _map_file(descriptor, memory)
        except BaseException:
            connection.close()
            raise
        return ShmChannel(self._pool, self._mine, memory, mapping, connection)

    async def _map_gpu(self, copier: DeviceCopier, ticket: Ticket, memory: BlockMemory, name: str) -> Channel:
        if memory.device == "cpu":
            raise PeerLost("shm does not move KV from the memory of a host to that of a GPU")
        require_sound(memory, memory.nbytes)
        channel = GpuChannel(functools.partial(self._request, name), self._pool, copier, self._mine, memory)
        await channel.connect(ticket)
        return channel

    async def _request(self, name: str, ticket: Ticket) -> tuple[socket.socket, int]:
        """Return a connection to the producer, and the descriptor of its memory. Raises PeerLost."""
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_NONBLOCK)
        try:
            async with asyncio.timeout(self._connect_timeout_s):
                await _connect(connection, name)
                connection.send(msgspec.msgpack.encode(MapRequest(room=ticket.room, secret=ticket.secret)))
                await readable(connection.fileno(), None)
            return connection, _receive_descriptor(connection)
        except BaseException as error:
            connection.close()
            match error:
                case TimeoutError():
                    raise PeerLost(f"the producer has not answered within {self._connect_timeout_s:g} s") from None
                case ConnectionError():
                    raise PeerLost(CLOSED) from None
                case OSError():
                    raise PeerLost(f"the producer's KV cache cannot be mapped: {error}") from None
            raise

    async def close(self) -> None:
        """Stop the threads."""
        if self._copier is not None:
            self._pool.submit(self._copier.close)
        self._pool.shutdown()


class ShmChannel:
    """One producer's cache, mapped for reading. It is unmapped when no reference is left, that of a copy included."""

    def __init__(
        self,
        pool: ThreadPoolExecutor,
        mine: BlockMemory,
        theirs: BlockMemory,
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
        """Copy, in a thread unless it is small. Cancelled, it returns when the copy has stopped."""
        if self._mapping is None:
            raise PeerLost("the producer has closed its KV cache")
        source, target = block_pairs(self._theirs, theirs, self._mine, mine)
        stop = Stop()
        if len(target) * self._mine.planes * self._mine.block_bytes <= INLINE_BYTES:
            copy_blocks(self._mine, self._theirs, source, target, stop)
            return
        self._stops.add(stop)
        try:
            # No local variable refers to the mapping: an exception that is kept must not keep the memory mapped.
            copying = self._pool.submit(_copy, self._mapping, self._mine, self._theirs, source, target, stop)
            is_complete = await wait_for_thread(copying, stop)
        finally:
            self._stops.discard(stop)
        if not is_complete:
            raise PeerLost("the producer was lost while its KV was copied")

    def close(self) -> None:
        """Unmap the producer's cache, once a copy that is running has stopped."""
        if self._mapping is None:
            return
        self._mapping = None
        for stop in self._stops:
            stop.set()
        self._loop.remove_reader(self._connection.fileno())
        self._connection.close()


def _copy(
    mapping: object, mine: BlockMemory, theirs: BlockMemory, source: Numbers, target: Numbers, stop: Stop
) -> bool:
    """Copy while referring to the mapping that contains `theirs`."""
    return copy_blocks(mine, theirs, source, target, stop)


def sealed_size(descriptor: int) -> int:
    """Return the size of the file. Raises PeerLost unless it is sealed: reading a file that shrinks is a bus error."""
    try:
        seals = fcntl.fcntl(descriptor, fcntl.F_GET_SEALS)
        size = os.fstat(descriptor).st_size
    except OSError as error:
        raise PeerLost(f"the KV cache is not a memory file: {error}") from None
    if seals & SEALS != SEALS:
        raise PeerLost("the file of the KV cache is not sealed: it could shrink while it is read")
    return size


def peer_uid(connection: socket.socket) -> int:
    """Return the user id of the other process."""
    credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    uid: int = struct.unpack("3i", credentials)[1]
    return uid


async def _connect(connection: socket.socket, name: str) -> None:
    while True:
        try:
            connection.connect(f"\0{name}")
            return
        except BlockingIOError:  # its backlog is full
            await asyncio.sleep(CONNECT_RETRY_S)
        except (OSError, ValueError) as error:
            raise PeerLost(f"the producer's KV cache is not on this host: {error}") from None


def _receive_descriptor(connection: socket.socket) -> int:
    """Receive the producer's answer; return the passed descriptor. Raises PeerLost."""
    packet, descriptors, _, _ = socket.recv_fds(connection, PACKET_BYTES, 1)
    try:
        if not packet:
            raise PeerLost(CLOSED)
        answer = msgspec.msgpack.decode(packet, type=MapAnswer)
        if answer.problem or not descriptors:
            raise PeerLost(answer.problem or "the producer passed no descriptor")
        return descriptors.pop()
    except msgspec.MsgspecError:
        raise PeerLost("the producer sent an invalid answer") from None
    finally:
        for descriptor in descriptors:
            os.close(descriptor)


def _map_file(descriptor: int, memory: BlockMemory) -> NDArray[np.uint8]:
    """Map the file for reading; the descriptor is closed. Raises PeerLost."""
    try:
        require_sound(memory, sealed_size(descriptor))
        return np.frombuffer(mmap.mmap(descriptor, memory.nbytes, prot=mmap.PROT_READ), np.uint8)
    except OSError as error:
        raise PeerLost(f"the producer's KV cache cannot be mapped: {error}") from None
    finally:
        os.close(descriptor)
