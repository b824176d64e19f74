"""Connections to the frontend: kept alive and used again, each by one exchange at a time.

A response is parsed for its head and its end only. Its body goes to the receiver as it arrives; a receiver that cannot
take more pauses the connection.
"""

import asyncio
import fcntl
import logging
import socket
import struct
import termios
from collections.abc import Collection
from itertools import islice
from typing import Protocol, cast

import httptools

from baton.edge.messages import Headers
from baton.errors import BatonError, PeerLost

log = logging.getLogger(__name__)

IDLE_S = 10.0
"""Below the 30 s after which the frontend may close an idle connection, so that no request meets the close."""
CONNECT_TIMEOUT_S = 5.0
ADMITTED_AT_ONCE = 256
"""How many connections the guard admits in one turn of the event loop, before the first of them can be settled."""
LARGE_BODY = 64 * 1024
"""The frontend may refuse a body above this without reading all of it, and closes the connection then."""
RECEIVE_BYTES = 64 * 1024
SEGMENT_BYTES = 8 * 1024
"""Bound what the kernel holds of an answer that is not read, and so how much of it a worker computes for nobody. The
frontend's end of the connection grows its buffer with the segments on their way, and loopback makes those large."""


class Receiver(Protocol):
    """What an exchange does with the answer of the frontend. Called in the event loop; never after the end."""

    def on_head(self, status: int, headers: Headers) -> None:
        """The head of the answer has arrived. Header names are in lower case."""

    def on_data(self, data: bytes) -> None:
        """Some of the body has arrived."""

    def flush(self) -> None:
        """Nothing more has arrived for now."""

    def on_end(self) -> None:
        """The answer is complete."""

    def on_lost(self, error: BatonError) -> None:
        """The connection has failed, before or within the answer."""


class Guard(Protocol):
    """Decides which connections the frontend's port accepts."""

    def admit(self, source_ports: Collection[int]) -> None:
        """Accept connections from `source_ports`, which this process has bound. Raises OSError if it cannot.

        It costs as much for many ports as for one.
        """

    def settle(self, source_port: int) -> None:
        """The connection is established or has ended."""


class UpstreamConnection(asyncio.Protocol):
    """One connection to the frontend."""

    __slots__ = (
        "_complete",
        "_has_head",
        "_has_large_body",
        "_headers",
        "_keep_alive",
        "_parser",
        "_pieces",
        "_pool",
        "_receiver",
        "_streams",
        "_transport",
        "idle_at",
        "source_port",
    )

    def __init__(self, pool: "UpstreamPool") -> None:
        self._pool = pool
        self._transport: asyncio.Transport | None = None
        self._parser = httptools.HttpResponseParser(self)
        self._receiver: Receiver | None = None
        self._headers: Headers = []
        self._pieces: list[bytes] = []
        self._has_large_body = False
        self._has_head = False
        self._streams = False
        """Whether the receiver has the head."""
        self._complete = False
        self._keep_alive = False
        self.idle_at = 0.0
        self.source_port = 0
        """Not 0 while the guard has to admit it."""

    def send(self, receiver: Receiver, head: bytes, body: bytes) -> None:
        """Send a request; `receiver` gets the answer."""
        assert self._transport is not None
        self._receiver = receiver
        self._has_large_body = len(body) > LARGE_BODY
        if body:
            self._transport.writelines((head, body))
        else:
            self._transport.write(head)

    def is_closing(self) -> bool:
        """Whether the connection is being closed, by either end."""
        return self._transport is None or self._transport.is_closing()

    def is_established(self) -> bool:
        """Whether the frontend's end has acknowledged a request, so that it exists."""
        if self._receiver is None or self._transport is None or self._transport.get_write_buffer_size():
            return False
        sock = self._transport.get_extra_info("socket")
        unsent = struct.unpack("i", fcntl.ioctl(sock.fileno(), termios.TIOCOUTQ, b"\0" * 4))[0]
        return bool(unsent == 0)

    def abort(self) -> None:
        """Close the connection at once, which cancels the request at the frontend. The receiver is not called again."""
        self._receiver = None
        if self._transport is not None:
            self._transport.abort()

    def pause(self) -> None:
        """Stop reading the answer."""
        if self._transport is not None and not self.is_closing():
            self._transport.pause_reading()

    def resume(self) -> None:
        """Read on."""
        if self._transport is not None and not self.is_closing():
            self._transport.resume_reading()

    # The transport's callbacks.

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's is no subclass

    def data_received(self, data: bytes) -> None:
        if self._receiver is None:
            self.abort()
            return
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError as error:
            self._fail(f"the frontend sent an invalid answer: {error}")
            return
        if self._streams and len(self._pieces) == 1 and not self._complete:
            self._receiver.on_data(self._pieces.pop())
            if self._receiver is not None:
                self._receiver.flush()
        else:
            self._deliver()

    def eof_received(self) -> None:
        """Let the transport close."""

    def connection_lost(self, exc: Exception | None) -> None:
        self._pool.forget(self)
        if self._receiver is not None:
            self._fail("the frontend closed the connection")
        del self._parser  # which refers to this object

    def _deliver(self) -> None:
        """Pass on what one read has brought. The receiver may abort this connection in each call."""
        if self.source_port:
            self._pool.settle(self)
        if self._has_head and not self._streams and self._receiver is not None:
            self._streams = True
            headers, self._headers = self._headers, []
            self._receiver.on_head(self._parser.get_status_code(), headers)
        if self._pieces:
            data = b"".join(self._pieces)
            self._pieces.clear()
            if self._receiver is not None:
                self._receiver.on_data(data)
        if self._complete and self._receiver is not None:
            receiver, self._receiver = self._receiver, None
            self._complete = self._has_head = self._streams = False
            self._pool.release(self, self._keep_alive)
            receiver.on_end()
        elif self._receiver is not None:
            self._receiver.flush()

    def _fail(self, message: str) -> None:
        receiver = self._receiver
        self.abort()
        if receiver is not None:
            receiver.on_lost(PeerLost(message))

    # The parser's callbacks.

    def on_header(self, name: bytes, value: bytes) -> None:
        if not self._has_head:  # not a trailer
            self._headers.append((name.lower(), value))

    def on_headers_complete(self) -> None:
        self._has_head = True

    def on_body(self, body: bytes) -> None:
        self._pieces.append(body)

    def on_message_complete(self) -> None:
        self._complete = True
        is_refused = self._has_large_body and self._parser.get_status_code() >= 400
        self._keep_alive = self._parser.should_keep_alive() and not is_refused


class UpstreamPool:
    """The connections to the frontend at one loopback port."""

    def __init__(self, host: str, port: int = 0, guard: Guard | None = None) -> None:
        self._host = host
        self.port = port
        """Set before the first request."""
        self._guard = guard
        self._idle: list[UpstreamConnection] = []
        self._all: set[UpstreamConnection] = set()
        self._to_admit: dict[UpstreamConnection, asyncio.Future[None]] = {}
        self._unsettled: set[UpstreamConnection] = set()
        self._connecting: set[asyncio.Task[None]] = set()

    @property
    def open(self) -> int:
        """The number of open connections."""
        return len(self._all) + len(self._connecting)

    def take(self) -> UpstreamConnection | None:
        """Return a connection that nobody uses, None if there is none."""
        while self._idle:
            if not (connection := self._idle.pop()).is_closing():
                return connection
        return None

    def connect(self, opened: "Opened") -> asyncio.Task[None]:
        """Open a connection and pass it to `opened`; cancel the task to give it up."""
        task = asyncio.get_running_loop().create_task(self._connect(opened))
        self._connecting.add(task)
        task.add_done_callback(self._connecting.discard)
        return task

    def release(self, connection: UpstreamConnection, reusable: bool) -> None:
        """Take a connection back after a complete answer."""
        if reusable:
            connection.idle_at = asyncio.get_running_loop().time()
            self._idle.append(connection)
        else:
            connection.abort()

    def settle(self, connection: UpstreamConnection) -> None:
        """The connection is established at the frontend too, or has ended."""
        self._unsettled.discard(connection)
        if self._guard is not None:
            self._guard.settle(connection.source_port)
        connection.source_port = 0

    async def _admit(self, connection: UpstreamConnection, guard: Guard) -> None:
        """Wait until the guard has admitted `connection`, with all others of this turn of the loop."""
        loop = asyncio.get_running_loop()
        if not self._to_admit:
            loop.call_soon(self._admit_waiting, guard)
        self._to_admit[connection] = loop.create_future()
        try:
            await self._to_admit[connection]
        finally:
            self._to_admit.pop(connection, None)

    def _admit_waiting(self, guard: Guard) -> None:
        self._settle_established()
        waiting = dict(islice(self._to_admit.items(), ADMITTED_AT_ONCE))
        for connection in waiting:
            del self._to_admit[connection]
        self._unsettled.update(waiting)
        refused: OSError | None = None
        try:
            guard.admit([each.source_port for each in waiting])
        except OSError as error:
            refused = error
        if self._to_admit:
            asyncio.get_running_loop().call_soon(self._admit_waiting, guard)
        for future in waiting.values():
            if future.done():  # cancelled
                continue
            if refused is None:
                future.set_result(None)
            else:
                future.set_exception(refused)

    def _settle_established(self) -> None:
        """Settle connections without an answer too: thousands of requests may wait for their first token."""
        for connection in [each for each in self._unsettled if each.is_established()]:
            self.settle(connection)

    def forget(self, connection: UpstreamConnection) -> None:
        """Remove a closed connection."""
        self.settle(connection)
        self._all.discard(connection)
        if connection in self._idle:
            self._idle.remove(connection)

    def close_idle(self, idle_s: float = IDLE_S) -> None:
        """Close connections that have not been used for `idle_s`. The oldest are in front."""
        before = asyncio.get_running_loop().time() - idle_s
        while self._idle and self._idle[0].idle_at <= before:
            self._idle.pop(0).abort()

    def close(self) -> None:
        """Close all connections."""
        for task in self._connecting:
            task.cancel()
        for connection in list(self._all):
            connection.abort()

    async def _connect(self, opened: "Opened") -> None:
        try:
            async with asyncio.timeout(CONNECT_TIMEOUT_S):
                connection = await self._open()
        except (OSError, TimeoutError) as error:
            opened.on_lost(PeerLost(f"cannot connect to the frontend: {error}"))
            return
        task = asyncio.current_task()
        assert task is not None
        self._connecting.discard(task)
        self._all.add(connection)
        opened.on_connected(connection)

    async def _open(self) -> UpstreamConnection:
        loop = asyncio.get_running_loop()
        sock = socket.socket()
        connection = UpstreamConnection(self)
        try:
            sock.setblocking(False)
            _bound_buffers(sock)
            sock.bind((self._host, 0))
            connection.source_port = sock.getsockname()[1]
            if self._guard is not None:
                await self._admit(connection, self._guard)
            await loop.sock_connect(sock, (self._host, self.port))
            await loop.create_connection(lambda: connection, sock=sock)
        except BaseException:
            self.settle(connection)
            sock.close()
            raise
        return connection


def _bound_buffers(sock: socket.socket) -> None:
    """Called before `connect`: the size of segments is agreed on there."""
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, RECEIVE_BYTES)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_MAXSEG, SEGMENT_BYTES)


class Opened(Protocol):
    """Who waits for a connection."""

    def on_connected(self, connection: UpstreamConnection) -> None:
        """The connection is open."""

    def on_lost(self, error: BatonError) -> None:
        """It cannot be opened."""
