"""The OpenAI frontend of ai-dynamo-runtime: HTTP, chat templates, tokenizer, routing and migration, all in Rust."""

import asyncio
import os
from collections.abc import Collection, Sequence

from dynamo import _core

from baton.config.runtime import RuntimeOptions
from baton.errors import ConfigError, EngineDead
from baton.ports.runtime import ModelCard, Rep, Req, Service
from baton.runtimes.dynamo.frontend_log import FrontendLog
from baton.runtimes.dynamo.inotify import explain
from baton.runtimes.dynamo.listener import reserved_port, set_nodelay
from baton.runtimes.dynamo.model_cards import DynamoModelCards
from baton.runtimes.dynamo.port_guard import PortGuard
from baton.runtimes.dynamo.runtime import DynamoRuntime

HOST = "127.0.0.1"


class DynamoFrontend:
    """One OpenAI endpoint over every worker in discovery, on a loopback port that only this process can reach."""

    def __init__(
        self,
        options: RuntimeOptions,
        namespace: str,
        router: _core.RouterConfig,
        selects_by_adapter: bool,
        migrations: int,
        drain_timeout_s: float,
        backend_timeout_s: float,
        body_limit_mb: int,
        model_endpoints: Sequence[str] = (),
    ) -> None:
        """Prepare. `model_endpoints` are those of the processes whose models `cards` returns."""
        self._namespace = namespace
        self._model_endpoints = model_endpoints
        self._model_cards: DynamoModelCards | None = None
        self._port = 0
        self._guard: PortGuard | None = None
        self._router = router
        self._drain_timeout_s = drain_timeout_s
        self._migrations = migrations
        self._log = FrontendLog(options.log)
        self._environment = {
            # A stream that fails before its first token gets a real HTTP status instead of a 200.
            "DYN_HTTP_PRE_COMMIT_ERROR_PEEK_MS": "200",
            "DYN_HTTP_GRACEFUL_SHUTDOWN_TIMEOUT_SECS": str(max(1, round(drain_timeout_s))),
            # Requests that name a LoRA adapter go only to workers that have it.
            "DYN_LORA_ENABLED": str(selects_by_adapter).lower(),
            # The edge has checked a body; what it changes in it may make it larger.
            "DYN_HTTP_BODY_LIMIT_MB": str(2 * body_limit_mb),
            # The last resort for a worker that hangs.
            "DYN_HTTP_BACKEND_STREAM_TIMEOUT_SECS": str(max(1, round(backend_timeout_s))),
        }
        self._runtime = DynamoRuntime(options, subscribes=True)
        self._served: asyncio.Future[None] | None = None

    @property
    def port(self) -> int:
        """The loopback port it listens on, after `start`."""
        return self._port

    async def start(self, timeout_s: float = 30.0) -> None:
        """Listen. On return the port accepts connections."""
        os.environ.update(self._environment)
        self._log.open()
        await self._runtime.start()
        try:
            async with asyncio.timeout(timeout_s):
                with reserved_port(HOST) as self._port:
                    await self._listen()
            self._model_cards = DynamoModelCards(self._runtime.raw, self._model_endpoints)
        except TimeoutError:
            raise EngineDead(f"the frontend did not listen within {timeout_s:g} s") from None

    async def serve(self, path: str, service: Service[Req, Rep]) -> object:
        """See `Runtime.serve`. Valid after `start`."""
        return await self._runtime.serve(path, service)

    async def _listen(self) -> None:
        arguments = _core.EntrypointArgs(
            _core.EngineType.Dynamic,
            http_host=HOST,
            http_port=self._port,
            router_config=self._router,
            migration_limit=self._migrations,
            namespace=self._namespace,
            enable_anthropic_api=True,
        )
        engine = await _core.make_engine(self._runtime.raw, arguments)
        self._served = asyncio.ensure_future(_core.run_input(self._runtime.raw, "http", engine))
        while not set_nodelay(self._port):
            if self._served.done():
                raise ConfigError(self._problem(self._served.exception()))
            await asyncio.sleep(0.01)
        self._guard = PortGuard(self._port)

    def admit(self, source_ports: Collection[int]) -> None:
        """See `PortGuard`. Valid between `start` and `stop`."""
        if self._guard is not None:
            self._guard.admit(source_ports)

    def settle(self, source_port: int) -> None:
        """See `PortGuard`."""
        if self._guard is not None:
            self._guard.settle(source_port)

    def cards(self) -> list[ModelCard]:
        """Return the card of each process at the model endpoints that is registered now and serves clients."""
        return [] if self._model_cards is None else self._model_cards.cards()

    def _problem(self, error: BaseException | None) -> str:
        reason = f" ({explain(error)})" if error is not None else ""
        return f"the frontend cannot listen on {HOST}:{self._port}{reason}"

    async def wait(self) -> None:
        """Wait until the frontend ends by itself, which is a failure."""
        if self._served is not None:
            await asyncio.wait([self._served])

    async def stop(self) -> None:
        """Let running streams finish, for up to `drain_timeout_s`, then end."""
        if self._model_cards is not None:
            self._model_cards.close()
            self._model_cards = None
        if self._guard is not None:
            self._guard.close()
        await self._runtime.shutdown()
        if self._served is not None:
            # The runtime waits as long for a connection with half a request as for one with a stream.
            await asyncio.wait([self._served], timeout=self._drain_timeout_s)
        self._log.close()

    def take_reason(self, request_id: str) -> str | None:
        """Return why the request with this `x-request-id` has failed, None if that is not known. Forgets it."""
        return self._log.take_reason(request_id)
