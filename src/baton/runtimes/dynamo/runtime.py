"""A Runtime on ai-dynamo-runtime: embedded without services, and the same code on etcd, NATS and Kubernetes."""

import asyncio
import hashlib
import logging
import os
from pathlib import Path
from typing import TYPE_CHECKING

import aiohttp
import msgspec
from dynamo import _core

from baton.config.directories import discovery_directory
from baton.config.peer_tls import plain_text_planes
from baton.config.runtime import RuntimeOptions
from baton.errors import Cancelled, ConfigError, PeerLost
from baton.ports.runtime import Rep, Req, Service
from baton.runtimes.dynamo.addresses import bind_address
from baton.runtimes.dynamo.client import DynamoClient
from baton.runtimes.dynamo.deadline import in_time
from baton.runtimes.dynamo.endpoint import DynamoEndpoint
from baton.runtimes.dynamo.environment import environment
from baton.runtimes.dynamo.event_sockets import event_sockets
from baton.runtimes.dynamo.inotify import explain
from baton.runtimes.dynamo.listener import refuse_unusable_address
from baton.runtimes.dynamo.metric_units import with_base_units
from baton.runtimes.dynamo.request_server import SHUTDOWN_TIMEOUT_S, RequestServer
from baton.runtimes.dynamo.service_check import check_services

if TYPE_CHECKING:
    from baton.runtimes.dynamo.event_broker import EventBroker

log = logging.getLogger(__name__)

METRICS_TIMEOUT_S = 2.0


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
        for plane in plain_text_planes(options):
            log.warning("not encrypted: %s", plane)
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

        server = RequestServer(service, self._reader_stall_timeout_s, self._cancel_grace_s)
        endpoint = DynamoEndpoint(self.raw.endpoint(path), server, serve_name)
        self._endpoints.append(endpoint)
        try:
            async with in_time("serve an endpoint"):
                await endpoint.until_registered()
        except PeerLost:
            raise
        except Exception as error:
            raise ConfigError(f"cannot serve: {explain(error)}") from error
        return endpoint

    async def client(self, path: str, kv_block_size: int | None = None) -> DynamoClient:
        """See `Runtime.client`."""
        endpoint = self.raw.endpoint(path)
        try:
            async with in_time(f"watch {path}"):
                client = await endpoint.client()
        except PeerLost:
            raise
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
            return with_base_units(await response.text())

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
