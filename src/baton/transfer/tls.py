"""TLS for connections of the KV port. What uses a connection gets a socket with plain text, and knows nothing of TLS.

      the network                this process
TLS ◄────────────► _Half ── _Half ◄────────────► plain text, over a pair of connected sockets
"""

import asyncio
import socket
import ssl
from collections.abc import Callable, Coroutine
from contextlib import ExitStack
from typing import Any, cast

from baton.config.peer_tls import PeerTls
from baton.errors import PeerLost
from baton.transfer.sockets import connect

CLOSE_TIMEOUT_S = 5.0
# Longer than the timeouts of what uses a connection, which name the cause.
STALL_TIMEOUT_S = 10.0

Handshake = Coroutine[Any, Any, tuple[asyncio.BaseTransport, asyncio.BaseProtocol]]


class _Half(asyncio.Protocol):
    """Passes what arrives to the other half, no faster than that accepts it. When one half ends, so does the other.

    A half that must not read does not notice that its socket was closed. So with `stall_timeout_s`, a half that accepts
    nothing for that long ends: otherwise a peer that does not read would keep both descriptors.
    """

    def __init__(self, stall_timeout_s: float | None = None) -> None:
        self.other: _Half | None = None
        self.transport: asyncio.Transport | None = None
        self._stall_timeout_s = stall_timeout_s
        self._timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """See `asyncio.Protocol`."""
        self.transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        """See `asyncio.Protocol`."""
        if self.other is not None and self.other.transport is not None:
            self.other.transport.write(data)

    def pause_writing(self) -> None:
        """See `asyncio.Protocol`."""
        if (source := self._source()) is not None:
            source.pause_reading()
        if self._stall_timeout_s is not None:
            self._timer = asyncio.get_running_loop().call_later(self._stall_timeout_s, self.abort)

    def resume_writing(self) -> None:
        """See `asyncio.Protocol`."""
        self._cancel_timer()
        if (source := self._source()) is not None:
            source.resume_reading()

    def _source(self) -> asyncio.Transport | None:
        """Return the transport that what is written here comes from, None if it is closing."""
        source = self.other.transport if self.other is not None else None
        return source if source is not None and not source.is_closing() else None

    def connection_lost(self, exc: Exception | None) -> None:
        """See `asyncio.Protocol`. What the other half has not sent yet is sent before it closes."""
        self.transport = None
        self._cancel_timer()
        if self.other is not None and self.other.transport is not None:
            self.other.transport.close()

    def abort(self) -> None:
        """Close at once."""
        if self.transport is not None:
            self.transport.abort()

    def _cancel_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None


async def accepted(
    connection: socket.socket, tls: PeerTls, timeout_s: float, stall_timeout_s: float = STALL_TIMEOUT_S
) -> socket.socket:
    """Return the plain text of a connection whose client has a certificate. It is closed with it. Raises PeerLost."""

    def handshake(outer: _Half) -> Handshake:
        return asyncio.get_running_loop().connect_accepted_socket(
            lambda: outer,
            connection,
            ssl=tls.server,
            ssl_handshake_timeout=timeout_s,
            ssl_shutdown_timeout=CLOSE_TIMEOUT_S,
        )

    return await _joined(connection, handshake, stall_timeout_s)


async def connect_to(host: str, port: int, timeout_s: float, tls: PeerTls | None) -> socket.socket:
    """Return a connection to a worker: with `tls`, its plain text. Raises PeerLost."""
    connection = await connect(host.strip("[]"), port, timeout_s)
    return connection if tls is None else await connected(connection, tls, timeout_s)


async def connected(connection: socket.socket, tls: PeerTls, timeout_s: float) -> socket.socket:
    """Return the plain text of a connection to a server with a certificate. It is closed with it. Raises PeerLost."""

    def handshake(outer: _Half) -> Handshake:
        return asyncio.get_running_loop().create_connection(
            lambda: outer,
            sock=connection,
            ssl=tls.client,
            server_hostname=tls.name,
            ssl_handshake_timeout=timeout_s,
            ssl_shutdown_timeout=CLOSE_TIMEOUT_S,
        )

    return await _joined(connection, handshake)


async def _joined(
    connection: socket.socket, handshake: Callable[[_Half], Handshake], stall_timeout_s: float = STALL_TIMEOUT_S
) -> socket.socket:
    outer, inner = _Half(stall_timeout_s), _Half()
    outer.other, inner.other = inner, outer
    with ExitStack() as on_failure:
        on_failure.callback(connection.close)
        try:
            mine, theirs = socket.socketpair()
            on_failure.callback(mine.close)
            mine.setblocking(False)
            on_failure.callback(outer.abort)
            on_failure.callback(inner.abort)
            # Bytes may arrive with the end of the handshake: the pair is connected first.
            await asyncio.get_running_loop().create_unix_connection(lambda: inner, sock=theirs)
            await handshake(outer)
        except OSError as error:  # SSLError is one
            raise PeerLost(f"no TLS connection with the other worker: {_reason(error)}") from None
        on_failure.pop_all()
    return mine


def _reason(error: OSError) -> str:
    if isinstance(error, ssl.SSLCertVerificationError):
        return f"its certificate is refused ({error.verify_message})"
    return getattr(error, "reason", None) or error.strerror or str(error) or type(error).__name__
