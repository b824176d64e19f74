"""Bytes of media that a worker holds: limits for a request and for all requests together.

A request first reserves what it knows that its media take (the data in its URLs), and waits for that. What it fetches
is added as it arrives, without waiting: a request that waited while it holds bytes could wait for another one that does
the same. So a host that sends slowly occupies no more than it has sent. Bytes are free again when the file that has
them is dropped, and those of a request that fails to load at once.
"""

import asyncio
import weakref
from collections import deque
from collections.abc import Iterable
from contextlib import suppress

from baton.errors import InvalidRequest, Overloaded
from baton.protocol.media import EmbeddingFile, LoadedMediaItem


class ByteBudget:
    """The bytes of all requests. Event-loop thread only, except that files may be dropped on any thread."""

    def __init__(self, total: int, per_request: int) -> None:
        self._total = total
        self._per_request = per_request
        self._held = 0
        self._dropped: deque[int] = deque()
        self._finalizers: dict[int, weakref.finalize[..., LoadedMediaItem]] = {}
        self._waiting: deque[tuple[int, asyncio.Future[None]]] = deque()

    @property
    def held(self) -> int:
        """How many bytes requests hold now."""
        while self._dropped:
            self._held -= self._dropped.popleft()
        return self._held

    async def open(self, reserved: int, timeout_s: float) -> "RequestBytes":
        """Return the bytes of a new request, of which `reserved` are held; at least one byte was free for it.

        Requests are served in order. Raises InvalidRequest if it is more than a request may hold, and Overloaded when
        it is not free in time.
        """
        if reserved > self._per_request:
            raise _exceeds_request(self._per_request)
        if self._waiting or not self._fits(reserved):
            await self._wait(reserved, timeout_s)
        else:
            self._held += reserved
        return RequestBytes(self, reserved, self._per_request)

    def take(self, count: int) -> None:
        """Hold `count` bytes more. Raises Overloaded."""
        if self.held + count > self._total:
            raise self._exhausted()
        self._held += count

    def free(self, count: int) -> None:
        """Give `count` bytes back."""
        self._held -= count
        self._serve_waiting()

    def free_with(self, item: LoadedMediaItem) -> None:
        """Give the bytes of `item` back when the last reference to it is dropped."""
        loop = asyncio.get_running_loop()
        finalizer = self._finalizers[id(item)] = weakref.finalize(item, self._drop, id(item), _size(item), loop)
        finalizer.atexit = False

    def release(self, item: LoadedMediaItem) -> None:
        """Give the bytes of `item` back now. Idempotent."""
        if (finalizer := self._finalizers.get(id(item))) is not None:
            finalizer()

    def _drop(self, number: int, size: int, loop: asyncio.AbstractEventLoop) -> None:
        # Finalizers run anywhere, between any two operations: what is touched here changes in one operation.
        self._finalizers.pop(number, None)
        self._dropped.append(size)
        with suppress(RuntimeError):  # the loop has closed
            loop.call_soon_threadsafe(self._serve_waiting)

    def _fits(self, count: int) -> bool:
        return self.held + max(count, 1) <= self._total

    async def _wait(self, reserved: int, timeout_s: float) -> None:
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.append((reserved, turn))
        try:
            async with asyncio.timeout(timeout_s):
                await turn
        except BaseException as error:
            if turn.done() and not turn.cancelled():  # served and cancelled at once
                self._held -= reserved
            self._serve_waiting()
            if isinstance(error, TimeoutError):
                raise self._exhausted() from None
            raise

    def _serve_waiting(self) -> None:
        while self._waiting and (self._waiting[0][1].done() or self._fits(self._waiting[0][0])):
            reserved, turn = self._waiting.popleft()
            if not turn.done():
                self._held += reserved
                turn.set_result(None)

    def _exhausted(self) -> Overloaded:
        return Overloaded(
            f"multi_modal_data: media of other requests take the {self._total} bytes that this worker has for media"
            " (--media-max-total-bytes); try again later"
        )


class RequestBytes:
    """The bytes of one request while its media are loaded. Event-loop thread only."""

    def __init__(self, budget: ByteBudget, reserved: int, limit: int) -> None:
        self._budget = budget
        self._held = reserved
        self._used = 0
        self._limit = limit

    def take(self, count: int) -> None:
        """Use `count` bytes more. Raises InvalidRequest at the limit of the request, Overloaded at that of all."""
        self._used += count
        if self._used > self._limit:
            raise _exceeds_request(self._limit)
        if self._used > self._held:
            self._budget.take(self._used - self._held)
            self._held = self._used

    def keep(self, items: Iterable[LoadedMediaItem]) -> None:
        """End loading: the bytes of `items` are held until they are dropped, all others are free."""
        for item in items:
            self._held -= _size(item)
            self._budget.free_with(item)
        self.close()

    def close(self) -> None:
        """Free what is held and not kept. Idempotent."""
        held, self._held = self._held, 0
        self._budget.free(held)


def _size(item: LoadedMediaItem) -> int:
    return item.data.nbytes if isinstance(item, EmbeddingFile) else len(item.data)


def _exceeds_request(limit: int) -> InvalidRequest:
    return InvalidRequest(
        f"multi_modal_data: the media of the request exceed the limit of {limit} bytes for a request"
        " (--media-max-request-bytes); send fewer or smaller items"
    )
