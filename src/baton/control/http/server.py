"""The system server: `/live`, `/health`, `/metrics` and the operator's routes of one worker, in its event loop.

It is the first thing of a worker to start and the last to stop, so it knows the worker only as a `Subject` that comes
later.
"""

import errno
import logging
import socket
from typing import Protocol

import msgspec
from aiohttp import web
from aiohttp.typedefs import Handler, Middleware

from baton import __version__
from baton.control.http.command_table import PREFIX
from baton.control.http.control_api import ControlRoutes, Operated
from baton.control.http.openapi import document
from baton.control.http.replies import answer, answered, refusal
from baton.control.http.schemas import Health
from baton.errors import ConfigError

log = logging.getLogger(__name__)

BACKLOG = 128
STOP_S = 1.0
METRICS_TYPE = "text/plain; version=0.0.4; charset=utf-8"
STARTING = Health(ready=False, state="starting")


class Subject(Operated, Protocol):
    """The worker that a system server tells of. Called in the event loop."""

    def health(self) -> Health:
        """Return how the worker is. Cheap."""

    async def metrics(self) -> str:
        """Return all metrics as Prometheus text, within seconds."""


class SystemServer:
    """Listens from `start` to `aclose`. Until there is a subject it is "starting"."""

    def __init__(self, host: str, port: int, *, accepts_commands: bool, token: str = "") -> None:
        self._host = host
        self._port = port
        self._control = ControlRoutes(token, lambda: self.subject) if accepts_commands else None
        self._runner: web.AppRunner | None = None
        self.subject: Subject | None = None

    @property
    def port(self) -> int:
        """Where it listens; the one that the kernel has chosen if it was to be any."""
        return self._port

    @property
    def url(self) -> str:
        """Its address."""
        return f"http://[{self._host}]:{self._port}" if ":" in self._host else f"http://{self._host}:{self._port}"

    async def start(self) -> None:
        """Listen. Raises ConfigError, naming the flag, if the address cannot be had."""
        listener = _listener(self._host, self._port)
        self._port = int(listener.getsockname()[1])
        self._runner = web.AppRunner(self._app(), access_log=None, handle_signals=False, shutdown_timeout=STOP_S)
        await self._runner.setup()
        await web.SockSite(self._runner, listener, backlog=BACKLOG).start()

    async def aclose(self) -> None:
        """Listen no more; calls that run get `STOP_S`. Idempotent, and valid before `start`."""
        runner, self._runner = self._runner, None
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
        async def answer_errors(request: web.Request, handler: Handler) -> web.StreamResponse:
            if not request.path.startswith(PREFIX):
                return (await answered(request, handler)).response
            if self._control is None:
                return refusal(404, "control_off", "this worker takes no orders; see --control and --control-token")
            return await self._control.guarded(request, handler)

        return answer_errors

    async def _live(self, _: web.Request) -> web.Response:
        return web.json_response({"live": True})

    async def _health(self, _: web.Request) -> web.Response:
        health = self.subject.health() if self.subject is not None else STARTING
        return answer(health, 200 if health.ready else 503)

    async def _metrics(self, _: web.Request) -> web.Response:
        text = await self.subject.metrics() if self.subject is not None else ""
        return web.Response(body=text.encode(), headers={"Content-Type": METRICS_TYPE})

    async def _openapi(self, _: web.Request) -> web.Response:
        return web.Response(body=msgspec.json.encode(document(__version__)), content_type="application/json")


def _listener(host: str, port: int) -> socket.socket:
    """Return a socket that listens at the first address that `host` stands for."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        listener = socket.socket(family, kind, protocol)
    except OSError as error:
        raise _unusable(host, port, error) from None
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        listener.listen(BACKLOG)
        listener.setblocking(False)
    except OSError as error:
        listener.close()
        raise _unusable(host, port, error) from None
    return listener


def _unusable(host: str, port: int, error: OSError) -> ConfigError:
    flag = "--system-port" if error.errno in (errno.EADDRINUSE, errno.EACCES) else "--system-host"
    return ConfigError(f"cannot listen on {host}:{port} ({error.strerror}); choose another with {flag}")
