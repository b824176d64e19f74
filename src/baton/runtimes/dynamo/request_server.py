"""Requests of one endpoint: decoded, handled in the event loop, and answered by pushing."""

import asyncio
import logging
import weakref
from collections.abc import Callable
from contextlib import aclosing
from typing import Any

from dynamo import _core

from baton.errors import BatonError, Draining, InvalidRequest
from baton.ports.runtime import Service, Wire
from baton.protocol.codec import DecodeError
from baton.runtimes.dynamo.context import DynamoContext
from baton.runtimes.dynamo.errors import to_runtime
from baton.runtimes.dynamo.response_writer import ResponseWriter, Sender

log = logging.getLogger(__name__)

SHUTDOWN_TIMEOUT_S = 5.0
POLL_S = 0.005
TAKE_POLLS = 200
# From the runtime's reading of the end of a response until it is in the socket. Nothing tells; it takes a millisecond.
SEND_S = 0.1


class _ResponseEnd:
    """What the runtime iterates over for one request: no items, since responses are pushed, only an end.

    A future instead of a generator: its error has no frames, so the runtime prints no traceback for a request that was
    merely refused.
    """

    __slots__ = ("__weakref__", "_end")

    def __init__(self, end: asyncio.Future[None]) -> None:
        self._end = end

    @property
    def is_known(self) -> bool:
        """Whether the request has ended."""
        return self._end.done()

    def __aiter__(self) -> "_ResponseEnd":
        return self

    def __anext__(self) -> asyncio.Future[None]:
        return self._end


class RequestServer:
    """Serves the requests of one endpoint."""

    def __init__(self, service: Service[Any, Any], reader_stall_timeout_s: float, cancel_grace_s: float) -> None:
        self._service = service
        self._stall_timeout_s = reader_stall_timeout_s
        self._cancel_grace_s = cancel_grace_s
        self._loop = asyncio.get_running_loop()
        self._tasks: set[asyncio.Task[None]] = set()
        self._ends: weakref.WeakSet[_ResponseEnd] = weakref.WeakSet()  # the runtime drops one when it has read it
        self._last_end = -SEND_S
        self._closing = False
        self.checks: list[Callable[[Wire], None]] = []

    def handle(self, request: Wire, context: _core.Context, response_sender: Sender) -> _ResponseEnd:
        """Called by the runtime for every request, in one of its threads; the work starts in the event loop."""
        end: asyncio.Future[None] = self._loop.create_future()
        response = _ResponseEnd(end)
        self._loop.call_soon_threadsafe(self._start, request, DynamoContext(context), response_sender, response, end)
        return response

    def _start(
        self,
        request: Wire,
        context: DynamoContext,
        sender: Sender,
        response: _ResponseEnd,
        end: asyncio.Future[None],
    ) -> None:
        self._ends.add(response)
        end.add_done_callback(self._record_end)
        try:
            for check in self.checks:
                check(request)
            decoded = self._service.decode(request)
        except DecodeError as error:
            _finish(end, to_runtime(InvalidRequest(str(error))))
        except Exception as error:  # noqa: BLE001 - translated for the runtime
            _finish(end, to_runtime(error))
        else:
            task = self._loop.create_task(self._respond(decoded, context, sender, end))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
            context.on_cancel(lambda: self._cancel_later(task))

    def _cancel_later(self, task: asyncio.Task[None]) -> None:
        """Cancel a handler whose caller has disconnected and that has not ended by itself after the grace period."""
        self._loop.call_later(self._cancel_grace_s, task.cancel)

    async def _respond(
        self, request: object, context: DynamoContext, sender: Sender, end: asyncio.Future[None]
    ) -> None:
        writer = ResponseWriter(sender, self._service.encode, self._stall_timeout_s)
        error: BaseException = StopAsyncIteration()
        try:
            async with aclosing(self._service.handle(request, context, writer.send_now)) as replies:
                async for reply in replies:
                    try:
                        await writer.send(reply)
                    except BatonError as failure:
                        await replies.athrow(failure)  # so that the handler gets the reason
            await writer.close()
        except BaseException as raised:  # noqa: BLE001 - translated for the runtime below
            draining = self._closing and isinstance(raised, asyncio.CancelledError)
            error = to_runtime(Draining("this process is shutting down") if draining else raised)
        finally:
            context.close()
            writer.release()
            _finish(end, error)

    async def aclose(self) -> None:
        """Cancel the requests that still run and wait for them; callers get Draining, which is retryable."""
        self._closing = True
        for task in self._tasks:
            task.cancel()
        if self._tasks:
            _, pending = await asyncio.wait(self._tasks, timeout=SHUTDOWN_TIMEOUT_S)
            if pending:
                log.warning("%d requests did not end within %g s", len(pending), SHUTDOWN_TIMEOUT_S)
        await self.flush()

    async def flush(self) -> None:
        """Wait until the runtime has sent how requests have ended: a caller that misses it retries them elsewhere."""
        for _ in range(TAKE_POLLS):
            if not any(end.is_known for end in self._ends):
                break
            await asyncio.sleep(POLL_S)
        await asyncio.sleep(max(0.0, self._last_end + SEND_S - self._loop.time()))

    def _record_end(self, end: asyncio.Future[None]) -> None:
        self._last_end = self._loop.time()


def _finish(end: asyncio.Future[None], error: BaseException) -> None:
    """End a response, unless the runtime has dropped it because its caller disconnected."""
    if not end.done():
        end.set_exception(error)
