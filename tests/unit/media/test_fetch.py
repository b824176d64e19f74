"""Fetching from a real server on loopback: what comes, what is refused on the way, and how that is said."""

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


def named(url: str, modality: str = "image") -> MediaUrl:
    return MediaUrl(modality=modality, url=url, place=PLACE)


def png(width: int = 3, height: int = 2) -> bytes:
    file = io.BytesIO()
    Image.new("RGB", (width, height), (1, 2, 3)).save(file, "PNG")
    return file.getvalue()


class Site:
    """A server with one handler for every path, and how often it was asked."""

    def __init__(self, handler: Handler) -> None:
        self.asked: list[str] = []
        self.port = 0
        self._handler = handler

    def url(self, path: str = "/", host: str = "127.0.0.1") -> str:
        return f"http://{host}:{self.port}{path}"

    async def answer(self, request: web.Request) -> web.StreamResponse:
        self.asked.append(request.path)
        return await self._handler(request)


@asynccontextmanager
async def site(handler: Handler) -> AsyncIterator[Site]:
    made = Site(handler)
    app = web.Application()
    app.router.add_get("/{path:.*}", made.answer)
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    listener = web.TCPSite(runner, "127.0.0.1", 0)
    await listener.start()
    made.port = runner.addresses[0][1]
    try:
        yield made
    finally:
        await runner.cleanup()


class Names(AbstractResolver):
    """A DNS that answers with the next of its addresses, again and again with the last."""

    def __init__(self, *addresses: str) -> None:
        self.addresses = list(addresses)
        self.asked = 0

    async def resolve(self, host: str, port: int = 0, family: Any = socket.AF_INET) -> list[ResolveResult]:
        self.asked += 1
        address = self.addresses.pop(0) if len(self.addresses) > 1 else self.addresses[0]
        return [
            ResolveResult(hostname=host, host=address, port=port, family=socket.AF_INET, proto=0, flags=0),
        ]

    async def close(self) -> None:
        pass


async def fetch(url: str, options: MediaOptions = LOCAL, names: Names | None = None) -> bytes:
    fetcher = Fetcher(Policy(options), names)
    try:
        return await fetcher.fetch(named(url))
    finally:
        await fetcher.close()


def refused(url: str, why: str, options: MediaOptions = LOCAL) -> None:
    async def body() -> None:
        with pytest.raises(InvalidRequest, match=why) as refusal:
            await fetch(url, options)
        assert refusal.value.message.startswith(f"{PLACE}: ")
        assert refusal.value.status == 400

    run_bounded(body())


async def give(content: bytes) -> web.StreamResponse:
    return web.Response(body=content)


def test_what_is_there_is_fetched() -> None:
    async def body() -> None:
        async with site(lambda _: give(b"here it is")) as there:
            assert await fetch(there.url("/a?b=c")) == b"here it is"

    run_bounded(body())


def test_loopback_is_not_asked_unless_that_is_allowed() -> None:
    async def body() -> None:
        async with site(lambda _: give(b"secret")) as there:
            for host in ("127.0.0.1", "localhost", "127.1", "2130706433", "0x7f000001"):
                with pytest.raises(InvalidRequest, match=r"public|address|found"):
                    await fetch(there.url(host=host), MediaOptions())
            assert there.asked == []

    run_bounded(body())


def test_d25_a_name_that_stands_for_loopback_is_not_asked() -> None:
    async def body() -> None:
        async with site(lambda _: give(b"secret")) as there:
            with pytest.raises(InvalidRequest, match="not public"):
                await fetch(there.url(host="images.example.com"), MediaOptions(), Names("127.0.0.1"))
            assert there.asked == []

    run_bounded(body())


def test_the_address_that_was_checked_is_the_one_that_is_connected_to() -> None:
    """A name that stands for an allowed address when it is checked, and for another when it is asked again."""

    async def body() -> None:
        async with site(lambda _: give(b"secret")) as there:
            names = Names("127.0.0.9", "127.0.0.1")  # only the second one has a server, and only the first is allowed
            allowed = MediaOptions(private="127.0.0.9/32")
            with pytest.raises(InvalidRequest, match="cannot be reached"):
                await fetch(there.url(host="images.example.com"), allowed, names)
            assert names.asked == 1
            with pytest.raises(InvalidRequest, match="not public"):
                await fetch(there.url(host="images.example.com"), allowed, names)
            assert there.asked == []

    run_bounded(body())


def test_every_redirect_is_checked() -> None:
    async def body() -> None:
        async def lead_on(request: web.Request) -> web.StreamResponse:
            targets = {"/private": "http://10.0.0.1/", "/file": "file:///etc/passwd", "/near": "end"}
            if request.path == "/end":
                return web.Response(body=b"the end")
            raise web.HTTPFound(targets.get(request.path, "/round"))

        async with site(lead_on) as there:
            assert await fetch(there.url("/near")) == b"the end"
            with pytest.raises(InvalidRequest, match="not public"):
                await fetch(there.url("/private"))
            with pytest.raises(InvalidRequest, match="only http"):
                await fetch(there.url("/file"))
            there.asked.clear()
            with pytest.raises(InvalidRequest, match="leads on and on"):
                await fetch(there.url("/round"))
            assert len(there.asked) == MAX_HOPS

    run_bounded(body())


@pytest.mark.parametrize("told", [True, False])
def test_what_is_too_large_is_not_read_to_its_end(told: bool) -> None:
    async def body() -> None:
        sent = 0

        async def flood(request: web.Request) -> web.StreamResponse:
            nonlocal sent
            response = web.StreamResponse(headers={"Content-Length": str(10**9)} if told else {})
            await response.prepare(request)
            while sent < 10**9:
                await response.write(bytes(100_000))
                sent += 100_000
            return response

        async with site(flood) as there:
            with pytest.raises(InvalidRequest, match="larger than the 1000 bytes"):
                await fetch(there.url())
            assert sent < 10**9

    run_bounded(body())


def test_what_does_not_come_in_time_is_given_up() -> None:
    async def body() -> None:
        never = asyncio.Event()

        async def wait(_: web.Request) -> web.StreamResponse:
            await never.wait()
            return web.Response()

        async with site(wait) as there:
            options = MediaOptions(private="127.0.0.0/8", timeout_s=0.05)
            with pytest.raises(InvalidRequest, match=r"within 0\.05 s"):
                await fetch(there.url(), options)
            never.set()

    run_bounded(body())


def test_a_host_that_answers_otherwise_is_quoted_by_its_status_only() -> None:
    async def body() -> None:
        async def deny(_: web.Request) -> web.StreamResponse:
            return web.Response(status=403, text="internal details")

        async with site(deny) as there:
            with pytest.raises(InvalidRequest, match="status 403") as refusal:
                await fetch(there.url())
            assert "internal" not in refusal.value.message

    run_bounded(body())


def test_a_host_that_is_not_there_is_the_requests_fault() -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        refused(f"http://127.0.0.1:{unused.getsockname()[1]}/", "cannot be reached")


@pytest.mark.parametrize("url", ["http://", "http://[::1", "https://exa mple.com/", "http://example.com:99999/"])
def test_what_is_no_url_is_refused(url: str) -> None:
    refused(url, "not a URL|no host|found")


def test_a_cancelled_fetch_hangs_up() -> None:
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

        async with site(wait) as there:
            fetching = asyncio.create_task(fetch(there.url(), MediaOptions(private="127.0.0.0/8")))
            await eventually(lambda: bool(there.asked))
            fetching.cancel()
            with pytest.raises(asyncio.CancelledError):
                await fetching
            await gone.wait()

    run_bounded(body())


def test_data_urls_are_read_here() -> None:
    async def body() -> None:
        coded = base64.b64encode(b"\x00\x01picture").decode()
        assert await fetch(f"data:image/png;base64,{coded}") == b"\x00\x01picture"
        assert await fetch(f"DATA:;BASE64,{coded}") == b"\x00\x01picture"
        assert await fetch("data:text/plain,a%20b") == b"a b"

    run_bounded(body())


@pytest.mark.parametrize(
    ("url", "why"),
    [
        ("data:image/png;base64", "no data"),
        ("data:image/png;base64,@@@@", "not base64"),
        ("data:image/png;base64," + "A" * 1400, "larger"),
        ("data:text/plain," + "a" * 1001, "larger"),
    ],
)
def test_data_urls_that_are_wrong_are_refused(url: str, why: str) -> None:
    refused(url, why)


# Many at once, and images


def test_all_media_of_a_request_are_loaded_in_order_or_none() -> None:
    async def body() -> None:
        async def answer(request: web.Request) -> web.StreamResponse:
            if request.path == "/broken":
                return web.Response(body=b"<html>")
            return web.Response(body=png(int(request.path[1:])))

        options = MediaOptions(private="127.0.0.0/8", max_items=3, max_pixels=100)
        loader = PolicyLoader(options)
        async with site(answer) as there:
            urls = [named(there.url(f"/{width}")) for width in (7, 5, 3)]
            assert [decode_image(file).width for file in await loader.load(urls)] == [7, 5, 3]
            with pytest.raises(InvalidRequest, match="not an image"):
                await loader.load([urls[0], named(there.url("/broken"))])
            with pytest.raises(InvalidRequest, match=r"51 x 2 pixels are more than the 100"):
                await loader.load([named(there.url("/51"))])
            [sound] = await loader.load([named(there.url("/broken"), "audio")])
            assert sound.data == b"<html>", "only images are looked at"
            there.asked.clear()
            with pytest.raises(InvalidRequest, match="4 pieces"):
                await loader.load([*urls, urls[0]])
            assert there.asked == []
        await loader.close()
        await loader.close()

    run_bounded(body())


def test_images_come_upright_and_in_rgb() -> None:
    file = io.BytesIO()
    exif = Image.Exif()
    exif[0x0112] = 6  # to be turned by a quarter
    Image.new("LA", (4, 2)).convert("L").save(file, "JPEG", exif=exif)
    image = decode_image(MediaFile(modality="image", data=file.getvalue()))
    assert (image.size, image.mode) == ((2, 4), "RGB")


@pytest.mark.parametrize("data", [b"", b"\x89PNG\r\n\x1a\n", png()[:40], b"%!PS-Adobe-3.0 EPSF-3.0\n"])
def test_images_that_cannot_be_read_are_refused_by_place(data: bytes) -> None:
    file = MediaFile(modality="image", data=data, place=PLACE)
    with pytest.raises(InvalidRequest) as refusal:
        decode_image(file)
    assert refusal.value.message.startswith(PLACE)


def test_a_bomb_is_refused_before_it_goes_off() -> None:
    header = b"\x00\x00\xff\xff\x00\x00\xff\xff\x08\x02\x00\x00\x00"
    bomb = png()[:16] + header + png()[29:]
    with pytest.raises(InvalidRequest):
        check_image(MediaFile(modality="image", data=bomb, place=PLACE), 50_000_000)
