"""The listener of an edge with TLS: it bounds handshakes, which have no protocol yet that could be counted."""

import asyncio
import logging
import socket
import ssl
from collections.abc import Callable
from functools import partial

log = logging.getLogger(__name__)

ACCEPT_RETRY_S = 0.1

Handshake = asyncio.Task[tuple[asyncio.BaseTransport, asyncio.Protocol]]


class TlsListener:
    """Accepts connections and makes their protocols once their handshakes are done. Used in one event loop."""

    def __init__(
        self,
        listener: socket.socket,
        tls: ssl.SSLContext,
        make_protocol: Callable[[], asyncio.Protocol],
        handshake_timeout_s: float,
        room: Callable[[], int],
    ) -> None:
        """Accept from `listener`, which it closes. `room` returns how many handshakes may run now."""
        self._listener = listener
        self._tls = tls
        self._make_protocol = make_protocol
        self._handshake_timeout_s = handshake_timeout_s
        self._room = room
        self._handshakes: dict[Handshake, None] = {}  # the oldest first
        self._retry: asyncio.TimerHandle | None = None
        self._loop = asyncio.get_running_loop()
        self._listen()

    def close(self) -> None:
        """Stop listening, and end all handshakes. Idempotent."""
        if self._retry is not None:
            self._retry.cancel()
        if self._listener.fileno() >= 0:
            self._loop.remove_reader(self._listener)
            self._listener.close()
        for task in self._handshakes:
            task.cancel()

    def _listen(self) -> None:
        self._loop.add_reader(self._listener, self._accept)

    def _accept(self) -> None:
        """Accept one connection: those that have been ended for others close before the next one."""
        try:
            connection, _ = self._listener.accept()
        except BlockingIOError:
            return
        except OSError as error:  # usually too many open files, which passes
            log.warning("cannot accept a connection: %s", error)
            self._loop.remove_reader(self._listener)
            self._retry = self._loop.call_later(ACCEPT_RETRY_S, self._listen)
            return
        connection.setblocking(False)
        if self._handshakes and len(self._handshakes) >= self._room():
            next(iter(self._handshakes)).cancel()
        handshake = self._loop.create_task(
            self._loop.connect_accepted_socket(
                self._make_protocol, connection, ssl=self._tls, ssl_handshake_timeout=self._handshake_timeout_s
            )
        )
        self._handshakes[handshake] = None
        handshake.add_done_callback(partial(self._end, connection))

    def _end(self, connection: socket.socket, handshake: Handshake) -> None:
        """Close a connection whose handshake has not been completed, even if it has not begun."""
        del self._handshakes[handshake]
        if handshake.cancelled():
            connection.close()
        elif (error := handshake.exception()) is not None:
            connection.close()
            expected = isinstance(error, OSError)  # SSLError and TimeoutError are
            log.log(logging.DEBUG if expected else logging.ERROR, "a TLS handshake failed: %r", error)
