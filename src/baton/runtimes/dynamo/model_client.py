"""The runtime's own routing, called from a worker: a ModelClient over every worker of one namespace.

The runtime builds the pipeline of a frontend (selection of workers, encode and prefill before decode, migration) only
for an HTTP server, and hands its end to a factory of chat engines. So there is a server, on a loopback port that nobody
can reach, and a factory that keeps what it is given.
"""

import asyncio
import os
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing
from typing import Protocol

from dynamo import _core

from baton.config.settings import Settings
from baton.errors import EngineFailed, PeerLost
from baton.ports.runtime import Context, ModelCard, Wire
from baton.protocol.extra_options import collect_extra_options
from baton.runtimes.dynamo.client import OutgoingCall, context_of, read_replies
from baton.runtimes.dynamo.inotify import explain
from baton.runtimes.dynamo.listener import reserved_port, set_nodelay
from baton.runtimes.dynamo.model_cards import read_card
from baton.runtimes.dynamo.port_guard import PortGuard
from baton.runtimes.dynamo.routing import router_config, selects_by_adapter
from baton.runtimes.dynamo.runtime import DynamoRuntime

HOST = "127.0.0.1"
LISTEN_TIMEOUT_S = 30.0


class _Reply(Protocol):
    """A chunk, or a failure, as the runtime's routing returns it."""

    def is_error(self) -> bool: ...

    def comments(self) -> list[str] | None: ...

    def data(self) -> Wire | None: ...


class DynamoModelClient:
    """See `ModelClient`."""

    def __init__(self, runtime: DynamoRuntime, settings: Settings, namespace: str) -> None:
        """Prepare. The settings of frontends about routers and migrations apply to the workers of `namespace`."""
        self._runtime = runtime
        self._settings = settings
        self._namespace = namespace
        self._name = settings.first_name
        self._engines: dict[str, _core.RoutedEngine] = {}
        self._card: ModelCard | None = None
        self._found = asyncio.Event()
        self._served: asyncio.Future[None] | None = None
        self._guard: PortGuard | None = None

    async def start(self) -> None:
        """See `ModelClient.start`."""
        os.environ["DYN_LORA_ENABLED"] = str(selects_by_adapter(self._settings)).lower()
        try:
            async with asyncio.timeout(LISTEN_TIMEOUT_S):
                with reserved_port(HOST) as port:
                    await self._serve(port)
        except TimeoutError:
            raise PeerLost(f"the runtime did not start its routing within {LISTEN_TIMEOUT_S:g} s") from None

    async def _serve(self, port: int) -> None:
        arguments = _core.EntrypointArgs(
            _core.EngineType.Dynamic,
            http_host=HOST,
            http_port=port,
            router_config=router_config(self._settings),
            migration_limit=self._settings.migrations,
            namespace=self._namespace,
            chat_engine_factory=self._keep,
        )
        raw = self._runtime.raw
        self._served = asyncio.ensure_future(_core.run_input(raw, "http", await _core.make_engine(raw, arguments)))
        while not set_nodelay(port):
            if self._served.done():
                error = self._served.exception()
                raise PeerLost(f"the runtime cannot start its routing: {explain(error) if error else 'it has ended'}")
            await asyncio.sleep(0.01)
        self._guard = PortGuard(port)

    async def _keep(
        self, instance_id: object, card: _core.ModelDeploymentCard, engine: _core.RoutedEngine
    ) -> _core.PythonAsyncEngine:
        """The runtime has found a model, or an adapter of it, for which `engine` routes."""
        self._engines[card.name()] = engine
        if card.name() == self._name:
            self._card = read_card(card.to_json_str())
            self._found.set()
        return _core.PythonAsyncEngine(_refuse, asyncio.get_running_loop())

    async def ready(self, timeout_s: float) -> ModelCard:
        """See `ModelClient.ready`."""
        try:
            async with asyncio.timeout(timeout_s):
                await self._found.wait()
        except TimeoutError:
            raise PeerLost(
                f"no language worker serves {self._name} in namespace {self._namespace} after {timeout_s:g} s"
            ) from None
        assert self._card is not None, "found with its card"
        return self._card

    async def call(self, request: Wire, parent: Context) -> AsyncGenerator[Wire, None]:
        """See `ModelClient.call`."""
        engine = self._engines.get(str(request.get("model")), self._engines.get(self._name))
        if engine is None:
            raise PeerLost(f"no language worker serves {self._name}")
        context = context_of(parent)
        wire = collect_extra_options(request)

        async def start(call: OutgoingCall[_Reply]) -> AsyncIterator[_Reply]:
            # A call that waits for an encode or a prefill worker is stopped there: it may have no peer yet.
            parent.on_cancel(context.stop_generating)
            return await call.start(asyncio.ensure_future(engine.generate(wire, context=context)))

        call: OutgoingCall[_Reply] = OutgoingCall(context)
        async with aclosing(read_replies(call, parent, start)) as replies:
            async for reply in replies:
                if reply.is_error():
                    raise EngineFailed("; ".join(reply.comments() or ()) or "the language worker failed")
                if (data := reply.data()) is not None:
                    yield data

    def close(self) -> None:
        """See `ModelClient.close`."""
        if self._guard is not None:
            self._guard.close()


async def _refuse(request: object) -> AsyncGenerator[Wire, None]:
    """Answer nothing: nobody can reach the server whose requests come here."""
    nothing: tuple[Wire, ...] = ()
    for reply in nothing:
        yield reply
