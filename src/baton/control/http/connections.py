"""Limits on connections to the system server. Clients that stall, by fault or on purpose, must not keep others out."""

import asyncio
import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import NamedTuple, cast

log = logging.getLogger(__name__)


class ConnectionLimits(NamedTuple):
    """What a client may take.

    A connection gets `head_timeout_s` from its begin, or from the end of a request, to the head of the next request;
    the client must have read its reply by then too. A body may take `body_timeout_s`, and longer if it may be so large
    that it takes longer at `min_bytes_per_s`.
    """

    head_timeout_s: float = 20.0
    body_timeout_s: float = 30.0
    min_bytes_per_s: int = 1 << 20
    max_connections: int = 100


DEFAULT_LIMITS = ConnectionLimits()


class LimitedConnections:
    """Makes the protocol of every connection, and closes those that wait for too long.

    With `max_connections`, a new connection closes the one that has waited longest for a request. Connections whose
    requests are being served are not closed; if there are no others, the new one is.
    """

    def __init__(self, make_protocol: Callable[[], asyncio.Protocol], limits: ConnectionLimits) -> None:
        self._make_protocol = make_protocol
        self._limits = limits
        self._open: set[asyncio.Transport] = set()
        self._waiting: dict[asyncio.Transport, asyncio.TimerHandle] = {}  # in the order of their waits

    def __call__(self) -> asyncio.Protocol:
        """Return the protocol of a new connection, as `create_server` asks for it."""
        return _LimitedProtocol(self, self._make_protocol())

    @contextmanager
    def serving(self, transport: asyncio.BaseTransport | None) -> Iterator[None]:
        """Within the block, the connection's request is served and the connection does not wait."""
        connection = cast(asyncio.Transport, transport)
        self._stop_waiting(connection)
        try:
            yield
        finally:
            if connection in self._open:
                self._wait(connection)

    def admit(self, connection: asyncio.Transport) -> bool:
        """Count a new connection; return False if there are too many."""
        if len(self._open) >= self._limits.max_connections and not self._close_longest_waiting():
            return False
        self._open.add(connection)
        self._wait(connection)
        return True

    def forget(self, connection: asyncio.Transport) -> None:
        """Stop counting a connection that is closed."""
        self._stop_waiting(connection)
        self._open.discard(connection)

    def _wait(self, connection: asyncio.Transport) -> None:
        loop = asyncio.get_running_loop()
        self._waiting[connection] = loop.call_later(self._limits.head_timeout_s, self._close, connection)

    def _stop_waiting(self, connection: asyncio.Transport) -> None:
        if (timer := self._waiting.pop(connection, None)) is not None:
            timer.cancel()

    def _close_longest_waiting(self) -> bool:
        connection = next(iter(self._waiting), None)
        if connection is not None:
            self._close(connection)
        return connection is not None

    def _close(self, connection: asyncio.Transport) -> None:
        log.debug("closing a connection that sends no request")
        self.forget(connection)
        connection.abort()


class _LimitedProtocol(asyncio.Protocol):
    """Passes everything on to the protocol of a connection that was admitted."""

    def __init__(self, connections: LimitedConnections, protocol: asyncio.Protocol) -> None:
        self._connections = connections
        self._protocol = protocol
        self._connection: asyncio.Transport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """See asyncio."""
        connection = cast(asyncio.Transport, transport)
        if self._connections.admit(connection):
            self._connection = connection
            self._protocol.connection_made(connection)
        else:
            connection.abort()

    def connection_lost(self, exc: Exception | None) -> None:
        """See asyncio."""
        if self._connection is not None:
            self._connections.forget(self._connection)
            self._protocol.connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """See asyncio."""
        if self._connection is not None:
            self._protocol.data_received(data)

    def eof_received(self) -> bool | None:
        """See asyncio."""
        return self._protocol.eof_received() if self._connection is not None else None

    def pause_writing(self) -> None:
        """See asyncio."""
        self._protocol.pause_writing()

    def resume_writing(self) -> None:
        """See asyncio."""
        self._protocol.resume_writing()
