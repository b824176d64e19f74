"""A runtime inside one process, for tests: the same contract as the real one, without sockets."""

import asyncio
import itertools
import logging
from collections.abc import AsyncGenerator, Callable, Mapping
from contextlib import aclosing
from typing import Any

from baton.errors import BatonError, Cancelled, Draining, EngineFailed, InvalidRequest, PeerLost
from baton.ports.runtime import Context, ModelCard, Rep, Req, Service, Wire
from baton.protocol.codec import DecodeError
from baton.protocol.events import LoadSnapshot, Reading

log = logging.getLogger(__name__)

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
        """The caller disconnects."""
        if not self._cancelled:
            self._cancelled = True
            for callback in self._callbacks:
                callback()


class MemoryEndpoint:
    """One served endpoint. `registered`: discovery has it. `published`: the readings that routers got.

    `adapters`: the LoRA adapters that discovery has.
    """

    def __init__(self, instance_id: int, service: Service[Any, Any]) -> None:
        self._instance_id = instance_id
        self.service = service
        self.card: ModelCard | None = None
        self.registered = True
        self.should_be_registered = True
        self.adapters: set[str] = set()
        self.published: list[Reading] = []
        self.running: set[asyncio.Task[None]] = set()

    @property
    def instance_id(self) -> int:
        """See `Endpoint.instance_id`."""
        return self._instance_id

    @property
    def is_registered(self) -> bool:
        """See `Endpoint.is_registered`."""
        return self.registered

    async def register_model(self, card: ModelCard) -> None:
        """See `Endpoint.register_model`."""
        self.card = card

    async def register_adapter(self, name: str) -> None:
        """See `Endpoint.register_adapter`."""
        if self.card is not None and name in (self.card.name, *self.card.other_names):
            raise InvalidRequest(f"name: {name!r} is a name of the model")
        self.adapters.add(name)

    async def deregister_adapter(self, name: str) -> None:
        """See `Endpoint.deregister_adapter`."""
        self.adapters.discard(name)

    def publish(self, reading: Reading) -> None:
        """See `Endpoint.publish`."""
        if self.card is not None and (self.card.kv_events or isinstance(reading, LoadSnapshot)):
            self.published.append(reading)

    async def deregister(self) -> None:
        """See `Endpoint.deregister`."""
        self.registered = self.should_be_registered = False

    async def register(self) -> None:
        """See `Endpoint.register`."""
        self.registered = self.should_be_registered = True

    def start(self, request: Wire, context: MemoryContext) -> "MemoryCall":
        """Start to serve `request`."""
        call = MemoryCall(self.service, request, context)
        self.running.add(call.task)
        call.task.add_done_callback(self.running.discard)
        return call

    async def aclose(self) -> None:
        """Cancel running requests and wait for them."""
        self.registered = False
        for task in self.running:
            task.cancel()
        if self.running:
            await asyncio.wait(self.running)


class MemoryCall:
    """One request: the handler runs in a task and its replies wait in a queue."""

    def __init__(self, service: Service[Any, Any], request: Wire, context: MemoryContext) -> None:
        self._service = service
        self._request = request
        self._context = context
        self.replies: asyncio.Queue[Wire | BatonError | None] = asyncio.Queue()
        self.task = asyncio.create_task(self._run())

    def cancel(self) -> None:
        """The caller disconnects: `on_cancel` is called first, and then the handler is closed."""
        self._context.cancel()
        asyncio.get_running_loop().call_soon(self.task.cancel)

    def _send_now(self, reply: object) -> bool:
        self.replies.put_nowait(self._service.encode(reply))
        return True

    async def _run(self) -> None:
        end: BatonError | None = None
        try:
            decoded = self._service.decode(self._request)
            async with aclosing(self._service.handle(decoded, self._context, self._send_now)) as replies:
                async for reply in replies:
                    self._send_now(reply)
        except BatonError as error:
            end = error
        except DecodeError as error:
            end = InvalidRequest(str(error))
        except asyncio.CancelledError:
            end = Cancelled("the call was cancelled")
        except Exception as error:
            log.error("unexpected error in a handler", exc_info=error)
            end = EngineFailed("internal error")
        self.replies.put_nowait(end)


class MemoryClient:
    """Calls the endpoints of one path, round robin."""

    def __init__(self, endpoints: list[MemoryEndpoint]) -> None:
        self._endpoints = endpoints
        self._turn = itertools.count()

    def instances(self) -> list[int]:
        """See `Client.instances`."""
        return [endpoint.instance_id for endpoint in self._endpoints if endpoint.registered]

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
        context = MemoryContext(trace_headers=parent.trace_headers if parent else None)
        call = self._choose(instance).start(request, context)
        if parent is not None:
            parent.on_cancel(call.cancel)
        try:
            while (reply := await call.replies.get()) is not None:
                if isinstance(reply, BatonError):
                    raise reply
                yield reply
        finally:
            if not call.task.done():
                call.cancel()

    def _choose(self, instance: int | None) -> MemoryEndpoint:
        registered = [e for e in self._endpoints if e.registered and instance in (None, e.instance_id)]
        if not registered:
            raise PeerLost("no such instance" if instance else "no instance")
        return registered[next(self._turn) % len(registered)]


class MemoryRuntime:
    """A Runtime (see `ports/runtime.py`) with everything in one process. `can_restore`: discovery accepts `restore`."""

    def __init__(self) -> None:
        self.endpoints: dict[str, list[MemoryEndpoint]] = {}
        self.can_restore = True
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

    async def client(self, path: str, kv_block_size: int | None = None) -> MemoryClient:
        """See `Runtime.client`."""
        return MemoryClient(self.endpoints.setdefault(path, []))

    async def restore(self) -> None:
        """See `Runtime.restore`."""
        if not self.can_restore:
            raise PeerLost("discovery does not answer")
        for endpoints in self.endpoints.values():
            for endpoint in endpoints:
                endpoint.registered = endpoint.should_be_registered

    async def metrics(self) -> str:
        """See `Runtime.metrics`."""
        return ""

    async def shutdown(self) -> None:
        """See `Runtime.shutdown`."""
        self._stopped = True
        for endpoints in self.endpoints.values():
            for endpoint in endpoints:
                await endpoint.aclose()
