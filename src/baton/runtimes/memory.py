"""A runtime inside one process, for tests: the same contract as the real one, with no sockets."""

import asyncio
import itertools
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping
from contextlib import aclosing
from typing import Any

from baton.errors import BatonError, Draining, InvalidRequest, PeerLost
from baton.ports.runtime import Context, ModelCard, Rep, Req, Service, Wire

_ids = itertools.count(1)


class MemoryContext:
    """A Context that its owner can cancel."""

    def __init__(self, context_id: str = "", trace_headers: Mapping[str, str] | None = None) -> None:
        self._id = context_id or f"memory-{next(_ids)}"
        self._trace_headers = dict(trace_headers or {})
        self._callbacks: list[Callable[[], None]] = []
        self._cancelled = False

    @property
    def id(self) -> str:
        """See `Context.id`."""
        return self._id

    @property
    def trace_headers(self) -> Mapping[str, str]:
        """See `Context.trace_headers`."""
        return self._trace_headers

    def on_cancel(self, callback: Callable[[], None]) -> None:
        """See `Context.on_cancel`."""
        if self._cancelled:
            callback()
        else:
            self._callbacks.append(callback)

    def cancel(self) -> None:
        """The caller leaves."""
        if not self._cancelled:
            self._cancelled = True
            for callback in self._callbacks:
                callback()


class MemoryEndpoint:
    """One served endpoint; `listed` tells whether discovery has it."""

    def __init__(self, instance_id: int, service: Service[Any, Any]) -> None:
        self._instance_id = instance_id
        self.service = service
        self.card: ModelCard | None = None
        self.listed = True

    @property
    def instance_id(self) -> int:
        """See `Endpoint.instance_id`."""
        return self._instance_id

    async def advertise(self, card: ModelCard) -> None:
        """See `Endpoint.advertise`."""
        self.card = card

    async def withdraw(self) -> None:
        """See `Endpoint.withdraw`."""
        self.listed = False

    async def restore(self) -> None:
        """See `Endpoint.restore`."""
        self.listed = True


class MemoryClient:
    """Calls the endpoints of one path, round robin."""

    def __init__(self, endpoints: list[MemoryEndpoint]) -> None:
        self._endpoints = endpoints
        self._turn = itertools.count()

    def instances(self) -> list[int]:
        """See `Client.instances`."""
        return [endpoint.instance_id for endpoint in self._endpoints if endpoint.listed]

    async def ready(self, timeout_s: float) -> list[int]:
        """See `Client.ready`."""
        deadline = asyncio.get_running_loop().time() + timeout_s
        while not (found := self.instances()):
            if asyncio.get_running_loop().time() >= deadline:
                raise PeerLost(f"no instance appeared within {timeout_s:g} s")
            await asyncio.sleep(0.005)
        return found

    async def call(
        self, request: Wire, instance: int | None = None, parent: Context | None = None
    ) -> AsyncGenerator[Wire, None]:
        """See `Client.call`."""
        service = self._choose(instance).service
        context = MemoryContext(trace_headers=parent.trace_headers if parent else None)
        if parent is not None:
            parent.on_cancel(context.cancel)
        try:
            decoded = service.decode(request)
        except ValueError as error:
            raise InvalidRequest(str(error)) from error
        try:
            async with aclosing(service.handle(decoded, context)) as replies:
                async for reply in replies:
                    yield service.encode(reply)
        except BatonError:
            raise
        finally:
            context.cancel()

    def _choose(self, instance: int | None) -> MemoryEndpoint:
        listed = [e for e in self._endpoints if e.listed and instance in (None, e.instance_id)]
        if not listed:
            raise PeerLost("no such instance" if instance else "no instance")
        return listed[next(self._turn) % len(listed)]


class MemoryRuntime:
    """A Runtime (see `ports/runtime.py`) with everything in one process."""

    def __init__(self) -> None:
        self.endpoints: dict[str, list[MemoryEndpoint]] = {}
        self.routes: dict[str, Callable[[Wire], Awaitable[Wire]]] = {}
        self.renderers: list[Callable[[], str]] = []
        self.is_ready = False
        self._stopped = False

    async def start(self) -> None:
        """See `Runtime.start`."""

    async def serve(self, path: str, service: Service[Req, Rep]) -> MemoryEndpoint:
        """See `Runtime.serve`."""
        if self._stopped:
            raise Draining("the runtime has shut down")
        endpoint = MemoryEndpoint(next(_ids), service)
        self.endpoints.setdefault(path, []).append(endpoint)
        return endpoint

    async def client(self, path: str) -> MemoryClient:
        """See `Runtime.client`."""
        return MemoryClient(self.endpoints.setdefault(path, []))

    def expose(self, route: str, handle: Callable[[Wire], Awaitable[Wire]]) -> None:
        """See `Runtime.expose`."""
        self.routes[route] = handle

    def expose_metrics(self, render: Callable[[], str]) -> None:
        """See `Runtime.expose_metrics`."""
        self.renderers.append(render)

    def set_ready(self, ready: bool) -> None:
        """See `Runtime.set_ready`."""
        self.is_ready = ready

    async def shutdown(self) -> None:
        """See `Runtime.shutdown`."""
        self._stopped = True
        for endpoints in self.endpoints.values():
            for endpoint in endpoints:
                endpoint.listed = False
