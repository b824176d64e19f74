"""Moving bytes between memory and non-blocking sockets, without a copy in between. Knows nothing of their meaning.

The kernel reads and writes the memory directly, in bounded pieces, so that the event loop stays responsive.
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

PIECE_BYTES = 1 << 20
MAX_SPANS = 1024  # the kernel's limit for one call
KEEPALIVE = {"TCP_KEEPIDLE": 10, "TCP_KEEPINTVL": 5, "TCP_KEEPCNT": 3}
RETRY_ERRORS = (errno.EAGAIN, errno.EWOULDBLOCK, errno.EINTR)


class Checksum:
    """The CRC-32 of the bytes moved so far."""

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
    """The `msghdr` of `sendmsg` and `recvmsg`."""

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
    """Moves spans of memory through a socket, at most `PIECE_BYTES` in each iteration of the event loop."""

    def __init__(self, call: Call, connection: socket.socket, spans: Spans, checksum: Checksum | None) -> None:
        self._call = call
        self._descriptor = connection.fileno()
        self._parts: Numbers = np.stack(spans, axis=1)
        self._ends = np.cumsum(spans.lengths)
        self._total = spans.nbytes
        self._checksum = checksum
        self._moved = 0
        self._loop = asyncio.get_running_loop()
        self._moved_at = self._loop.time()
        self._done: asyncio.Future[None] = self._loop.create_future()
        self._timer: asyncio.TimerHandle | None = None

    async def run(self, stall_timeout_s: float) -> None:
        """Move everything. Raises PeerLost when the peer disconnects, or when no byte moves for `stall_timeout_s`."""
        self._move_piece()
        if self._done.done():
            return self._done.result()
        is_sending = self._call is _libc.sendmsg
        watch = self._loop.add_writer if is_sending else self._loop.add_reader
        unwatch = self._loop.remove_writer if is_sending else self._loop.remove_reader
        watch(self._descriptor, self._move_piece)
        self._check_stall(stall_timeout_s)
        try:
            return await self._done
        finally:
            unwatch(self._descriptor)
            if self._timer is not None:
                self._timer.cancel()

    def stop(self, error: PeerLost) -> None:
        """End with `error` unless everything has moved; after return no memory is read or written."""
        if not self._done.done():
            self._done.set_exception(error)
            self._done.exception()  # marks it as retrieved: `run` may have been cancelled

    def _check_stall(self, stall_timeout_s: float) -> None:
        """Fail if no byte has moved for too long, else check again at the earliest time when that can be."""
        left_s = self._moved_at + stall_timeout_s - self._loop.time()
        if left_s > 0:
            self._timer = self._loop.call_later(left_s, self._check_stall, stall_timeout_s)
        elif not self._done.done():
            self._done.set_exception(PeerLost(f"the other worker has not moved a byte for {stall_timeout_s:g} s"))

    def _move_piece(self) -> None:
        if self._done.done():
            return
        if self._moved < self._total:
            parts = self._next_parts()
            message = _Message(parts=parts.ctypes.data, part_count=len(parts))
            count = self._call(self._descriptor, byref(message), socket.MSG_NOSIGNAL | socket.MSG_DONTWAIT)
            if count <= 0:
                self._handle_error(count, ctypes.get_errno())
                return
            if self._checksum is not None:
                self._checksum.add(parts, count)
            self._moved += count
            self._moved_at = self._loop.time()
        if self._moved == self._total:
            self._done.set_result(None)

    def _next_parts(self) -> Numbers:
        """Return the next parts to move, as rows of address and length."""
        limit = self._moved + PIECE_BYTES
        first = int(np.searchsorted(self._ends, self._moved, side="right"))
        last = min(int(np.searchsorted(self._ends, limit)) + 1, first + MAX_SPANS)
        parts: Numbers = self._parts[first:last].copy()
        gone = self._moved - int(self._ends[first] - self._parts[first, 1])
        parts[0] += (gone, -gone)
        parts[-1, 1] -= max(0, int(parts[:, 1].sum()) - PIECE_BYTES)
        return parts

    def _handle_error(self, count: int, number: int) -> None:
        if count == 0:
            self._done.set_exception(PeerLost("the other worker closed the connection"))
        elif number not in RETRY_ERRORS:
            self._done.set_exception(PeerLost(f"the connection to the other worker failed: {os.strerror(number)}"))


def sending(connection: socket.socket, spans: Spans, checksum: Checksum | None = None) -> Pump:
    """Return a pump that sends the bytes at `spans`, which must stay valid until it ends or is stopped."""
    return Pump(_libc.sendmsg, connection, spans, checksum)


async def receive_spans(
    connection: socket.socket, spans: Spans, stall_timeout_s: float, checksum: Checksum | None = None
) -> None:
    """Receive into `spans`; nothing is written there after this has ended. Raises PeerLost."""
    await Pump(_libc.recvmsg, connection, spans, checksum).run(stall_timeout_s)


async def send_bytes(connection: socket.socket, data: bytes, stall_timeout_s: float) -> None:
    array = np.frombuffer(data, np.uint8)
    await sending(connection, array_span(array)).run(stall_timeout_s)


async def receive_bytes(connection: socket.socket, size: int, stall_timeout_s: float) -> bytes:
    data = await receive_some(connection, size, stall_timeout_s)
    while len(data) < size:
        data += await receive_some(connection, size - len(data), stall_timeout_s)
    return data


async def receive_some(connection: socket.socket, max_bytes: int, stall_timeout_s: float | None) -> bytes:
    """Return the bytes that are available: at least one, waiting at most `stall_timeout_s`. Raises PeerLost."""
    while True:
        try:
            data = connection.recv(max_bytes)
        except (BlockingIOError, InterruptedError):
            await readable(connection.fileno(), stall_timeout_s)
            continue
        except OSError as error:
            raise PeerLost(f"the connection to the other worker failed: {error.strerror}") from None
        if not data:
            raise PeerLost("the other worker closed the connection")
        return data


async def readable(descriptor: int, stall_timeout_s: float | None) -> None:
    """Wait until the socket has data or is closed, at most `stall_timeout_s`. Raises PeerLost."""
    loop = asyncio.get_running_loop()
    ready: asyncio.Future[bool] = loop.create_future()

    def resolve(is_readable: bool) -> None:
        if not ready.done():
            ready.set_result(is_readable)

    timer = None if stall_timeout_s is None else loop.call_later(stall_timeout_s, resolve, False)
    loop.add_reader(descriptor, resolve, True)
    try:
        if not await ready:
            raise PeerLost(f"the other worker has not moved a byte for {stall_timeout_s:g} s")
    finally:
        loop.remove_reader(descriptor)
        if timer is not None:
            timer.cancel()


def join_spans(first: Spans, then: Spans) -> Spans:
    return Spans(np.concatenate((first[0], then[0])), np.concatenate((first[1], then[1])))


def array_span(array: NDArray[np.uint8]) -> Spans:
    return Spans(np.array([array.ctypes.data]), np.array([array.size]))


async def connect(host: str, port: int, limit_s: float) -> socket.socket:
    """Return a connection to the first address of `host` that accepts one. Raises PeerLost."""
    loop = asyncio.get_running_loop()
    problem: Exception | None = None
    try:
        async with asyncio.timeout(limit_s):
            for family, kind, protocol, _, address in await _resolve(host, port):
                connection = socket.socket(family, kind | socket.SOCK_NONBLOCK, protocol)
                try:
                    await loop.sock_connect(connection, address)
                    configure(connection)
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
    raise PeerLost(f"cannot connect to the producer at {host}:{port}: {problem}") from None


async def _resolve(host: str, port: int) -> Sequence[AddressInfo]:
    """Return the addresses of `host`; a name is looked up in a thread. Raises OSError."""
    try:
        return socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_NUMERICHOST)
    except socket.gaierror:
        return await asyncio.get_running_loop().getaddrinfo(host, port, type=socket.SOCK_STREAM)


def configure(connection: socket.socket) -> None:
    """Send small packets at once, and detect a host that disappears without closing the connection."""
    if connection.family not in (socket.AF_INET, socket.AF_INET6):
        return
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in KEEPALIVE.items():
        connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)


def shut_down(connection: socket.socket) -> None:
    try:
        connection.shutdown(socket.SHUT_RDWR)
    except OSError as error:
        log.debug("the connection had ended already: %s", error)
