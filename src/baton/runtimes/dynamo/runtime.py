"""A Runtime on ai-dynamo-runtime: embedded without services, and the same code on etcd, NATS and Kubernetes."""

import asyncio
import functools
import hashlib
import logging
import operator
import os
from collections.abc import Awaitable, Callable
from contextlib import aclosing
from pathlib import Path
from typing import TYPE_CHECKING, Any

import aiohttp
import msgspec
from dynamo import _core

from baton.config.directories import discovery_directory
from baton.config.runtime import RuntimeOptions
from baton.errors import BatonError, Cancelled, ConfigError, Draining, InvalidRequest, PeerLost
from baton.ports.runtime import ModelCard, Rep, Req, Service, Wire
from baton.protocol.codec import DecodeError
from baton.protocol.events import LoadSnapshot, Reading
from baton.runtimes.dynamo.addresses import bind_address
from baton.runtimes.dynamo.client import DynamoClient
from baton.runtimes.dynamo.context import DynamoContext
from baton.runtimes.dynamo.environment import environment
from baton.runtimes.dynamo.errors import to_runtime
from baton.runtimes.dynamo.event_sockets import event_sockets
from baton.runtimes.dynamo.inotify import explain
from baton.runtimes.dynamo.listener import refuse_unusable_address
from baton.runtimes.dynamo.publishers import KvEventPublisher, LoadPublisher
from baton.runtimes.dynamo.response_writer import ResponseWriter, Sender
from baton.runtimes.dynamo.routing import ROUTER_MODES, refuse_missing_taints
from baton.runtimes.dynamo.service_check import check_services
from baton.runtimes.dynamo.tool_calls import mark_requests_with_tools, refuse_tools

if TYPE_CHECKING:
    from baton.runtimes.dynamo.event_broker import EventBroker

log = logging.getLogger(__name__)

SHUTDOWN_TIMEOUT_S = 5.0
SERVE_TIMEOUT_S = 30.0
METRICS_TIMEOUT_S = 2.0

_SURFACES = {
    "chat": _core.ModelType.Chat,
    "completions": _core.ModelType.Completions,
    "embeddings": _core.ModelType.Embedding,
    "prefill": _core.ModelType.Prefill,
}
_WORKER_TYPES = {
    "aggregated": _core.WorkerType.Aggregated,
    "prefill": _core.WorkerType.Prefill,
    "decode": _core.WorkerType.Decode,
    "encode": _core.WorkerType.Encode,
}
_INPUTS = {"tokens": _core.ModelInput.Tokens, "text": _core.ModelInput.Text}


class _ResponseEnd:
    """What the runtime iterates over for one request: no items, since responses are pushed, only an end.

    A future instead of a generator: its error has no frames, so the runtime prints no traceback for a request that was
    merely refused.
    """

    __slots__ = ("_end",)

    def __init__(self, end: asyncio.Future[None]) -> None:
        self._end = end

    def __aiter__(self) -> "_ResponseEnd":
        return self

    def __anext__(self) -> asyncio.Future[None]:
        return self._end


class _RequestServer:
    """Serves the requests of one endpoint."""

    def __init__(self, service: Service[Any, Any], reader_stall_timeout_s: float, cancel_grace_s: float) -> None:
        self._service = service
        self._stall_timeout_s = reader_stall_timeout_s
        self._cancel_grace_s = cancel_grace_s
        self._loop = asyncio.get_running_loop()
        self._tasks: set[asyncio.Task[None]] = set()
        self._closing = False
        self.checks: list[Callable[[Wire], None]] = []

    def handle(self, request: Wire, context: _core.Context, response_sender: Sender) -> _ResponseEnd:
        """Called by the runtime for every request, in one of its threads; the work starts in the event loop."""
        end: asyncio.Future[None] = self._loop.create_future()
        self._loop.call_soon_threadsafe(self._start, request, DynamoContext(context), response_sender, end)
        return _ResponseEnd(end)

    def _start(self, request: Wire, context: DynamoContext, sender: Sender, end: asyncio.Future[None]) -> None:
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
        writer = ResponseWriter(sender, self._stall_timeout_s)
        encode = self._service.encode
        error: BaseException = StopAsyncIteration()
        try:
            async with aclosing(self._service.handle(request, context)) as replies:
                async for reply in replies:
                    try:
                        await writer.send(encode(reply))
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


def _finish(end: asyncio.Future[None], error: BaseException) -> None:
    """End a response, unless the runtime has dropped it because its caller disconnected."""
    if not end.done():
        end.set_exception(error)


class DynamoEndpoint:
    """See `Endpoint`."""

    def __init__(
        self, raw: _core.Endpoint, server: _RequestServer, serve_name: Callable[[str], Awaitable["DynamoEndpoint"]]
    ) -> None:
        """Serve. `serve_name` serves the same at an endpoint for another name of the model: one has one card only."""
        self._raw = raw
        self._serve_name = serve_name
        self._other_names: dict[str, DynamoEndpoint] = {}
        self._registered = True
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
        return self._is_discovered and all(other.is_registered for other in self._other_names.values())

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
        self.server.checks = _checks(card)
        try:
            await self._register(card)
        except Exception as error:
            raise ConfigError(f"cannot register the model in {card.directory}: {error}") from error
        self._card = card
        await self._load_publisher.open(self._raw)
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
            await self._register(self._card, name)
            self._adapters.add(name)

    async def deregister_adapter(self, name: str) -> None:
        """See `Endpoint.deregister_adapter`."""
        if name in self._adapters:
            await _core.unregister_model(self._raw, name)
            self._adapters.discard(name)

    async def _register(self, card: ModelCard, adapter: str | None = None) -> None:
        """Register the model of `card`, or an adapter of it."""
        await _core.register_model(
            _INPUTS[card.model_input],
            _model_type(card),
            self._raw,
            card.directory,
            card.name if adapter is None else None,
            worker_type=_WORKER_TYPES[card.worker_type],
            kv_cache_block_size=card.block_size,
            router_config=_core.RouterConfig(ROUTER_MODES[card.router]) if card.router is not None else None,
            runtime_config=_runtime_config(card),
            custom_template_path=card.chat.template if card.model_input == "tokens" else None,
            needs=[[_WORKER_TYPES[name] for name in group] for group in card.needs] or None,
            skip_model_assets=card.model_input == "text",
            lora_name=adapter,
            base_model_path=None if adapter is None else card.directory,
        )

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
        if self._registered and not self._is_discovered:
            await self._raw.register_endpoint_instance()
            if self._card is not None:
                await self._register_card(self._card)
                for adapter in sorted(self._adapters):
                    await self._register(self._card, adapter)


class DynamoRuntime:
    """See `Runtime`. One per process."""

    def __init__(
        self,
        options: RuntimeOptions,
        publishes_metrics: bool = False,
        reader_stall_timeout_s: float = 60.0,
        cancel_grace_s: float = 1.0,
        subscribes: bool = False,
    ) -> None:
        """Prepare. `subscribes`: this process routes by events, so it may have to forward those of its host."""
        options = msgspec.structs.replace(options, bind=bind_address(options))
        self._options = options
        self._publishes_metrics = publishes_metrics
        self._environment = environment(options, publishes_metrics)
        self._reader_stall_timeout_s = reader_stall_timeout_s
        self._cancel_grace_s = cancel_grace_s
        self._subscribes = subscribes
        self._broker: EventBroker | None = None
        self._raw: _core.DistributedRuntime | None = None
        self._endpoints: list[DynamoEndpoint] = []
        # Kept: the runtime logs an error when it has an update for a client that was dropped.
        self._clients: list[_core.Client] = []

    @property
    def raw(self) -> _core.DistributedRuntime:
        """The runtime's own object, once started."""
        if self._raw is None:
            raise Cancelled("the runtime is not running")
        return self._raw

    async def start(self) -> None:
        """See `Runtime.start`."""
        options = self._options
        if options.discovery == "file":
            _make_directory(discovery_directory(options))
        refuse_unusable_address(options.bind, 0, "--runtime-bind", "--runtime-bind")
        await check_services(options)
        self._start_broker()
        os.environ.update(self._environment)
        loop = asyncio.get_running_loop()
        try:
            self._raw = _core.DistributedRuntime(loop, options.discovery, options.requests, event_plane=options.events)
        except Exception as error:
            raise ConfigError(f"the runtime cannot start: {error}") from error

    def _start_broker(self) -> None:
        sockets = event_sockets(self._options)
        if sockets is None:
            return
        sockets.prepare()
        if self._subscribes:
            from baton.runtimes.dynamo.event_broker import EventBroker  # imports ZMQ, which workers do not need

            self._broker = EventBroker(sockets)
            self._broker.start()

    async def serve(self, path: str, service: Service[Req, Rep]) -> DynamoEndpoint:
        """See `Runtime.serve`."""

        async def serve_name(name: str) -> DynamoEndpoint:
            # The same on every worker, whatever the order of its names.
            return await self.serve(f"{path}-{hashlib.sha256(name.encode()).hexdigest()[:12]}", service)

        server = _RequestServer(service, self._reader_stall_timeout_s, self._cancel_grace_s)
        endpoint = DynamoEndpoint(self.raw.endpoint(path), server, serve_name)
        self._endpoints.append(endpoint)
        try:
            async with asyncio.timeout(SERVE_TIMEOUT_S):
                await endpoint.until_registered()
        except TimeoutError:
            raise ConfigError(f"this process was not registered in discovery within {SERVE_TIMEOUT_S:g} s") from None
        except Exception as error:
            raise ConfigError(f"cannot serve: {explain(error)}") from error
        return endpoint

    async def client(self, path: str, kv_block_size: int | None = None) -> DynamoClient:
        """See `Runtime.client`."""
        endpoint = self.raw.endpoint(path)
        try:
            client = await endpoint.client()
        except Exception as error:
            raise ConfigError(f"cannot watch {path} in discovery: {explain(error)}") from error
        self._clients.append(client)
        if kv_block_size is None:
            return DynamoClient(client)
        return DynamoClient(client, _core.KvRouter(endpoint, kv_block_size, _core.KvRouterConfig()))

    async def restore(self) -> None:
        """See `Runtime.restore`."""
        for endpoint in self._endpoints:
            try:
                await endpoint.restore()
            except Exception as error:
                raise PeerLost(f"discovery does not accept this process again: {error}") from error

    async def metrics(self) -> str:
        """See `Runtime.metrics`. The runtime serves them only over HTTP, on a loopback port."""
        url = self._raw.system_status_server_url() if self._raw is not None and self._publishes_metrics else None
        if url is None:
            return ""
        timeout = aiohttp.ClientTimeout(total=METRICS_TIMEOUT_S)
        async with aiohttp.ClientSession(timeout=timeout) as session, session.get(f"{url}/metrics") as response:
            return await response.text()

    async def shutdown(self) -> None:
        """See `Runtime.shutdown`."""
        broker, self._broker = self._broker, None
        if broker is not None:
            await broker.stop()
        raw, self._raw = self._raw, None
        if raw is None:
            return
        await asyncio.gather(*(endpoint.aclose() for endpoint in self._endpoints))
        raw.shutdown()
        if self._endpoints:
            _, pending = await asyncio.wait(
                [endpoint.served for endpoint in self._endpoints], timeout=SHUTDOWN_TIMEOUT_S
            )
            if pending:
                log.warning("%d endpoints did not end within %g s", len(pending), SHUTDOWN_TIMEOUT_S)


def _make_directory(directory: Path) -> None:
    try:
        directory.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(
            f"cannot create {directory} for discovery ({error.strerror}); choose another with --runtime-directory"
        ) from None


def _model_type(card: ModelCard) -> _core.ModelType:
    surfaces = [_SURFACES[surface] for surface in sorted(card.surfaces)]
    return functools.reduce(operator.or_, surfaces) if surfaces else _core.ModelType.Empty


def _checks(card: ModelCard) -> list[Callable[[Wire], None]]:
    """Return what refuses the requests that this worker must not serve, although a frontend sends them."""
    missing_taints = functools.partial(refuse_missing_taints, taints=_taints(card))
    return [missing_taints, refuse_tools] if _lacks_tool_calls(card) else [missing_taints]


def _taints(card: ModelCard) -> frozenset[str]:
    """Return all names that requests can require of the worker; the runtime adds one for its place."""
    place = card.locality
    return card.taints if place is None else card.taints | {f"dynamo.topology/{place.domain}={place.value}"}


def _lacks_tool_calls(card: ModelCard) -> bool:
    """Whether the frontend renders prompts for the model, but cannot parse its tool calls."""
    return card.model_input == "tokens" and card.chat.tool_call_parser is None


def _runtime_config(card: ModelCard) -> _core.ModelRuntimeConfig:
    config = _core.ModelRuntimeConfig()
    config.context_length = card.context_length
    config.total_kv_blocks = card.total_blocks
    config.max_num_seqs = card.max_running
    if card.max_batch_tokens is not None:
        config.max_num_batched_tokens = card.max_batch_tokens
    config.data_parallel_size = card.dp_size
    config.kv_event_publishing_enabled = card.kv_events
    config.enable_local_indexer = card.kv_events
    config.tool_call_parser = card.chat.tool_call_parser
    config.reasoning_parser = card.chat.reasoning_parser
    if _lacks_tool_calls(card):
        mark_requests_with_tools(config)
    config.taints = set(card.taints)
    if card.locality is not None:
        config.topology_domains = {card.locality.domain: card.locality.value}
        config.kv_transfer_domain = card.locality.domain
        config.kv_transfer_enforcement = card.locality.enforcement
    if card.handoff_host is not None and card.handoff_port is not None:
        config.set_disaggregated_endpoint(card.handoff_host, card.handoff_port)
    if card.worker_type == "encode" or any("encode" in group for group in card.needs):
        # The frontend passes an encode worker's result on only if both workers set this.
        config.set_engine_specific("encoder_result_handoff", "true")
    return config
