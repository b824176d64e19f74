"""Calls from this process to others, as our Client."""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Mapping
from typing import Any

from dynamo import _core

from baton.errors import Cancelled, PeerLost
from baton.ports.runtime import Context, Wire
from baton.protocol.ids import new_request_id
from baton.runtimes.dynamo.errors import from_runtime

# A peer that hears that nobody listens ends the stream. One that is frozen does not hear it.
LEAVE_S = 0.5


class DynamoClient:
    """See `Client`."""

    def __init__(self, raw: _core.Client, chooser: "KvChooser | None" = None) -> None:
        self._raw = raw
        self._chooser = chooser

    def instances(self) -> list[int]:
        """See `Client.instances`."""
        return self._raw.instance_ids()

    async def ready(self, timeout_s: float) -> list[int]:
        """See `Client.ready`."""
        try:
            return await asyncio.wait_for(self._raw.wait_for_instances(), timeout_s)
        except TimeoutError:
            raise PeerLost(f"no instance appeared within {timeout_s:g} s") from None

    async def call(
        self, request: Wire, instance: int | None = None, parent: Context | None = None
    ) -> AsyncGenerator[Wire, None]:
        """See `Client.call`."""
        metadata = dict(parent.trace_headers) if parent else None
        context = _core.Context(new_request_id(parent.id if parent else "call"), metadata)
        call = _Call(context)
        seat = _Seat(self._chooser, context.id()) if instance is None and self._chooser is not None else None
        if parent is not None:
            parent.on_cancel(call.leave)
        try:
            if seat is not None:
                request, instance = await call.wait(seat.take(request))
            replies = await call.start(self._send(request, instance, context))
            while (reply := await call.next(replies)) is not None:
                if seat is not None:
                    seat.begin()
                yield reply
        except Exception as error:
            raise (Cancelled("the caller left") if call.left else from_runtime(error)) from error
        finally:
            call.stop()
            if seat is not None:
                seat.free()
        if call.left:
            raise Cancelled("the caller left")

    def _send(self, request: Wire, instance: int | None, context: _core.Context) -> asyncio.Future[AsyncIterator[Wire]]:
        if instance is None:
            return self._raw.round_robin(request, annotated=False, context=context)
        return self._raw.direct(request, instance, annotated=False, context=context)


class _Call:
    """One call on its way. Stopping it before the other side has connected would be forgotten, so it waits for that."""

    __slots__ = ("_context", "_pending", "_sending", "left")

    def __init__(self, context: _core.Context) -> None:
        self.left = False
        self._context = context
        self._sending: asyncio.Future[AsyncIterator[Wire]] | None = None
        self._pending: asyncio.Future[Any] | None = None

    async def wait(self, pending: asyncio.Future[Any]) -> Any:
        """Await `pending`, but not for long after the caller has left."""
        self._pending = pending
        try:
            return await pending
        except asyncio.CancelledError:
            if self.left and pending.cancelled():
                raise Cancelled("the caller left") from None
            raise

    async def start(self, sending: asyncio.Future[AsyncIterator[Wire]]) -> AsyncIterator[Wire]:
        """Return the replies, once the other side has connected."""
        self._sending = sending
        if self.left:
            self.stop()
        replies: AsyncIterator[Wire] = await self.wait(asyncio.shield(sending))
        return replies

    async def next(self, replies: AsyncIterator[Wire]) -> Wire | None:
        """Return the next reply; None when there are no more."""
        self._pending = pending = asyncio.ensure_future(replies.__anext__())
        try:
            return await pending
        except StopAsyncIteration:
            self._sending = None  # there is nobody left to stop
            return None
        except asyncio.CancelledError:
            if self.left and pending.cancelled():
                raise Cancelled("the caller left") from None
            raise

    def leave(self) -> None:
        """The caller's own caller has left."""
        self.left = True
        self.stop()
        asyncio.get_running_loop().call_later(LEAVE_S, self._give_up)

    def stop(self) -> None:
        """Tell the other side that no more answers are wanted."""
        if self._sending is not None:
            self._sending.add_done_callback(self._stop_now)

    def _stop_now(self, sending: asyncio.Future[AsyncIterator[Wire]]) -> None:
        self._context.stop_generating()
        if not sending.cancelled():
            sending.exception()

    def _give_up(self) -> None:
        if self._pending is not None:
            self._pending.cancel()


class KvChooser:
    """Chooses instances by what they have cached and how busy they are, with the runtime's own KV router."""

    def __init__(self, endpoint: _core.Endpoint, block_size: int) -> None:
        self.router = _core.KvRouter(endpoint, block_size, _core.KvRouterConfig())


class _Seat:
    """A request's place at the instance that was chosen for it, where it counts as work until it is freed."""

    def __init__(self, chooser: KvChooser, request_id: str) -> None:
        self._router = chooser.router
        self._id = request_id
        self._begun = False

    def take(self, request: Wire) -> asyncio.Future[tuple[Wire, int]]:
        """Choose; return the request as it is to be sent, and where to."""
        return asyncio.ensure_future(self._take(request))

    async def _take(self, request: Wire) -> tuple[Wire, int]:
        given = request.get("routing")
        routing: Mapping[str, object] = given if isinstance(given, dict) else {}
        instance, dp_rank, _ = await self._router.best_worker(
            request.get("token_ids") or [],
            request_id=self._id,
            lora_name=routing.get("lora_name"),
            cache_namespace=routing.get("cache_namespace"),
        )
        return {**request, "routing": {**routing, "dp_rank": dp_rank}}, instance

    def begin(self) -> None:
        """The prompt has been computed."""
        if not self._begun:
            self._begun = True
            self._router.mark_prefill_complete(self._id).add_done_callback(_ignore)

    def free(self) -> None:
        """The request has ended."""
        self._router.free(self._id).add_done_callback(_ignore)


def _ignore(told: asyncio.Future[None]) -> None:
    """What the chooser did not hear makes its next choice a little worse, and nothing else."""
    if not told.cancelled():
        told.exception()
