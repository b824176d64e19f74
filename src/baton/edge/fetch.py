"""Requests of the edge itself to the frontend."""

import asyncio

from baton.edge.messages import Headers, request_head
from baton.edge.upstream import UpstreamConnection, UpstreamPool
from baton.errors import BatonError, PeerLost

TIMEOUT_S = 10.0


class Fetch:
    """One request with its whole answer. Cancelling it cancels the request at the frontend."""

    __slots__ = ("_body", "_connection", "_done", "_head", "_host", "_opening", "_parts", "_pool", "_status")

    def __init__(self, pool: UpstreamPool, host: bytes) -> None:
        self._pool = pool
        self._host = host
        self._head = b""
        self._body = b""
        self._status = 0
        self._parts: list[bytes] = []
        self._opening: asyncio.Task[None] | None = None
        self._connection: UpstreamConnection | None = None
        self._done: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    async def get(self, path: str) -> tuple[int, bytes]:
        """Return status and body. Raises BatonError without an answer."""
        self.begin(request_head(b"GET", path.encode(), [(b"host", self._host)]), b"")
        return await self.answer(TIMEOUT_S)

    def begin(self, head: bytes, body: bytes, limit: int | None = None) -> bool:
        """Send a request, unless that would open more than `limit` connections. `answer` is to be awaited next."""
        self._head, self._body = head, body
        if (connection := self._pool.take()) is not None:
            self.on_connected(connection)
        elif limit is None or self._pool.open < limit:
            self._opening = self._pool.connect(self)
        else:
            return False
        return True

    async def answer(self, timeout_s: float | None = None) -> tuple[int, bytes]:
        """Return status and body of the answer. Raises BatonError without one."""
        try:
            async with asyncio.timeout(timeout_s):
                await self._done
        except TimeoutError:
            raise PeerLost("the frontend does not answer") from None
        finally:
            if self._opening is not None:
                self._opening.cancel()
            if self._connection is not None:
                self._connection.abort()
        return self._status, b"".join(self._parts)

    def on_connected(self, connection: UpstreamConnection) -> None:
        """See `Opened`."""
        self._connection = connection
        connection.send(self, self._head, self._body)

    def on_head(self, status: int, headers: Headers) -> None:
        """See `Receiver`."""
        self._status = status

    def on_data(self, data: bytes) -> None:
        """See `Receiver`."""
        self._parts.append(data)

    def flush(self) -> None:
        """See `Receiver`."""

    def on_end(self) -> None:
        """See `Receiver`."""
        self._connection = None
        if not self._done.done():
            self._done.set_result(None)

    def on_lost(self, error: BatonError) -> None:
        """See `Receiver` and `Opened`."""
        self._connection = None
        if not self._done.done():
            self._done.set_exception(error)
