"""Where test media come from: real servers on loopback, and names that resolve as a test wants."""

import base64
import io
import random
import socket
import struct
import zlib
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager
from typing import Any

from aiohttp import web
from aiohttp.abc import AbstractResolver, ResolveResult
from PIL import Image

from baton.config.media import MediaOptions
from baton.protocol.media import MediaUrl

LOCAL_NETWORK = "127.0.0.0/8"
LOCAL = MediaOptions(private=LOCAL_NETWORK, max_bytes=1000)
PLACE = "multi_modal_data.image_url[0]"
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


def media_url(url: str, modality: str = "image") -> MediaUrl:
    return MediaUrl(modality=modality, url=url, place=PLACE)


def png(width: int = 3, height: int = 2) -> bytes:
    file = io.BytesIO()
    Image.new("RGB", (width, height), (1, 2, 3)).save(file, "PNG")
    return file.getvalue()


def png_of(width: int, height: int, rows: bytes, bits: int = 8) -> bytes:
    """Return a PNG in RGB with this header, whether `rows` fit it or not."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    header = struct.pack(">IIBBBBB", width, height, bits, 2, 0, 0, 0)
    parts = chunk(b"IHDR", header), chunk(b"IDAT", zlib.compress(rows)), chunk(b"IEND", b"")
    return b"\x89PNG\r\n\x1a\n" + b"".join(parts)


def png_that_claims(width: int, height: int) -> bytes:
    return png_of(width, height, bytes(100))


class Site:
    """A server with one handler for every path. Requested paths are recorded."""

    def __init__(self, handler: Handler) -> None:
        self.requests: list[str] = []
        self.port = 0
        self._handler = handler

    def url(self, path: str = "/", host: str = "127.0.0.1") -> str:
        return f"http://{host}:{self.port}{path}"

    async def answer(self, request: web.Request) -> web.StreamResponse:
        self.requests.append(request.path)
        return await self._handler(request)


@asynccontextmanager
async def site(handler: Handler) -> AsyncIterator[Site]:
    server = Site(handler)
    app = web.Application()
    app.router.add_get("/{path:.*}", server.answer)
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    listener = web.TCPSite(runner, "127.0.0.1", 0)
    await listener.start()
    server.port = runner.addresses[0][1]
    try:
        yield server
    finally:
        await runner.cleanup()


class FakeResolver(AbstractResolver):
    """A resolver that returns its addresses one by one, and then always the last."""

    def __init__(self, *addresses: str) -> None:
        self.addresses = list(addresses)
        self.lookups = 0

    async def resolve(self, host: str, port: int = 0, family: Any = socket.AF_INET) -> list[ResolveResult]:
        self.lookups += 1
        address = self.addresses.pop(0) if len(self.addresses) > 1 else self.addresses[0]
        return [
            ResolveResult(hostname=host, host=address, port=port, family=socket.AF_INET, proto=0, flags=0),
        ]

    async def close(self) -> None:
        pass


def data_url(content: bytes, media_type: str = "image/png") -> str:
    return f"data:{media_type};base64,{base64.b64encode(content).decode()}"


def damaged(data: bytes, count: int) -> Iterator[bytes]:
    """Yield `count` copies of `data` with bytes that are changed, cut out or put in. The same ones in every run."""
    chance = random.Random(len(data))
    for _ in range(count):
        copy = bytearray(data)
        for _ in range(chance.choice((1, 2, 8, 40))):
            at = chance.randrange(len(copy) + 1)
            match chance.randrange(4):
                case 0:
                    copy[at : at + 4] = chance.choice((b"\xff" * 4, bytes(4), b"\x7f\xff\xff\xff"))
                case 1:
                    del copy[at : at + chance.randrange(1, 20)]
                case 2:
                    copy[at:at] = chance.randbytes(chance.randrange(1, 20))
                case _:
                    copy[at : at + 1] = chance.randbytes(1)
        yield bytes(copy)
