"""The OpenAI frontend of ai-dynamo-runtime: HTTP, chat templates, tokenizer, routing and migration, all in Rust."""

import asyncio
import os

from dynamo import _core

from baton.config.runtime import RuntimeOptions
from baton.errors import ConfigError, EngineDead
from baton.runtimes.dynamo.inotify import explain
from baton.runtimes.dynamo.listener import refuse_unusable_address, set_nodelay
from baton.runtimes.dynamo.runtime import DynamoRuntime


class DynamoFrontend:
    """One OpenAI endpoint over every worker in discovery."""

    def __init__(
        self,
        options: RuntimeOptions,
        namespace: str,
        host: str,
        port: int,
        router: _core.RouterConfig,
        selects_by_adapter: bool,
        migrations: int,
        drain_timeout_s: float,
        backend_timeout_s: float,
    ) -> None:
        self._namespace = namespace
        self._host = host
        self._port = port
        self._router = router
        self._drain_timeout_s = drain_timeout_s
        self._migrations = migrations
        self._environment = {
            # A stream that fails before its first token gets a real HTTP status instead of a 200.
            "DYN_HTTP_PRE_COMMIT_ERROR_PEEK_MS": "200",
            "DYN_HTTP_GRACEFUL_SHUTDOWN_TIMEOUT_SECS": str(max(1, round(drain_timeout_s))),
            # Requests that name a LoRA adapter go only to workers that have it.
            "DYN_LORA_ENABLED": str(selects_by_adapter).lower(),
            # The last resort for a worker that hangs.
            "DYN_HTTP_BACKEND_STREAM_TIMEOUT_SECS": str(max(1, round(backend_timeout_s))),
        }
        self._runtime = DynamoRuntime(options, subscribes=True)
        self._served: asyncio.Future[None] | None = None

    async def start(self, timeout_s: float = 30.0) -> None:
        """Listen. On return the port accepts connections. Raises ConfigError when the address cannot be used."""
        refuse_unusable_address(self._host, self._port, "--host", "--port")
        os.environ.update(self._environment)
        await self._runtime.start()
        arguments = _core.EntrypointArgs(
            _core.EngineType.Dynamic,
            http_host=self._host,
            http_port=self._port,
            router_config=self._router,
            migration_limit=self._migrations,
            namespace=self._namespace,
        )
        try:
            async with asyncio.timeout(timeout_s):
                engine = await _core.make_engine(self._runtime.raw, arguments)
                self._served = asyncio.ensure_future(_core.run_input(self._runtime.raw, "http", engine))
                while not set_nodelay(self._port):
                    if self._served.done():
                        raise ConfigError(self._problem(self._served.exception()))
                    await asyncio.sleep(0.01)
        except TimeoutError:
            raise EngineDead(f"the frontend did not listen within {timeout_s:g} s") from None

    def _problem(self, error: BaseException | None) -> str:
        reason = f" ({explain(error)})" if error is not None else ""
        return f"the frontend cannot listen on {self._host}:{self._port}{reason}"

    async def wait(self) -> None:
        """Wait until the frontend ends by itself, which is a failure."""
        if self._served is not None:
            await asyncio.wait([self._served])

    async def stop(self) -> None:
        """Let running streams finish, for up to `drain_timeout_s`, then end."""
        await self._runtime.shutdown()
        if self._served is not None:
            # The runtime waits as long for a connection with half a request as for one with a stream.
            await asyncio.wait([self._served], timeout=self._drain_timeout_s)
