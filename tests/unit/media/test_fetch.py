"""Fetching from a real server on loopback: content, refusals and their messages."""

import asyncio
import base64
import socket

import pytest
from aiohttp import web

from baton.config.media import MediaOptions
from baton.errors import InvalidRequest
from baton.media.byte_budget import ByteBudget
from baton.media.fetch import MAX_HOPS, Fetcher
from baton.media.policy import Policy
from baton.testing import eventually, run_bounded
from tests.unit.media.media_sites import LOCAL, PLACE, FakeResolver, media_url, site


async def fetch(url: str, options: MediaOptions = LOCAL, names: FakeResolver | None = None) -> bytes:
    fetcher = Fetcher(Policy(options), names)
    share = await ByteBudget(options.max_total_bytes, options.max_request_bytes).open(0, 1.0)
    try:
        return await fetcher.fetch(media_url(url), share)
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
