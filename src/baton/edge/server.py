"""The edge's listener: accepts connections, bounds them, and knows what all of them share."""

import asyncio
import logging
import socket
import ssl
import time
from collections.abc import Callable, Coroutine
from contextlib import suppress
from email.utils import formatdate
from functools import partial
from pathlib import Path
from typing import TypeVar

from baton.config.listeners import open_listener
from baton.edge.access import Access
from baton.edge.connection import ClientConnection
from baton.edge.counts import EdgeCounts
from baton.edge.fetch import Fetch
from baton.edge.heads import HeadCheck
from baton.edge.limits import EdgeLimits
from baton.edge.messages import Headers, Request
from baton.edge.models import KnownModels
from baton.edge.routes import RouteTable
from baton.edge.tls_listener import TlsListener
from baton.edge.upstream import UpstreamPool
from baton.errors import ConfigError
from baton.timelines.ring import TimelineRing

T = TypeVar("T")

log = logging.getLogger(__name__)

BACKLOG = 1024
UNSENT_BYTES = 64 * 1024
"""How much of an answer the kernel holds that the client's end has no room for. What is on its way is not bounded."""
TICK_S = 1.0
MODELS_INTERVAL_S = 1.0
CLOSE_TIMEOUT_S = 5.0


class Edge:
    """The public endpoint, from `start` to `aclose`. Everything is called in one event loop."""

    def __init__(
        self,
        pool: UpstreamPool,
        access: Access,
        models: KnownModels,
        limits: EdgeLimits,
        routes: RouteTable,
        tls: ssl.SSLContext | None = None,
        take_reason: Callable[[str], str | None] = lambda request_id: None,
        counts: EdgeCounts | None = None,
        timelines: TimelineRing | None = None,
    ) -> None:
        self.pool = pool
        self.heads = HeadCheck(routes, access, limits.body_bytes)
        self.models = models
        self.limits = limits
        self.counts = counts or EdgeCounts()
        self.timelines = timelines or TimelineRing(0)
        self.take_reason = take_reason
        """Returns the reason why the request with this id has failed, where the answer of the frontend lacks it."""
        self.upstream_host = b"localhost"
        self._access = access
        self._tls = tls
        self._connections: dict[ClientConnection, None] = {}  # the oldest first
        self._all_closed = asyncio.Event()
        self._tasks: set[asyncio.Task[object]] = set()
        self._fetches: dict[str, asyncio.Task[tuple[int, bytes]]] = {}
        self._server: asyncio.Server | TlsListener | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._date = b""
        self.address = ""
        self.port = 0

    async def start(self, host: str, port: int) -> None:
        """Listen. Raises ConfigError, naming the flag, if the address cannot be used."""
        listener = open_listener(host, port, BACKLOG, "--host", "--port")
        # Connections inherit it.
        listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NOTSENT_LOWAT, UNSENT_BYTES)
        self.address, self.port = listener.getsockname()[:2]
        self._loop = asyncio.get_running_loop()
        self._set_date()
        if self._tls is None:
            self._server = await self._loop.create_server(self._make_connection, sock=listener, backlog=BACKLOG)
        else:
            self._server = TlsListener(
                listener, self._tls, self._make_connection, self.limits.handshake_timeout_s, self._room
            )
        self.start_task(self._tick())
        self.start_task(self._watch_models())

    def drain(self) -> None:
        """Stop listening, and close each connection after its request in progress. Idempotent, valid before `start`."""
        if self._server is not None:
            self._server.close()
            self._server = None
        for connection in list(self._connections):
            connection.close_when_idle()

    async def aclose(self, timeout_s: float = CLOSE_TIMEOUT_S) -> None:
        """Wait up to `timeout_s` until the clients have read their answers, then close everything."""
        self.drain()
        for connection in [each for each in self._connections if not each.is_answering]:
            connection.abort()
        if self._connections:
            self._all_closed.clear()
            with suppress(TimeoutError):
                async with asyncio.timeout(timeout_s):
                    await self._all_closed.wait()
        for connection in list(self._connections):
            connection.abort()
        for task in list(self._tasks):
            task.cancel()
        self.pool.close()

    def now(self) -> float:
        """Return the time of the event loop."""
        assert self._loop is not None
        return self._loop.time()

    def start_task(self, work: Coroutine[object, object, T]) -> asyncio.Task[T]:
        """Run `work` in a task that ends with the edge at the latest."""
        assert self._loop is not None
        task = self._loop.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def fetch(self, path: str) -> tuple[int, bytes]:
        """See `Frontend`. All who wait for the same path share one answer: they need one connection to the frontend."""
        task = self._fetches.get(path)
        if task is None:
            task = self._fetches[path] = self.start_task(Fetch(self.pool, self.upstream_host).get(path))
            task.add_done_callback(partial(self._forget_fetch, path))
        return await asyncio.shield(task)

    def _forget_fetch(self, path: str, task: asyncio.Task[tuple[int, bytes]]) -> None:
        del self._fetches[path]
        if not task.cancelled():
            task.exception()  # it is raised to those who wait, if any do

    # Connections.

    def _make_connection(self) -> ClientConnection:
        return ClientConnection(self)

    def _room(self) -> int:
        return self.limits.max_connections - len(self._connections)

    def add(self, connection: ClientConnection) -> bool:
        """Note a new connection; return whether there is room for it. The oldest one without a request makes room."""
        crowded = len(self._connections) >= self.limits.max_connections
        idle = next((each for each in self._connections if each.awaits_head), None) if crowded else None
        if idle is not None:
            idle.abort()
        self._connections[connection] = None
        self.counts.connections = len(self._connections)
        return not crowded or idle is not None

    def remove(self, connection: ClientConnection) -> None:
        """Forget a closed connection."""
        self._connections.pop(connection, None)
        self.counts.connections = len(self._connections)
        if not self._connections:
            self._all_closed.set()

    def answer_headers(self, request: Request) -> Headers:
        """Return the headers that every answer has."""
        headers = [(b"x-request-id", request.request_id.encode()), (b"date", self._date)]
        return headers + self._access.cors_headers(request)

    # What happens once in a while.

    async def _tick(self) -> None:
        while True:
            await asyncio.sleep(TICK_S)
            self._set_date()
            self.pool.close_idle()
            self._access.keys.reload_changed()
            now = self.now()
            for connection in [each for each in self._connections if each.deadline <= now]:
                connection.expire()

    async def _watch_models(self) -> None:
        while True:
            await self.models.refresh(self, self.now())
            await asyncio.sleep(MODELS_INTERVAL_S)

    def _set_date(self) -> None:
        self._date = formatdate(time.time(), usegmt=True).encode()


def tls_context(certificate: str, key: str) -> ssl.SSLContext | None:
    """Return the context for these files, None without them. Raises ConfigError."""
    if not certificate and not key:
        return None
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.set_alpn_protocols(["http/1.1"])
    try:
        context.load_cert_chain(Path(certificate).expanduser(), Path(key).expanduser())
    except (OSError, ssl.SSLError) as error:
        raise ConfigError(f"cannot use --tls-certificate {certificate} with --tls-key {key}: {error}") from None
    return context
