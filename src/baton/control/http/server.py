"""The system server: `/live`, `/health`, `/metrics` and the control API of one process, in its event loop.

It starts before everything else and stops last, so its `Subject` is set later.
"""

import asyncio
import logging
from typing import Protocol

import msgspec
from aiohttp import web
from aiohttp.typedefs import Handler, Middleware

from baton import __version__
from baton.config.listeners import open_listener
from baton.control.http.command_table import PREFIX
from baton.control.http.connections import DEFAULT_LIMITS, ConnectionLimits, LimitedConnections
from baton.control.http.control_api import ControlApi, Controlled, Forbidden
from baton.control.http.host_check import is_own_host
from baton.control.http.openapi import document
from baton.control.http.replies import error_reply, json_reply, reply_of
from baton.control.http.schemas import Health

log = logging.getLogger(__name__)

BACKLOG = 128
STOP_TIMEOUT_S = 1.0
METRICS_TYPE = "text/plain; version=0.0.4; charset=utf-8"
STARTING = Health(ready=False, state="starting")


class Subject(Controlled, Protocol):
    """The process that a system server reports on. Called in the event loop."""

    def health(self) -> Health:
        """Return the health of the process. Cheap."""

    async def metrics(self) -> str:
        """Return all metrics as Prometheus text, within seconds."""


class SystemServer:
    """Listens from `start` to `aclose`. Until it has a subject, the state is "starting".

    With a token it offers the control API, to requests that bring the token.
    """

    def __init__(
        self,
        host: str,
        port: int,
        *,
        token: str | None = None,
        limits: ConnectionLimits = DEFAULT_LIMITS,
    ) -> None:
        self._host = host
        self._port = port
        self._limits = limits
        self._address = ""
        self._control = ControlApi(token, lambda: self.subject, limits) if token is not None else None
        self._connections: LimitedConnections | None = None
        self._runner: web.AppRunner | None = None
        self._server: asyncio.Server | None = None
        self.subject: Subject | None = None

    @property
    def port(self) -> int:
        """The port it listens on; after `start`, never 0."""
        return self._port

    @property
    def address(self) -> str:
        """The IP address it listens on, after `start`."""
        return self._address

    @property
    def url(self) -> str:
        """The URL of the server."""
        return f"http://[{self._host}]:{self._port}" if ":" in self._host else f"http://{self._host}:{self._port}"

    async def start(self) -> None:
        """Listen. Raises ConfigError, naming the flag, if the address cannot be used."""
        listener = open_listener(self._host, self._port, BACKLOG, "--system-host", "--system-port")
        self._address, self._port = listener.getsockname()[:2]
        self._runner = web.AppRunner(
            self._app(), access_log=None, handle_signals=False, shutdown_timeout=STOP_TIMEOUT_S
        )
        await self._runner.setup()
        assert self._runner.server is not None
        self._connections = LimitedConnections(self._runner.server, self._limits)
        loop = asyncio.get_running_loop()
        self._server = await loop.create_server(self._connections, sock=listener, backlog=BACKLOG)

    async def aclose(self) -> None:
        """Stop listening; running requests get `STOP_TIMEOUT_S`. Idempotent, and valid before `start`."""
        runner, self._runner = self._runner, None
        if self._server is not None:
            self._server.close()
        if runner is not None:
            await runner.cleanup()

    def _app(self) -> web.Application:
        app = web.Application(middlewares=[self._middleware()])
        app.router.add_get("/live", self._live)
        app.router.add_get("/health", self._health)
        app.router.add_get("/metrics", self._metrics)
        if self._control is not None:
            app.router.add_get("/openapi.json", self._openapi)
            self._control.add_to(app)
        return app

    def _middleware(self) -> Middleware:
        @web.middleware
        async def count_and_reply(request: web.Request, handler: Handler) -> web.StreamResponse:
            assert self._connections is not None
            with self._connections.serving(request.transport):
                return await self._reply(request, handler)

        return count_and_reply

    async def _reply(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        host = request.headers.get("Host", "")
        if not is_own_host(host, self._address, self._host):
            message = f"this server has no name {host!r}; use localhost or its IP address"
            return error_reply(Forbidden.status, Forbidden.code, message)
        if not request.path.startswith(PREFIX):
            return (await reply_of(request, handler)).response
        if self._control is None:
            return error_reply(404, "control_off", "the control API is off; see --control and --control-token")
        return await self._control.serve(request, handler)

    async def _live(self, _: web.Request) -> web.Response:
        return web.json_response({"live": True})

    async def _health(self, _: web.Request) -> web.Response:
        health = self.subject.health() if self.subject is not None else STARTING
        return json_reply(health, 200 if health.ready else 503)

    async def _metrics(self, _: web.Request) -> web.Response:
        text = await self.subject.metrics() if self.subject is not None else ""
        return web.Response(body=text.encode(), headers={"Content-Type": METRICS_TYPE})

    async def _openapi(self, _: web.Request) -> web.Response:
        return web.Response(body=msgspec.json.encode(document(__version__)), content_type="application/json")
