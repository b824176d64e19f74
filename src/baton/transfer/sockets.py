"""Moving bytes between memory and non-blocking sockets, without a copy in between. Knows nothing of what they mean.

The kernel reads and writes the memory itself, in turns of the event loop that are short enough for its other work.
"""

import asyncio
import ctypes
import errno
import logging
import os
import socket
import zlib
from collections.abc import Callable, Sequence
from ctypes import byref, c_int, c_size_t, c_uint32, c_void_p
from typing import Any

import numpy as np
from numpy.typing import NDArray

from baton.errors import PeerLost
from baton.transfer.block_copy import Numbers, Spans

log = logging.getLogger(__name__)

TURN_BYTES = 1 << 20
MOST_SPANS = 1024  # the kernel's limit for one call
KEEPALIVE = {"TCP_KEEPIDLE": 10, "TCP_KEEPINTVL": 5, "TCP_KEEPCNT": 3}
LATER = (errno.EAGAIN, errno.EWOULDBLOCK, errno.EINTR)


class Checksum:
    """The crc32 of what has moved so far."""

    def __init__(self, value: int = 0) -> None:
        self.value = value

    def add(self, parts: Numbers, nbytes: int) -> None:
        """Add the first `nbytes` bytes of `parts`, which are rows of address and length."""
        for address, length in parts.tolist():
            size = min(length, nbytes)
            self.value = zlib.crc32((ctypes.c_char * size).from_address(address), self.value)
            nbytes -= size
            if not nbytes:
                return


class _Message(ctypes.Structure):
    """What `sendmsg` and `recvmsg` take."""

    _fields_ = [
        ("name", c_void_p),
        ("name_bytes", c_uint32),
        ("parts", c_void_p),
        ("part_count", c_size_t),
        ("control", c_void_p),
        ("control_bytes", c_size_t),
        ("flags", c_int),
    ]


_libc = ctypes.CDLL(None, use_errno=True)
for _function in (_libc.sendmsg, _libc.recvmsg):
    _function.argtypes = [c_int, c_void_p, c_int]
    _function.restype = ctypes.c_ssize_t

Call = Callable[[int, object, int], int]
AddressInfo = tuple[socket.AddressFamily, socket.SocketKind, int, str, tuple[Any, ...]]


class Pump:
    """Moves stretches of memory through a socket, a bounded part in each turn of the event loop."""

    def __init__(self, call: Call, connection: socket.socket, stretches: Spans, checksum: Checksum | None) -> None:
        self._call = call
        self._descriptor = connection.fileno()
        self._parts: Numbers = np.stack(stretches, axis=1)
        self._ends = np.cumsum(stretches.lengths)
        self._total = stretches.nbytes
        self._checksum = checksum
        self._moved = 0
        self._loop = asyncio.get_running_loop()
        self._moved_at = self._loop.time()
        self._done: asyncio.Future[None] = self._loop.create_future()
        self._timer: asyncio.TimerHandle | None = None

    async def run(self, stall_timeout_s: float) -> None:
        """Move everything. Raises PeerLost when the peer leaves, or when no byte moves for `stall_timeout_s`."""
        self._turn()
        if self._done.done():
            return self._done.result()
        is_sending = self._call is _libc.sendmsg
        watch = self._loop.add_writer if is_sending else self._loop.add_reader
        unwatch = self._loop.remove_writer if is_sending else self._loop.remove_reader
        watch(self._descriptor, self._turn)
        self._look(stall_timeout_s)
        try:
            return await self._done
        finally:
            unwatch(self._descriptor)
            if self._timer is not None:
                self._timer.cancel()

    def _look(self, stall_timeout_s: float) -> None:
        """Give up if nothing has moved for too long, else look again when that could be."""
        left_s = self._moved_at + stall_timeout_s - self._loop.time()
        if left_s > 0:
            self._timer = self._loop.call_later(left_s, self._look, stall_timeout_s)
        elif not self._done.done():
            self._done.set_exception(PeerLost(f"the other side has not moved a byte for {stall_timeout_s:g} s"))

    def _turn(self) -> None:
        if self._done.done():
            return
        if self._moved < self._total:
            parts = self._next()
            message = _Message(parts=parts.ctypes.data, part_count=len(parts))
            count = self._call(self._descriptor, byref(message), socket.MSG_NOSIGNAL | socket.MSG_DONTWAIT)
            if count <= 0:
                self._stuck(count, ctypes.get_errno())
                return
            if self._checksum is not None:
                self._checksum.add(parts, count)
            self._moved += count
            self._moved_at = self._loop.time()
        if self._moved == self._total:
            self._done.set_result(None)

    def _next(self) -> Numbers:
        """The parts that follow what has moved, as rows of address and length, for one turn."""
        limit = self._moved + TURN_BYTES
        first = int(np.searchsorted(self._ends, self._moved, side="right"))
        last = min(int(np.searchsorted(self._ends, limit)) + 1, first + MOST_SPANS)
        parts: Numbers = self._parts[first:last].copy()
        gone = self._moved - int(self._ends[first] - self._parts[first, 1])
        parts[0] += (gone, -gone)
        parts[-1, 1] -= max(0, int(parts[:, 1].sum()) - TURN_BYTES)
        return parts

    def _stuck(self, count: int, number: int) -> None:
        if count == 0:
            self._done.set_exception(PeerLost("the other side has closed the connection"))
        elif number not in LATER:
            self._done.set_exception(PeerLost(f"the connection to the other side broke: {os.strerror(number)}"))


async def send_spans(
    connection: socket.socket, stretches: Spans, stall_timeout_s: float, checksum: Checksum | None = None
) -> None:
    """Send what lies at `stretches`, which must stay there until this ends. Raises PeerLost."""
    await Pump(_libc.sendmsg, connection, stretches, checksum).run(stall_timeout_s)


async def receive_spans(
    connection: socket.socket, stretches: Spans, stall_timeout_s: float, checksum: Checksum | None = None
) -> None:
    """Receive into `stretches`; nothing is written there once this has ended. Raises PeerLost."""
    await Pump(_libc.recvmsg, connection, stretches, checksum).run(stall_timeout_s)


async def send_bytes(connection: socket.socket, data: bytes, stall_timeout_s: float) -> None:
    held = np.frombuffer(data, np.uint8)
    await send_spans(connection, whole(held), stall_timeout_s)


async def receive_bytes(connection: socket.socket, size: int, stall_timeout_s: float) -> bytes:
    data = await receive_some(connection, size, stall_timeout_s)
    while len(data) < size:
        data += await receive_some(connection, size - len(data), stall_timeout_s)
    return data


async def receive_some(connection: socket.socket, most: int, stall_timeout_s: float | None) -> bytes:
    """Return what there is: at least one byte, waiting for it at most `stall_timeout_s`. Raises PeerLost."""
    while True:
        try:
            data = connection.recv(most)
        except (BlockingIOError, InterruptedError):
            await readable(connection.fileno(), stall_timeout_s)
            continue
        except OSError as error:
            raise PeerLost(f"the connection to the other side broke: {error.strerror}") from None
        if not data:
            raise PeerLost("the other side has closed the connection")
        return data


async def readable(descriptor: int, stall_timeout_s: float | None) -> None:
    """Wait until there is something to read, or the end, at most `stall_timeout_s`. Raises PeerLost."""
    loop = asyncio.get_running_loop()
    ready: asyncio.Future[bool] = loop.create_future()

    def tell(is_readable: bool) -> None:
        if not ready.done():
            ready.set_result(is_readable)

    timer = None if stall_timeout_s is None else loop.call_later(stall_timeout_s, tell, False)
    loop.add_reader(descriptor, tell, True)
    try:
        if not await ready:
            raise PeerLost(f"the other side has not moved a byte for {stall_timeout_s:g} s")
    finally:
        loop.remove_reader(descriptor)
        if timer is not None:
            timer.cancel()


def joined(first: Spans, then: Spans) -> Spans:
    return Spans(np.concatenate((first[0], then[0])), np.concatenate((first[1], then[1])))


def whole(held: NDArray[np.uint8]) -> Spans:
    return Spans(np.array([held.ctypes.data]), np.array([held.size]))


async def connected(host: str, port: int, limit_s: float) -> socket.socket:
    """Return a connection to the first address of `host` that answers. Raises PeerLost."""
    loop = asyncio.get_running_loop()
    problem: Exception | None = None
    try:
        async with asyncio.timeout(limit_s):
            for family, kind, protocol, _, address in await _resolved(host, port):
                connection = socket.socket(family, kind | socket.SOCK_NONBLOCK, protocol)
                try:
                    await loop.sock_connect(connection, address)
                    prepare(connection)
                    return connection
                except OSError as error:
                    connection.close()
                    problem = error
                except BaseException:
                    connection.close()
                    raise
    except TimeoutError:
        problem = TimeoutError(f"no answer within {limit_s:g} s")
    except OSError as error:
        problem = error
    raise PeerLost(f"the lender at {host}:{port} cannot be reached: {problem}") from None


async def _resolved(host: str, port: int) -> Sequence[AddressInfo]:
    """Return the addresses of `host`; a name is looked up in a thread of the event loop's. Raises OSError."""
    try:
        return socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_NUMERICHOST)
    except socket.gaierror:
        return await asyncio.get_running_loop().getaddrinfo(host, port, type=socket.SOCK_STREAM)


def prepare(connection: socket.socket) -> None:
    """No waiting for fuller packets; and a host that vanishes without a word is noticed."""
    if connection.family not in (socket.AF_INET, socket.AF_INET6):
        return
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in KEEPALIVE.items():
        connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)


def shut(connection: socket.socket) -> None:
    try:
        connection.shutdown(socket.SHUT_RDWR)
    except OSError as error:
        log.debug("a connection had ended already: %s", error)
