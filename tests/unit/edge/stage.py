"""An edge between a raw client and a frontend that the test scripts."""

import asyncio
import functools
import socket
import ssl
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from types import MappingProxyType
from typing import Any

import msgspec
import uvloop

from baton.edge.access import Access, ApiKeys, KeyLimits
from baton.edge.limits import EdgeLimits
from baton.edge.models import KnownModels
from baton.edge.routes import ROUTES, Route, RouteTable
from baton.edge.server import Edge
from baton.edge.upstream import UpstreamPool
from baton.testing.bounded import eventually
from baton.timelines.ring import TimelineRing

HOST = "127.0.0.1"
WAIT_S = 10.0
TEST_S = 30.0
UNLIMITED = KeyLimits()
LIMITS = EdgeLimits()


def on_uvloop(test: Callable[..., Coroutine[Any, Any, None]]) -> Callable[..., None]:
    """Run an asynchronous test in the event loop of the product, for a bounded time."""

    @functools.wraps(test)
    def run(*args: object, **kwargs: object) -> None:
        uvloop.run(asyncio.wait_for(test(*args, **kwargs), TEST_S))

    return run


class Received(msgspec.Struct):
    """A request as the frontend got it."""

    method: str
    target: str
    headers: dict[str, str]
    body: bytes


class Frontend:
    """A frontend; `reply` writes the answer to each request but /v1/models and /health."""

    def __init__(self) -> None:
        self.received: list[Received] = []
        self.connections = 0
        self.models = ["echo"]
        self.workers = [1]
        self.lost = asyncio.Event()
        self.reply: Callable[[Received, asyncio.StreamWriter], Coroutine[object, object, None]] = reply_ok

    def _listed(self, target: str) -> object:
        if target == "/v1/models":
            return {"object": "list", "data": [{"id": name} for name in self.models]}
        if target == "/health":
            return {"instances": [{"instance_id": worker} for worker in self.workers]}
        return None

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Answer the requests of one connection."""
        self.connections += 1
        try:
            while (request := await _read_request(reader)) is not None:
                if (listed := self._listed(request.target)) is not None:
                    writer.write(whole(200, msgspec.json.encode(listed)))
                    continue
                self.received.append(request)
                replying = asyncio.ensure_future(self.reply(request, writer))
                leaving = asyncio.ensure_future(_lost(reader))
                await asyncio.wait([replying, leaving], return_when=asyncio.FIRST_COMPLETED)
                if leaving.done() and not replying.done():
                    replying.cancel()
                    self.lost.set()
                    return
                leaving.cancel()
        except ConnectionError:
            self.lost.set()
        finally:
            writer.close()


async def _lost(reader: asyncio.StreamReader) -> None:
    with suppress(AssertionError):
        await eventually(lambda: reader.at_eof() or reader.exception() is not None, TEST_S)


async def _read_request(reader: asyncio.StreamReader) -> Received | None:
    try:
        head = await reader.readuntil(b"\r\n\r\n")
    except asyncio.IncompleteReadError:
        return None
    first, *lines = head.decode().rstrip().split("\r\n")
    method, target, _ = first.split(" ")
    headers = {name: value for name, _, value in (line.partition(": ") for line in lines)}
    body = await reader.readexactly(int(headers.get("content-length", "0")))
    return Received(method, target, headers, body)


def whole(status: int, body: bytes, content_type: str = "application/json") -> bytes:
    """Return a whole answer."""
    return f"HTTP/1.1 {status} X\r\nContent-Type: {content_type}\r\nContent-Length: {len(body)}\r\n\r\n".encode() + body


EVENTS_HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"


def chunk(data: bytes) -> bytes:
    """Return a chunk of a chunked body."""
    return b"%x\r\n%b\r\n" % (len(data), data)


async def reply_ok(request: Received, writer: asyncio.StreamWriter) -> None:
    """Answer with the body of the request."""
    writer.write(whole(200, request.body))


def answering(data: bytes) -> Callable[[Received, asyncio.StreamWriter], Coroutine[object, object, None]]:
    """Return a reply that sends `data`."""

    async def reply(request: Received, writer: asyncio.StreamWriter) -> None:
        writer.write(data)

    return reply


class Client:
    """A raw connection to the edge."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader = reader
        self.writer = writer

    def send(self, data: bytes) -> None:
        """Send bytes."""
        self.writer.write(data)

    async def answer(self, has_body: bool = True) -> tuple[int, dict[str, str], bytes]:
        """Return status, headers and body of the next answer."""
        async with asyncio.timeout(WAIT_S):
            head = (await self.reader.readuntil(b"\r\n\r\n")).decode()
            first, *lines = head.rstrip().split("\r\n")
            headers = {name: value for name, _, value in (line.partition(": ") for line in lines)}
            assert len(headers) == len(lines), f"a header that is there twice: {lines}"
            body = b""
            if not has_body:
                pass
            elif headers.get("transfer-encoding") == "chunked":
                body = await self._chunks()
            elif "content-length" in headers:
                body = await self.reader.readexactly(int(headers["content-length"]))
            else:
                body = await self.reader.read()
            return int(first.split(" ")[1]), headers, body

    async def _chunks(self) -> bytes:
        parts = []
        while size := int(await self.reader.readuntil(b"\r\n"), 16):
            parts.append(await self.reader.readexactly(size))
            await self.reader.readexactly(2)
        await self.reader.readexactly(2)
        return b"".join(parts)

    async def closed(self) -> bytes:
        """Return the rest until the edge closes the connection."""
        async with asyncio.timeout(WAIT_S):
            try:
                return await self.reader.read()
            except ConnectionError:
                return b""


class Stage(msgspec.Struct):
    """The parts of one test."""

    edge: Edge
    frontend: Frontend
    clients: list[Client] = []

    async def connect(self, receive_buffer: int | None = None) -> Client:
        """Return a new connection to the edge, for which the kernel keeps `receive_buffer` bytes."""
        sock = socket.socket()
        if receive_buffer is not None:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer)
        sock.setblocking(False)
        try:
            await asyncio.get_running_loop().sock_connect(sock, (HOST, self.edge.port))
        except OSError:
            sock.close()
            raise
        client = Client(*await asyncio.open_connection(sock=sock))
        self.clients.append(client)
        return client

    async def close(self) -> None:
        """Close all connections of clients."""
        for client in self.clients:
            client.writer.transport.abort()
            with suppress(ConnectionError):
                await client.writer.wait_closed()


def post(path: str, body: bytes, *headers: str) -> bytes:
    """Return a POST with a content length."""
    lines = "".join(f"{header}\r\n" for header in headers)
    return (
        f"POST {path} HTTP/1.1\r\nHost: a\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n"
        f"{lines}\r\n".encode()
        + body
    )


def get(path: str, *headers: str) -> bytes:
    """Return a GET."""
    lines = "".join(f"{header}\r\n" for header in headers)
    return f"GET {path} HTTP/1.1\r\nHost: a\r\n{lines}\r\n".encode()


class _UnknownModels(KnownModels):
    """Models that are not listed."""

    async def refresh(self, frontend: object, now: float) -> None:
        """See `KnownModels.refresh`."""


@asynccontextmanager
async def stage(
    *,
    keys: tuple[str, ...] = (),
    key_file: Path | None = None,
    key_limits: KeyLimits = UNLIMITED,
    limits: EdgeLimits = LIMITS,
    origins: frozenset[str] = frozenset(),
    configured: tuple[str, ...] = (),
    routes: tuple[Route, ...] = ROUTES,
    tls: ssl.SSLContext | None = None,
    reasons: Mapping[str, str | None] = MappingProxyType({}),
    timelines: TimelineRing | None = None,
    lists_models: bool = True,
) -> AsyncIterator[Stage]:
    """Run an edge in front of a scripted frontend. To list its models takes one more connection, for a moment."""
    frontend = Frontend()
    server = await asyncio.start_server(frontend.serve, HOST, 0)
    pool = UpstreamPool(HOST, server.sockets[0].getsockname()[1])
    access = Access(ApiKeys(keys, key_file, key_limits), "control-token", origins)
    edge = Edge(
        pool,
        access,
        KnownModels(configured, 60.0) if lists_models else _UnknownModels(configured, 60.0),
        limits,
        RouteTable(routes),
        tls,
        take_reason=reasons.get,
        timelines=timelines,
    )
    await edge.start(HOST, 0)
    parts = Stage(edge, frontend)
    try:
        yield parts
    finally:
        await parts.close()
        await edge.aclose()
        server.close()
