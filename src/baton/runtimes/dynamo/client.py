"""Calls from this process to others, as our Client."""

import asyncio
import logging
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Mapping
from contextlib import aclosing
from typing import Any, Generic, TypeVar

from dynamo import _core

from baton.errors import Cancelled, PeerLost
from baton.ports.runtime import Context, Wire
from baton.protocol.ids import new_request_id
from baton.runtimes.dynamo.errors import from_runtime

log = logging.getLogger(__name__)

R = TypeVar("R")

# A peer that gets the cancellation ends the stream. One that is frozen does not get it.
CANCEL_GRACE_S = 0.5
# A peer connects as soon as it has a request. One that dies just before never does, and the runtime waits for it.
CONNECT_TIMEOUT_S = 30.0


class DynamoClient:
    """See `Client`. With a KV router, calls that name no instance go where their prefix is cached."""

    def __init__(self, raw: _core.Client, router: _core.KvRouter | None = None) -> None:
        self._raw = raw
        self._router = router

    def instances(self) -> list[int]:
        """See `Client.instances`."""
        return self._raw.instance_ids()

    async def ready(self, timeout_s: float) -> list[int]:
        """See `Client.ready`."""
        try:
            async with asyncio.timeout(timeout_s):
                return await self._raw.wait_for_instances()
        except TimeoutError:
            raise PeerLost(f"no instance appeared within {timeout_s:g} s") from None

    async def call(
        self, request: Wire, instance: int | None = None, parent: Context | None = None
    ) -> AsyncGenerator[Wire, None]:
        """See `Client.call`."""
        context = context_of(parent)
        routed = _RoutedRequest(self._router if instance is None else None, context.id())

        async def start(call: OutgoingCall[Wire]) -> AsyncIterator[Wire]:
            to, chosen = request, instance
            if routed.is_routed:
                to, chosen = await call.wait(asyncio.ensure_future(routed.route(request)))
            return await call.start(self._send(to, chosen, context))

        try:
            async with aclosing(read_replies(OutgoingCall(context, CONNECT_TIMEOUT_S), parent, start)) as replies:
                async for reply in replies:
                    routed.mark_prefilled()
                    yield reply
        finally:
            routed.free()

    def _send(self, request: Wire, instance: int | None, context: _core.Context) -> asyncio.Future[AsyncIterator[Wire]]:
        if instance is None:
            return self._raw.round_robin(request, annotated=False, context=context)
        return self._raw.direct(request, instance, annotated=False, context=context)


async def read_replies(
    call: "OutgoingCall[R]",
    parent: Context | None,
    start: "Callable[[OutgoingCall[R]], Awaitable[AsyncIterator[R]]]",
) -> AsyncGenerator[R, None]:
    """Iterate over the replies that `start` returns, until `parent` is cancelled. Raises the errors of `errors.py`.

    Closing the iterator cancels the call in the other process.
    """
    if parent is not None:
        parent.on_cancel(call.cancel)
    try:
        replies = await start(call)
        while (reply := await call.next(replies)) is not None:
            yield reply
    except PeerLost:
        raise
    except Exception as error:
        raise (Cancelled("the caller disconnected") if call.cancelled else from_runtime(error)) from error
    finally:
        call.stop()
    if call.cancelled:
        raise Cancelled("the caller disconnected")


def context_of(parent: Context | None) -> _core.Context:
    """Return the runtime's context for a call: an id of its own, and the trace of `parent`."""
    if parent is None:
        return _core.Context(new_request_id("call"), None)
    return _core.Context(new_request_id(parent.id), dict(parent.trace_headers))


class OutgoingCall(Generic[R]):
    """One call. The runtime ignores a stop before the peer has connected, so a stop waits for that."""

    __slots__ = ("_connect_timeout_s", "_context", "_grace_is_over", "_pending", "_sending", "cancelled")

    def __init__(self, context: _core.Context, connect_timeout_s: float | None = None) -> None:
        self.cancelled = False
        self._grace_is_over = False
        self._connect_timeout_s = connect_timeout_s
        self._context = context
        self._sending: asyncio.Future[AsyncIterator[R]] | None = None
        self._pending: asyncio.Future[Any] | None = None

    async def wait(self, pending: asyncio.Future[Any]) -> Any:
        """Await `pending`, at most `CANCEL_GRACE_S` after the caller has disconnected."""
        self._pending = pending
        try:
            return await pending
        except asyncio.CancelledError:
            if self.cancelled and pending.cancelled():
                raise Cancelled("the caller disconnected") from None
            raise

    async def start(self, sending: asyncio.Future[AsyncIterator[R]]) -> AsyncIterator[R]:
        """Return the replies, once the peer has connected. Raises PeerLost if it does not."""
        self._sending = sending
        if self.cancelled:
            self.stop()
        try:
            async with asyncio.timeout(self._connect_timeout_s):
                replies: AsyncIterator[R] = await self.wait(asyncio.shield(sending))
        except TimeoutError:
            raise PeerLost(f"no worker has connected within {self._connect_timeout_s:g} s of the request") from None
        return replies

    async def next(self, replies: AsyncIterator[R]) -> R | None:
        """Return the next reply; None when there are no more."""
        if self._grace_is_over:
            raise Cancelled("the caller disconnected")
        self._pending = pending = asyncio.ensure_future(replies.__anext__())
        try:
            return await pending
        except StopAsyncIteration:
            self._sending = None  # the stream has ended: nothing to stop
            return None
        except asyncio.CancelledError:
            if self.cancelled and pending.cancelled():
                raise Cancelled("the caller disconnected") from None
            raise

    def cancel(self) -> None:
        """The parent request was cancelled."""
        self.cancelled = True
        self.stop()
        asyncio.get_running_loop().call_later(CANCEL_GRACE_S, self._stop_waiting)

    def stop(self) -> None:
        """Have the peer end the stream."""
        if self._sending is not None:
            self._sending.add_done_callback(self._stop_now)

    def _stop_now(self, sending: asyncio.Future[AsyncIterator[R]]) -> None:
        self._context.stop_generating()
        if not sending.cancelled():
            sending.exception()

    def _stop_waiting(self) -> None:
        self._grace_is_over = True
        if self._pending is not None:
            self._pending.cancel()


class _RoutedRequest:
    """A request that the runtime's KV router counts as load of its instance until `free`. Without a router, a no-op."""

    __slots__ = ("_id", "_prefilled", "_router")

    def __init__(self, router: _core.KvRouter | None, request_id: str) -> None:
        self._router = router
        self._id = request_id
        self._prefilled = router is None

    @property
    def is_routed(self) -> bool:
        """Whether a KV router chooses the instance."""
        return self._router is not None

    async def route(self, request: Wire) -> tuple[Wire, int]:
        """Return the request to send, with its data-parallel rank, and the instance that the router chooses.

        Raises PeerLost if it can choose none.
        """
        assert self._router is not None, "routes only with a router"
        given = request.get("routing")
        routing: Mapping[str, object] = given if isinstance(given, dict) else {}
        try:
            instance, dp_rank, _ = await self._router.best_worker(
                request.get("token_ids") or [],
                request_id=self._id,
                lora_name=routing.get("lora_name"),
                routing_constraints=_constraints(routing),
                strict_priority=routing.get("strict_priority") or 0,
                cache_namespace=routing.get("cache_salt"),
            )
        except Exception as error:
            if type(error) is not Exception:
                raise
            raise PeerLost(f"no worker can take the request: {error}") from error  # another pool may have one
        return {**request, "routing": {**routing, "dp_rank": dp_rank}}, instance

    def mark_prefilled(self) -> None:
        """The prompt has been computed. Only the first call counts."""
        if not self._prefilled and self._router is not None:
            self._prefilled = True
            self._router.mark_prefill_complete(self._id).add_done_callback(_log_failure)

    def free(self) -> None:
        """The request has ended."""
        if self._router is not None:
            self._router.free(self._id).add_done_callback(_log_failure)


def _constraints(routing: Mapping[str, object]) -> _core.RoutingConstraints | None:
    """Return the taints that a request requires and prefers, if it names any."""
    given = routing.get("routing_constraints")
    if not isinstance(given, dict):
        return None
    return _core.RoutingConstraints(set(given.get("required_taints") or ()), dict(given.get("preferred_taints") or {}))


def _log_failure(update: asyncio.Future[None]) -> None:
    """A failed update makes the router's next choice slightly worse, and nothing else."""
    if not update.cancelled() and (error := update.exception()) is not None:
        log.debug("the KV router did not take an update: %r", error)
