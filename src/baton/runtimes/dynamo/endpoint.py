"""One endpoint of this process: its entries in discovery, its events, and the models and adapters it serves."""

import asyncio
from collections.abc import Awaitable, Callable

import msgspec
from dynamo import _core

from baton.errors import Cancelled, ConfigError, InvalidRequest, PeerLost
from baton.ports.runtime import ModelCard
from baton.protocol.events import LoadSnapshot, Reading
from baton.runtimes.dynamo.deadline import in_time
from baton.runtimes.dynamo.publishers import KvEventPublisher, LoadPublisher
from baton.runtimes.dynamo.registration import register, request_checks
from baton.runtimes.dynamo.request_server import RequestServer


class DynamoEndpoint:
    """See `Endpoint`."""

    def __init__(
        self, raw: _core.Endpoint, server: RequestServer, serve_name: Callable[[str], Awaitable["DynamoEndpoint"]]
    ) -> None:
        """Serve. `serve_name` serves the same at an endpoint for another name of the model: one has one card only."""
        self._raw = raw
        self._serve_name = serve_name
        self._other_names: dict[str, DynamoEndpoint] = {}
        self._registered = True
        self._is_whole = True  # False while some of its entries in discovery are lost
        self._card: ModelCard | None = None
        self._adapters: set[str] = set()
        self._kv_publisher: KvEventPublisher | None = None
        self._load_publisher = LoadPublisher()
        self._discovered: _core.Client | None = None
        self.server = server
        self.served = asyncio.ensure_future(raw.serve_endpoint(server.handle))

    @property
    def instance_id(self) -> int:
        """See `Endpoint.instance_id`."""
        return self._raw.connection_id()

    @property
    def is_registered(self) -> bool:
        """See `Endpoint.is_registered`."""
        return (
            self._is_discovered and self._is_whole and all(other.is_registered for other in self._other_names.values())
        )

    @property
    def _is_discovered(self) -> bool:
        return self._discovered is not None and self.instance_id in self._discovered.instance_ids()

    async def until_registered(self) -> None:
        """Wait until discovery has this instance. Raises what serving failed with."""
        self._discovered = await self._raw.client()
        while not self._is_discovered:
            if self.served.done():
                self.served.result()
            await asyncio.sleep(0.005)

    async def register_model(self, card: ModelCard) -> None:
        """See `Endpoint.register_model`."""
        await self._register_card(card)
        for name in card.other_names:
            other = self._other_names[name] = await self._serve_name(name)
            await other.register_model(msgspec.structs.replace(card, name=name, other_names=()))

    async def _register_card(self, card: ModelCard) -> None:
        self.server.checks = request_checks(card)
        try:
            async with in_time("register the model"):
                await register(self._raw, card)
                await self._load_publisher.open(self._raw)
        except PeerLost:
            raise
        except Exception as error:
            raise ConfigError(f"cannot register the model in {card.directory}: {error}") from error
        self._card = card
        await self._close_kv_publisher()
        if card.kv_events:
            self._kv_publisher = KvEventPublisher(self._raw, card.block_size, card.dp_size)

    async def register_adapter(self, name: str) -> None:
        """See `Endpoint.register_adapter`."""
        if self._card is None:
            raise Cancelled("the model is not registered")
        if name == self._card.name or name in self._other_names:
            raise InvalidRequest(f"name: {name!r} is a name of the model")
        if name not in self._adapters:
            await register(self._raw, self._card, name)
            self._adapters.add(name)

    async def deregister_adapter(self, name: str) -> None:
        """See `Endpoint.deregister_adapter`."""
        if name in self._adapters:
            await _core.unregister_model(self._raw, name)
            self._adapters.discard(name)

    def publish(self, reading: Reading) -> None:
        """See `Endpoint.publish`."""
        if isinstance(reading, LoadSnapshot):
            self._load_publisher.publish(reading)
        elif self._kv_publisher is not None:
            self._kv_publisher.publish(reading)
        for other in self._other_names.values():  # routers read the events of one endpoint
            other.publish(reading)

    async def aclose(self) -> None:
        """End running requests and stop publishing. Takes `SHUTDOWN_TIMEOUT_S` at most."""
        await self.server.aclose()
        await self._close_kv_publisher()

    async def _close_kv_publisher(self) -> None:
        kv_publisher, self._kv_publisher = self._kv_publisher, None
        if kv_publisher is not None:
            await kv_publisher.close()

    async def deregister(self) -> None:
        """See `Endpoint.deregister`."""
        await self.server.flush()  # callers give up requests of an instance that leaves, also those that have ended
        for other in self._other_names.values():
            await other.deregister()
        if self._registered:
            self._registered = False
            await self._raw.unregister_endpoint_instance()

    async def register(self) -> None:
        """See `Endpoint.register`."""
        if not self._registered:
            self._registered = True
            await self._raw.register_endpoint_instance()
        for other in self._other_names.values():
            await other.register()

    async def restore(self) -> None:
        """See `Runtime.restore`. The model and the event channels are entries of their own, which are lost too."""
        if self._registered and not (self._is_discovered and self._is_whole):
            self._is_whole = False
            if not self._is_discovered:
                await self._raw.register_endpoint_instance()
            if self._card is not None:
                await self._register_card(self._card)
                for adapter in sorted(self._adapters):
                    await register(self._raw, self._card, adapter)
            self._is_whole = True
