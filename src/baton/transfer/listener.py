"""The KV port of a producer: accepts connections up to a limit, and reads for what each one is."""

import asyncio
import functools
import logging
import resource
import socket
from collections.abc import Awaitable, Callable, Mapping

from baton.config.peer_tls import PeerTls
from baton.errors import PeerLost
from baton.transfer.connection_limit import ConnectionLimit, ConnectionSlot
from baton.transfer.sockets import configure, receive_bytes, shut_down
from baton.transfer.tls import accepted
from baton.transfer.wire import PREAMBLE_BYTES

log = logging.getLogger(__name__)

PREAMBLE_TIMEOUT_S = 5.0
ACCEPT_RETRY_S = 0.1
CLOSE_TIMEOUT_S = 5.0
TLS_FILES = 3  # of a connection with TLS: its own, and the pair that carries its plain text

# Serves a connection until its end, and closes it. Called once its preamble has been read.
Serve = Callable[[socket.socket, ConnectionSlot], Awaitable[None]]


class KvListener:
    """Passes each connection to the function for its preamble. Event-loop thread only."""

    def __init__(
        self, listener: socket.socket, max_connections: int, serve: Mapping[bytes, Serve], tls: PeerTls | None = None
    ) -> None:
        self.limit = ConnectionLimit(connections_allowed(max_connections, 1 if tls is None else TLS_FILES))
        self._listener = listener
        self._serve = serve
        self._tls = tls
        self._tasks: set[asyncio.Task[None]] = set()
        self._accepting = asyncio.create_task(self._accept())

    async def close(self) -> None:
        """Stop listening, and end the functions that serve connections."""
        tasks = {self._accepting, *self._tasks}
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks, timeout=CLOSE_TIMEOUT_S)
        self._listener.close()

    async def _accept(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            try:
                connection, address = await loop.sock_accept(self._listener)
            except OSError as error:  # usually too many open files, which passes
                log.warning("cannot accept a connection: %s", error)
                await asyncio.sleep(ACCEPT_RETRY_S)
                continue
            slot = self.limit.admit(address[0], functools.partial(shut_down, connection))
            if slot is None:
                connection.close()
            else:
                task = asyncio.create_task(self._run(connection, slot))
                self._tasks.add(task)
                task.add_done_callback(self._tasks.discard)
            await asyncio.sleep(0)  # connections that were closed for others end before the next one is accepted

    async def _run(self, connection: socket.socket, slot: ConnectionSlot) -> None:
        try:
            await self._read_preamble_and_serve(connection, slot)
        except (OSError, PeerLost) as error:  # TimeoutError is an OSError
            log.debug("a connection ended: %s", error)
        finally:
            slot.release()

    async def _read_preamble_and_serve(self, connection: socket.socket, slot: ConnectionSlot) -> None:
        try:
            connection.setblocking(False)
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            if self._tls is not None:
                configure(connection)  # what serves it gets another socket
                connection = await accepted(connection, self._tls, PREAMBLE_TIMEOUT_S)
            async with asyncio.timeout(PREAMBLE_TIMEOUT_S):
                preamble = await receive_bytes(connection, PREAMBLE_BYTES, PREAMBLE_TIMEOUT_S)
            serve = self._serve.get(preamble)
            if serve is None:
                raise PeerLost("its preamble is not known here")
        except BaseException:
            connection.close()
            raise
        await serve(connection, slot)


def connections_allowed(max_connections: int, files_each: int) -> int:
    """Return how many connections may have half of the files that this process may open; the rest is for its work."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return max(1, min(max_connections, soft // 2 // files_each))
