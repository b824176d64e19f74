"""Fetching from a real server on loopback: content, refusals and their messages."""

import asyncio
import base64
import io
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest
from aiohttp import web
from aiohttp.abc import AbstractResolver, ResolveResult
from PIL import Image

from baton.config.media import MediaOptions
from baton.errors import InvalidRequest
from baton.media.fetch import MAX_HOPS, Fetcher
from baton.media.images import check_image, decode_image
from baton.media.loader import PolicyLoader
from baton.media.policy import Policy
from baton.protocol.media import MediaFile, MediaUrl
from baton.testing import eventually, run_bounded

LOCAL = MediaOptions(private="127.0.0.0/8", max_bytes=1000)
PLACE = "multi_modal_data.image_url[0]"
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


def media_url(url: str, modality: str = "image") -> MediaUrl:
    return MediaUrl(modality=modality, url=url, place=PLACE)


def png(width: int = 3, height: int = 2) -> bytes:
    file = io.BytesIO()
    Image.new("RGB", (width, height), (1, 2, 3)).save(file, "PNG")
    return file.getvalue()


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


async def fetch(url: str, options: MediaOptions = LOCAL, names: FakeResolver | None = None) -> bytes:
    fetcher = Fetcher(Policy(options), names)
    try:
        return await fetcher.fetch(media_url(url))
    finally:
        await fetcher.close()


def assert_refused(url: str, reason: str, options: MediaOptions = LOCAL) -> None:
    async def body() -> None:
        with pytest.raises(InvalidRequest, match=reason) as refusal:
            await fetch(url, options)
        assert refusal.value.message.startswith(f"{PLACE}: ")
        assert refusal.value.status == 400

    run_bounded(body())


async def respond(content: bytes) -> web.StreamResponse:
    return web.Response(body=content)


def test_content_is_fetched() -> None:
    async def body() -> None:
        async with site(lambda _: respond(b"content")) as server:
            assert await fetch(server.url("/a?b=c")) == b"content"

    run_bounded(body())


def test_loopback_is_not_contacted_unless_allowed() -> None:
    async def body() -> None:
        async with site(lambda _: respond(b"secret")) as server:
            for host in ("127.0.0.1", "localhost", "127.1", "2130706433", "0x7f000001"):
                with pytest.raises(InvalidRequest, match=r"public|address|found"):
                    await fetch(server.url(host=host), MediaOptions())
            assert server.requests == []

    run_bounded(body())


def test_d25_name_that_resolves_to_loopback_is_not_contacted() -> None:
    async def body() -> None:
        async with site(lambda _: respond(b"secret")) as server:
            with pytest.raises(InvalidRequest, match="not public"):
                await fetch(server.url(host="images.example.com"), MediaOptions(), FakeResolver("127.0.0.1"))
            assert server.requests == []

    run_bounded(body())


def test_only_the_checked_address_is_connected_to() -> None:
    """The name resolves to an allowed address first and to another one at the next lookup."""

    async def body() -> None:
        async with site(lambda _: respond(b"secret")) as server:
            names = FakeResolver(
                "127.0.0.9", "127.0.0.1"
            )  # the server is at the second address; only the first is allowed
            allowed = MediaOptions(private="127.0.0.9/32")
            with pytest.raises(InvalidRequest, match="cannot be reached"):
                await fetch(server.url(host="images.example.com"), allowed, names)
            assert names.lookups == 1
            with pytest.raises(InvalidRequest, match="not public"):
                await fetch(server.url(host="images.example.com"), allowed, names)
            assert server.requests == []

    run_bounded(body())


def test_every_redirect_is_checked() -> None:
    async def body() -> None:
        async def redirect(request: web.Request) -> web.StreamResponse:
            targets = {"/private": "http://10.0.0.1/", "/file": "file:///etc/passwd", "/near": "end"}
            if request.path == "/end":
                return web.Response(body=b"the end")
            raise web.HTTPFound(targets.get(request.path, "/round"))

        async with site(redirect) as server:
            assert await fetch(server.url("/near")) == b"the end"
            with pytest.raises(InvalidRequest, match="not public"):
                await fetch(server.url("/private"))
            with pytest.raises(InvalidRequest, match="only http"):
                await fetch(server.url("/file"))
            server.requests.clear()
            with pytest.raises(InvalidRequest, match="redirects more than"):
                await fetch(server.url("/round"))
            assert len(server.requests) == MAX_HOPS

    run_bounded(body())


@pytest.mark.parametrize("has_length", [True, False])
def test_content_over_the_limit_is_not_read_to_its_end(has_length: bool) -> None:
    async def body() -> None:
        sent = 0

        async def flood(request: web.Request) -> web.StreamResponse:
            nonlocal sent
            response = web.StreamResponse(headers={"Content-Length": str(10**9)} if has_length else {})
            await response.prepare(request)
            while sent < 10**9:
                await response.write(bytes(100_000))
                sent += 100_000
            return response

        async with site(flood) as server:
            with pytest.raises(InvalidRequest, match="larger than the limit of 1000 bytes"):
                await fetch(server.url())
            assert sent < 10**9

    run_bounded(body())


def test_fetch_times_out() -> None:
    async def body() -> None:
        never = asyncio.Event()

        async def wait(_: web.Request) -> web.StreamResponse:
            await never.wait()
            return web.Response()

        async with site(wait) as server:
            options = MediaOptions(private="127.0.0.0/8", timeout_s=0.05)
            with pytest.raises(InvalidRequest, match=r"longer than 0\.05 s"):
                await fetch(server.url(), options)
            never.set()

    run_bounded(body())


def test_error_response_is_reported_by_its_status_only() -> None:
    async def body() -> None:
        async def deny(_: web.Request) -> web.StreamResponse:
            return web.Response(status=403, text="internal details")

        async with site(deny) as server:
            with pytest.raises(InvalidRequest, match="status 403") as refusal:
                await fetch(server.url())
            assert "internal" not in refusal.value.message

    run_bounded(body())


def test_unreachable_host_is_an_invalid_request() -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        assert_refused(f"http://127.0.0.1:{unused.getsockname()[1]}/", "cannot be reached")


@pytest.mark.parametrize("url", ["http://", "http://[::1", "https://exa mple.com/", "http://example.com:99999/"])
def test_invalid_url_is_refused(url: str) -> None:
    assert_refused(url, "not a URL|no host|found")


def test_cancelled_fetch_closes_the_connection() -> None:
    async def body() -> None:
        gone = asyncio.Event()

        async def wait(request: web.Request) -> web.StreamResponse:
            response = web.StreamResponse()
            await response.prepare(request)
            try:
                while True:
                    await response.write(b".")
                    await asyncio.sleep(0.01)
            except (ConnectionResetError, asyncio.CancelledError):
                gone.set()
                raise

        async with site(wait) as server:
            fetching = asyncio.create_task(fetch(server.url(), MediaOptions(private="127.0.0.0/8")))
            await eventually(lambda: bool(server.requests))
            fetching.cancel()
            with pytest.raises(asyncio.CancelledError):
                await fetching
            await gone.wait()

    run_bounded(body())


def test_data_urls_are_decoded() -> None:
    async def body() -> None:
        coded = base64.b64encode(b"\x00\x01picture").decode()
        assert await fetch(f"data:image/png;base64,{coded}") == b"\x00\x01picture"
        assert await fetch(f"DATA:;BASE64,{coded}") == b"\x00\x01picture"
        assert await fetch("data:text/plain,a%20b") == b"a b"

    run_bounded(body())


@pytest.mark.parametrize(
    ("url", "reason"),
    [
        ("data:image/png;base64", "no data"),
        ("data:image/png;base64,@@@@", "not base64"),
        ("data:image/png;base64," + "A" * 1400, "larger"),
        ("data:text/plain," + "a" * 1001, "larger"),
    ],
)
def test_invalid_data_url_is_refused(url: str, reason: str) -> None:
    assert_refused(url, reason)


# Whole requests, and images


def test_all_media_of_a_request_are_loaded_in_order_or_none() -> None:
    async def body() -> None:
        async def answer(request: web.Request) -> web.StreamResponse:
            if request.path == "/broken":
                return web.Response(body=b"<html>")
            return web.Response(body=png(int(request.path[1:])))

        options = MediaOptions(private="127.0.0.0/8", max_items=3, max_pixels=100)
        loader = PolicyLoader(options)
        async with site(answer) as server:
            urls = [media_url(server.url(f"/{width}")) for width in (7, 5, 3)]
            assert [decode_image(file).width for file in await loader.load(urls)] == [7, 5, 3]
            with pytest.raises(InvalidRequest, match="not an image"):
                await loader.load([urls[0], media_url(server.url("/broken"))])
            with pytest.raises(InvalidRequest, match=r"51 x 2 pixels exceed the limit of 100"):
                await loader.load([media_url(server.url("/51"))])
            [sound] = await loader.load([media_url(server.url("/broken"), "audio")])
            assert sound.data == b"<html>", "only images are checked"
            server.requests.clear()
            with pytest.raises(InvalidRequest, match="4 items"):
                await loader.load([*urls, urls[0]])
            assert server.requests == []
        await loader.close()
        await loader.close()

    run_bounded(body())


def test_images_are_rotated_and_converted_to_rgb() -> None:
    file = io.BytesIO()
    exif = Image.Exif()
    exif[0x0112] = 6  # rotate by 90 degrees
    Image.new("LA", (4, 2)).convert("L").save(file, "JPEG", exif=exif)
    image = decode_image(MediaFile(modality="image", data=file.getvalue()))
    assert (image.size, image.mode) == ((2, 4), "RGB")


@pytest.mark.parametrize("data", [b"", b"\x89PNG\r\n\x1a\n", png()[:40], b"%!PS-Adobe-3.0 EPSF-3.0\n"])
def test_unreadable_image_is_refused_with_its_place(data: bytes) -> None:
    file = MediaFile(modality="image", data=data, place=PLACE)
    with pytest.raises(InvalidRequest) as refusal:
        decode_image(file)
    assert refusal.value.message.startswith(PLACE)


def test_decompression_bomb_is_refused() -> None:
    header = b"\x00\x00\xff\xff\x00\x00\xff\xff\x08\x02\x00\x00\x00"
    bomb = png()[:16] + header + png()[29:]
    with pytest.raises(InvalidRequest):
        check_image(MediaFile(modality="image", data=bomb, place=PLACE), 50_000_000)
