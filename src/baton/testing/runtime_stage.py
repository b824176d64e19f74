"""The fixtures of `runtime_contract.py`: a runtime that serves a handler, and its callers."""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Coroutine
from contextlib import aclosing, asynccontextmanager
from typing import Any

import pytest

from baton.errors import BatonError, PeerLost
from baton.ports.runtime import Client, Context, Endpoint, PushService, Runtime, SendNow, Service, Wire
from baton.testing.bounded import run_bounded

Handle = Callable[[Wire, Context], AsyncGenerator[Wire, None]]
PushHandle = Callable[[Wire, Context, SendNow[Wire]], AsyncGenerator[Wire, None]]

PATH = "contract.component.endpoint"


class Served:
    """A served handler, with a client that has found it."""

    def __init__(self, runtime: Runtime, endpoint: Endpoint, client: Client) -> None:
        self.runtime = runtime
        self.endpoint = endpoint
        self.client = client

    async def call(self, **request: object) -> list[Wire]:
        """Return all replies to one call."""
        async with aclosing(self.client.call(dict(request))) as replies:
            return [reply async for reply in replies]

    async def until_reachable(self) -> None:
        """Wait until a call succeeds: an instance may take a moment to reach every part of a runtime."""
        deadline = asyncio.get_running_loop().time() + 15.0
        while True:
            try:
                await self.call()
                return
            except PeerLost:
                if asyncio.get_running_loop().time() > deadline:
                    raise
                await asyncio.sleep(0.01)


class Ticker:
    """A handler that replies until it is ended, and records how it ended."""

    def __init__(self) -> None:
        self.cancelled = asyncio.Event()
        self.closed = asyncio.Event()
        self.cancelled_when_closed = False

    async def handle(self, request: Wire, context: Context) -> AsyncGenerator[Wire, None]:
        """Reply every 2 ms."""
        context.on_cancel(self.cancelled.set)
        number = 0
        try:
            while True:
                yield {"number": number}
                number += 1
                await asyncio.sleep(0.002)
        finally:
            self.cancelled_when_closed = self.cancelled.is_set()
            self.closed.set()


class RuntimeStage:
    """Set-up and tear-down of every test of a runtime. A subclass overrides `make_runtime`."""

    limit_s = 30.0
    """Time limit of one test."""

    lag_limit_s = 2.0
    """The longest that a stream may block the event loop. Generous: it distinguishes blocked from slow."""

    refuses_to_block = True
    """Whether what is not read fills something, so that nothing more can be sent at once."""

    traces = True
    """Whether a call without a parent starts a trace."""

    def make_runtime(self) -> Runtime:
        """Return a runtime that has not been started and that finds no endpoints of other tests."""
        raise NotImplementedError("a runtime's contract test overrides make_runtime")

    def _run(self, body: Coroutine[Any, Any, None]) -> None:
        run_bounded(body, self.limit_s)

    def _failure(self, error: Exception, replies: int) -> BatonError:
        """Return the error that the caller gets when a handler raises `error` after `replies` that arrived."""

        async def handle(request: Wire, context: Context) -> AsyncGenerator[Wire, None]:
            for number in range(replies):
                yield {"number": number}
            raise error

        async def body() -> BatonError:
            async with self._served(handle) as served, aclosing(served.client.call({})) as call:
                assert [(await anext(call))["number"] for _ in range(replies)] == list(range(replies))
                with pytest.raises(BatonError) as caught:
                    await anext(call)
            return caught.value

        return run_bounded(body(), self.limit_s)

    @asynccontextmanager
    async def _started(self) -> AsyncIterator[Runtime]:
        runtime = self.make_runtime()
        try:
            await runtime.start()
            yield runtime
        finally:
            await runtime.shutdown()

    @asynccontextmanager
    async def _served(self, handle: Handle | Service[Wire, Wire]) -> AsyncIterator[Served]:
        async with self._started() as runtime:
            endpoint = await runtime.serve(PATH, handle if isinstance(handle, Service) else make_service(handle))
            client = await runtime.client(PATH)
            await client.ready(5.0)
            yield Served(runtime, endpoint, client)

    @asynccontextmanager
    async def _parent(self, runtime: Runtime) -> AsyncIterator[tuple[Context, Callable[[], Coroutine[Any, Any, None]]]]:
        """The context of a running call, and a function that disconnects its caller."""
        contexts: list[Context] = []
        disconnected = asyncio.Event()

        async def hold(request: Wire, context: Context) -> AsyncGenerator[Wire, None]:
            contexts.append(context)
            context.on_cancel(disconnected.set)
            yield {}
            await disconnected.wait()

        await runtime.serve("contract.parent.endpoint", make_service(hold))
        client = await runtime.client("contract.parent.endpoint")
        await client.ready(5.0)
        call = client.call({})
        await anext(call)
        try:
            yield contexts[0], call.aclose
        finally:
            await call.aclose()


def make_service(handle: Handle) -> Service[Wire, Wire]:
    """Return the service of a handler of plain dicts."""
    return Service(handle, _decode, lambda reply: reply)


def make_push_service(handle: PushHandle) -> PushService[Wire, Wire]:
    """Return the service of a handler of plain dicts that can send replies past its iterator."""
    return PushService(handle, _decode, lambda reply: reply)


def _decode(raw: object) -> Wire:
    assert isinstance(raw, dict)
    return raw
