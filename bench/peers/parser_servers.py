"""`python -m bench.peers.parser_servers NAME PORT`: servers with the routes /small and /stream, for `bench.parsers`."""

import asyncio
import sys
from collections.abc import Awaitable, Callable
from typing import Any, NamedTuple, cast

import httptools
import uvloop

from baton.edge.answer_writer import AnswerWriter
from baton.edge.counts import EdgeCounts
from baton.edge.messages import Answer, Headers, Request

HOST = "127.0.0.1"
EVENTS = 100
SMALL = b'{"object":"list","data":[]}'
EVENT = b'data: {"id":"chatcmpl-0","choices":[{"index":0,"delta":{"content":"word"},"finish_reason":null}]}\n\n'
EVENT_TYPE = "text/event-stream"


def _nothing() -> None:
    """An answer has ended."""


class PartsConnection(asyncio.Protocol):
    """The parts of the edge without its rules: httptools for requests, `AnswerWriter` for answers."""

    def __init__(self, edge: "PartsEdge") -> None:
        self._edge = edge
        self._parser = httptools.HttpRequestParser(self)
        self._request = Request()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._writer = AnswerWriter(cast(Any, self._edge), cast(asyncio.Transport, transport), _nothing, _nothing)

    def data_received(self, data: bytes) -> None:
        self._parser.feed_data(data)

    def on_message_begin(self) -> None:
        self._request = Request()

    def on_url(self, url: bytes) -> None:
        self._request.path = url.decode()

    def on_header(self, name: bytes, value: bytes) -> None:
        self._request.headers.append((name.lower(), value))

    def on_message_complete(self) -> None:
        if self._request.path == "/small":
            self._writer.write_answer(self._request, Answer(body=SMALL))
        else:
            self._edge.start(self._stream(self._request))

    async def _stream(self, request: Request) -> None:
        self._writer.write_head(request, 200, [(b"content-type", EVENT_TYPE.encode())], None)
        for _ in range(EVENTS):
            self._writer.write_body(EVENT)
            self._writer.flush()
            await asyncio.sleep(0)
        self._writer.write_end()


class PartsEdge:
    """What `AnswerWriter` needs of an edge."""

    def __init__(self) -> None:
        self.counts = EdgeCounts()
        self._tasks: set[asyncio.Task[None]] = set()

    def start(self, work: Any) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def answer_headers(self, request: Request) -> Headers:
        return [(b"x-request-id", b"0"), (b"date", b"Thu, 01 Jan 1970 00:00:00 GMT")]


async def serve_parts(port: int) -> None:
    edge = PartsEdge()
    server = await asyncio.get_running_loop().create_server(lambda: PartsConnection(edge), HOST, port)
    await server.serve_forever()


def run_parts(port: int) -> None:
    uvloop.run(serve_parts(port))


async def asgi(scope: dict[str, Any], receive: object, send: Callable[[dict[str, object]], Awaitable[None]]) -> None:
    small = scope["path"] == "/small"
    headers = [(b"content-type", b"application/json" if small else EVENT_TYPE.encode())]
    if small:
        headers.append((b"content-length", b"%d" % len(SMALL)))
    await send({"type": "http.response.start", "status": 200, "headers": headers})
    if small:
        await send({"type": "http.response.body", "body": SMALL})
        return
    for _ in range(EVENTS):
        await send({"type": "http.response.body", "body": EVENT, "more_body": True})
        await asyncio.sleep(0)
    await send({"type": "http.response.body", "body": b""})


def run_uvicorn(port: int) -> None:
    import uvicorn

    uvicorn.run(
        asgi, host=HOST, port=port, loop="uvloop", http="httptools", lifespan="off", access_log=False, log_level="error"
    )


def run_aiohttp(port: int) -> None:
    from aiohttp import web

    async def small(request: web.Request) -> web.Response:
        return web.Response(body=SMALL, content_type="application/json")

    async def stream(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse(headers={"content-type": EVENT_TYPE})
        await response.prepare(request)
        for _ in range(EVENTS):
            await response.write(EVENT)
            await asyncio.sleep(0)
        await response.write_eof()
        return response

    app = web.Application()
    app.add_routes([web.get("/small", small), web.get("/stream", stream)])
    web.run_app(app, host=HOST, port=port, loop=uvloop.new_event_loop(), access_log=None, print=lambda *_: None)


async def rsgi(scope: Any, protocol: Any) -> None:
    if scope.path == "/small":
        protocol.response_bytes(200, [("content-type", "application/json")], SMALL)
        return
    transport = protocol.response_stream(200, [("content-type", EVENT_TYPE)])
    for _ in range(EVENTS):
        await transport.send_bytes(EVENT)
        await asyncio.sleep(0)


def run_granian(port: int) -> None:
    from granian import Granian
    from granian.constants import Interfaces, Loops

    Granian(
        "bench.peers.parser_servers:rsgi",
        address=HOST,
        port=port,
        interface=Interfaces.RSGI,
        loop=Loops.uvloop,
        workers=1,
        log_enabled=False,
    ).serve()


class Server(NamedTuple):
    """One server: how it is shown, the package that it needs, and what runs it."""

    title: str
    package: str
    run: Callable[[int], None]


SERVERS = {
    "parts": Server("uvloop + httptools + `AnswerWriter` (the edge's parts)", "httptools", run_parts),
    "uvicorn": Server("uvicorn (uvloop, httptools), plain ASGI", "uvicorn", run_uvicorn),
    "aiohttp": Server("aiohttp.web (uvloop)", "aiohttp", run_aiohttp),
    "granian": Server("granian, RSGI (uvloop)", "granian", run_granian),
}

if __name__ == "__main__":
    SERVERS[sys.argv[1]].run(int(sys.argv[2]))
