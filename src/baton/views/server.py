"""The web server of the view: its pages, its data, and the commands and chats that it passes on."""

import asyncio
import time
from contextlib import suppress
from pathlib import Path

import msgspec
from aiohttp import web
from aiohttp.typedefs import Handler

from baton.config.listeners import open_listener
from baton.config.settings import is_loopback
from baton.control.http.replies import reply_of
from baton.control.http.token_file import generate_token
from baton.errors import BatonError, InvalidRequest
from baton.views.access import ViewAccess, add_headers
from baton.views.chat_proxy import ChatProxy
from baton.views.collector import Collector
from baton.views.deployment import ProcessFinder
from baton.views.process_client import ProcessClient
from baton.views.process_state import GONE, ProcessState
from baton.views.subscribers import event_bytes

STATIC = Path(__file__).with_name("static")
BACKLOG = 128
STOP_TIMEOUT_S = 1.0
KEEPALIVE_S = 15.0
MAX_COMMAND_BYTES = 64 << 10
MAX_CHAT_BYTES = 64 << 20
MERGED = ("1", "3", "6")
COMMANDS = frozenset(
    (
        "pause",
        "continue",
        "memory/release",
        "memory/resume",
        "cache/clear",
        "profile/start",
        "profile/stop",
    )
)
"""Those that an operator can undo, or that lose nothing but time. `baton ctl` has all."""


class NotFound(BatonError):
    """There is no such process, request or page."""

    code = "not_found"
    status = 404


class ViewServer:
    """Serves the view from `start` to `aclose`. Used in one event loop."""

    def __init__(
        self,
        finder: ProcessFinder,
        *,
        host: str = "127.0.0.1",
        port: int = 0,
        token: str = "",
        endpoint: str | None = None,
        api_key: str | None = None,
    ) -> None:
        """Prepare. Off loopback a token is needed, so one is generated if none is given.

        `endpoint` is the URL that chats go to; without it, that of the deployment's frontend.
        """
        self._finder = finder
        self._host = host
        self._port = port
        self._endpoint = endpoint
        self._api_key = api_key
        self._token = token or (None if is_loopback(host) else generate_token())
        self._client: ProcessClient | None = None
        self._chats: ChatProxy | None = None
        self._runner: web.AppRunner | None = None
        self._server: asyncio.Server | None = None
        self._collecting: asyncio.Task[None] | None = None
        self._collector: Collector | None = None

    @property
    def url(self) -> str:
        """The address for a browser, with the token if there is one; valid after `start`."""
        host = f"[{self._host}]" if ":" in self._host else self._host
        return f"http://{host}:{self._port}/" + (f"?token={self._token}" if self._token else "")

    async def start(self) -> None:
        """Listen. Raises ConfigError, naming the flag, if the address cannot be used."""
        listener = open_listener(self._host, self._port, BACKLOG, "--view-host", "--view-port")
        address, self._port = listener.getsockname()[:2]
        self._client = ProcessClient()
        self._chats = ChatProxy(self._api_key)
        self._collector = Collector(self._finder, self._client)
        self._collecting = asyncio.create_task(self._collector.run(), name="view")
        check = ViewAccess(self._token).middleware(address, self._host, self._port)
        # A browser that leaves cancels what it has asked for: so the stop button of a chat reaches the endpoint.
        self._runner = web.AppRunner(
            self._app(check),
            access_log=None,
            handle_signals=False,
            handler_cancellation=True,
            shutdown_timeout=STOP_TIMEOUT_S,
        )
        await self._runner.setup()
        assert self._runner.server is not None
        loop = asyncio.get_running_loop()
        self._server = await loop.create_server(self._runner.server, sock=listener, backlog=BACKLOG)

    async def aclose(self) -> None:
        """Stop. Idempotent, and valid before `start`."""
        if self._server is not None:
            self._server.close()
        if self._collecting is not None:
            self._collecting.cancel()
            with suppress(asyncio.CancelledError):
                await self._collecting
        if self._runner is not None:
            await self._runner.cleanup()
        for each in (self._client, self._chats):
            if each is not None:
                await each.aclose()

    @property
    def collector(self) -> Collector:
        """What the view knows; valid after `start`."""
        assert self._collector is not None
        return self._collector

    def _app(self, check: object) -> web.Application:
        app = web.Application(middlewares=[check, _errors_as_json], client_max_size=MAX_CHAT_BYTES)  # type: ignore[list-item]
        app.on_response_prepare.append(add_headers)
        app.router.add_get("/", self._page)
        app.router.add_get("/api/events", self._events)
        app.router.add_get("/api/series", self._series)
        app.router.add_get("/api/requests/{trace}", self._request)
        app.router.add_get("/api/processes/{name:.+}/about", self._process)
        app.router.add_post("/api/processes/{name:.+}/commands/{command:[a-z/]+}", self._command)
        app.router.add_get("/api/models", self._models)
        app.router.add_post("/api/chat", self._chat)
        app.router.add_get("/{file:[a-z_/]+\\.(?:js|css|svg)}", self._static)
        return app

    async def _page(self, _: web.Request) -> web.StreamResponse:
        return _file(STATIC / "index.html")

    async def _static(self, request: web.Request) -> web.StreamResponse:
        path = STATIC / request.match_info["file"]
        if not path.is_file():
            raise NotFound(f"there is no {request.path}")
        return _file(path)

    async def _events(self, request: web.Request) -> web.StreamResponse:
        """Send everything, and from then on what changes, until the browser leaves or does not read."""
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream", "Cache-Control": "no-store"})
        await response.prepare(request)
        with self.collector.watched(), self.collector.subscribers.subscribed() as queue:
            await response.write(event_bytes("snapshot", msgspec.json.encode(self.collector.snapshot())))
            while True:
                try:
                    async with asyncio.timeout(KEEPALIVE_S):
                        event = await queue.get()
                except TimeoutError:
                    event = b": nothing has changed\n\n"
                if event is None:
                    return response
                await response.write(event)

    async def _series(self, request: web.Request) -> web.StreamResponse:
        merged = request.query.get("merged", "1")
        if merged not in MERGED:
            raise InvalidRequest(f"merged: expected one of {', '.join(MERGED)}, got {merged[:20]!r}")
        return _json(self.collector.series.to_json(time.time_ns() // 1000, int(merged)))

    async def _request(self, request: web.Request) -> web.StreamResponse:
        trace = self.collector.traces.get(request.match_info["trace"])
        if trace is None:
            raise NotFound("this request is no longer among the latest")
        hops = [
            {"process": hop.process, "started_us": hop.started_us}
            | msgspec.to_builtins(hop.report)
            | {"role": hop.process_role, "served_role": hop.report.role, "state": hop.state}
            for hop in trace.hops
        ]
        trace_id = trace.root.report.trace_id or trace.id
        return _json({"id": trace.id, "trace_id": trace_id, "now_us": time.time_ns() // 1000, "hops": hops})

    async def _process(self, request: web.Request) -> web.StreamResponse:
        return _json(self._state(request).details())

    async def _command(self, request: web.Request) -> web.StreamResponse:
        """Pass a command on to a process, with its token, which the browser never gets."""
        state, command = self._state(request), request.match_info["command"]
        if command not in COMMANDS:
            raise InvalidRequest(f"the view does not offer {command!r}; use `baton ctl {state.name} {command}`")
        if request.content_type != "application/json":
            raise InvalidRequest("send the fields of the command as JSON")
        body = await _command_body(request)
        assert self._client is not None
        reply = await self._client.execute(state.address, command, body)
        return web.Response(body=reply.body, status=reply.status, content_type="application/json", headers=_FRESH)

    async def _models(self, _: web.Request) -> web.StreamResponse:
        assert self._chats is not None
        return await self._chats.models(await self._chat_endpoint())

    async def _chat(self, request: web.Request) -> web.StreamResponse:
        assert self._chats is not None
        if request.content_type != "application/json":
            raise InvalidRequest("send a chat completion request as JSON")
        return await self._chats.chat(request, await self._chat_endpoint())

    def _state(self, request: web.Request) -> ProcessState:
        name = request.match_info["name"]
        state = self.collector.processes.get(name)
        if state is None:
            raise NotFound(f"no process of this deployment is named {name!r}")
        return state

    async def _chat_endpoint(self) -> str:
        """Return the URL that chats go to. Before a browser watches, frontends are known by their names."""
        if self._endpoint is not None:
            return self._endpoint
        states = list(self.collector.processes.values()) or list(map(ProcessState, await self._finder.find()))
        found = next((each for each in states if each.role == "frontend" and each.health != GONE), None)
        if found is None:
            raise NotFound("this deployment has no frontend that the view knows: give its address with --endpoint")
        return found.address.url


async def _command_body(request: web.Request) -> bytes:
    """Return the whole body, which may arrive in parts. Raises InvalidRequest if it is too large."""
    body = bytearray()
    async for part in request.content.iter_any():
        body += part
        if len(body) > MAX_COMMAND_BYTES:
            raise InvalidRequest(f"the fields of a command may have {MAX_COMMAND_BYTES >> 10} KiB")
    return bytes(body)


_FRESH = {"Cache-Control": "no-store"}


def _json(value: object) -> web.Response:
    return web.Response(body=msgspec.json.encode(value), content_type="application/json", headers=_FRESH)


def _file(path: Path) -> web.FileResponse:
    return web.FileResponse(path, headers={"Cache-Control": "no-cache"})


@web.middleware
async def _errors_as_json(request: web.Request, handler: Handler) -> web.StreamResponse:
    return (await reply_of(request, handler)).response
