"""Who may use the view: hosts, origins, tokens and users."""

import asyncio
import os
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from urllib.parse import urlsplit

import aiohttp

from baton.views.deployment import ProcessAddress
from baton.views.peer_user import Endpoint, is_other_user
from baton.views.server import ViewServer

TABLE = """  sl  local_address rem_address   st tx_queue rx_queue tr tm->when retrnsmt   uid  timeout inode
   0: 0100007F:1F90 00000000:0000 0A 00000000:00000000 00:00000000 00000000     {own}        0 1 1
   1: 0100007F:9C40 0100007F:1F90 01 00000000:00000000 00:00000000 00000000  {peer}        0 {inode} 1
"""
PEER, VIEW = Endpoint("127.0.0.1", 0x9C40), Endpoint("127.0.0.1", 0x1F90)


class Nothing:
    async def find(self) -> Sequence[ProcessAddress]:
        return []


@asynccontextmanager
async def serving(**options: str) -> AsyncIterator[tuple[str, aiohttp.ClientSession]]:
    server = ViewServer(Nothing(), **options)  # type: ignore[arg-type]
    await server.start()
    try:
        async with aiohttp.ClientSession(cookie_jar=aiohttp.CookieJar(unsafe=True)) as session:
            yield server.url, session
    finally:
        await server.aclose()


async def status(session: aiohttp.ClientSession, url: str, method: str = "GET", **headers: str) -> int:
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    async with session.request(method, url, headers=named, allow_redirects=False) as reply:
        return reply.status


def test_a_page_of_another_host_reaches_nothing() -> None:
    async def run() -> None:
        async with serving() as (url, session):
            assert await status(session, url) == 200
            assert await status(session, url, Host="evil.example:80") == 403
            assert await status(session, f"{url}api/series", Origin="http://evil.example") == 403
            assert await status(session, f"{url}api/series", Sec_Fetch_Site="cross-site") == 403
            assert await status(session, f"{url}api/series", Sec_Fetch_Site="same-origin") == 200
            linked = {"Sec_Fetch_Site": "cross-site", "Sec_Fetch_Mode": "navigate"}
            assert await status(session, url, **linked) == 200, "other pages may link to the view"
            assert await status(session, f"{url}api/chat", "POST", **linked) == 403

    asyncio.run(run())


def test_every_response_allows_nothing_from_elsewhere() -> None:
    async def run() -> None:
        async with serving() as (url, session):
            for path in ("", "js/app.js", "api/series", "nothing", "api/requests/unknown"):
                async with session.get(f"{url}{path}") as reply:
                    policy = reply.headers["Content-Security-Policy"]
                    assert "default-src 'none'" in policy
                    assert "unsafe" not in policy
                    assert "http" not in policy
                    assert reply.headers["X-Content-Type-Options"] == "nosniff"

    asyncio.run(run())


def test_the_token_in_the_url_becomes_a_cookie() -> None:
    async def run() -> None:
        async with serving(token="a secret") as (url, session):
            bare = url.partition("?")[0]
            assert await status(session, bare) == 401
            assert await status(session, f"{bare}?token=wrong") == 401
            assert await status(session, bare, Authorization="Bearer a secret") == 200
            async with session.get(url, allow_redirects=False) as reply:
                assert (reply.status, reply.headers["Location"]) == (303, "/")
                cookie = reply.headers["Set-Cookie"]
            assert "HttpOnly" in cookie
            assert "SameSite=Strict" in cookie
            assert "a secret" not in cookie
            assert await status(session, bare) == 200

    asyncio.run(run())


def test_off_loopback_a_token_is_generated() -> None:
    assert "?token=" in ViewServer(Nothing(), host="0.0.0.0").url
    assert "?token=" not in ViewServer(Nothing(), host="127.0.0.1").url


def test_a_connection_of_another_user_is_told_by_the_table_of_the_kernel(tmp_path: Path) -> None:
    table = tmp_path / "tcp"
    own = os.geteuid()
    table.write_text(TABLE.format(own=own, peer=own + 1, inode=2))
    assert is_other_user(PEER, VIEW, [tmp_path / "none", table])
    for allowed in (own, 0):
        table.write_text(TABLE.format(own=own, peer=allowed, inode=2))
        assert not is_other_user(PEER, VIEW, [table])
    assert not is_other_user(PEER, VIEW, [tmp_path / "none"]), "the kernel does not say"


def test_a_connection_that_is_closed_already_is_of_nobody(tmp_path: Path) -> None:
    table = tmp_path / "tcp"
    table.write_text(TABLE.format(own=0, peer=0, inode=0))
    assert is_other_user(PEER, VIEW, [table]), "a socket that no process has open is shown as root's"
    assert is_other_user(Endpoint("127.0.0.1", 0x9C41), VIEW, [table]), "a connection that was reset is in no table"


def test_a_connection_with_the_same_ports_from_another_address_is_another_one(tmp_path: Path) -> None:
    table = tmp_path / "tcp"
    table.write_text(TABLE.format(own=0, peer=os.geteuid(), inode=2))
    assert is_other_user(Endpoint("127.0.0.2", 0x9C40), VIEW, [table])


def test_addresses_of_ipv6_sockets_are_read(tmp_path: Path) -> None:
    table = tmp_path / "tcp6"
    mapped, loopback = "0000000000000000FFFF00000100007F", "00000000000000000000000001000000"
    rest = "01 00000000:00000000 00:00000000 00000000 0 0 7 1"
    table.write_text(f"head\n 1: {mapped}:9C40 {mapped}:1F90 {rest}\n 2: {loopback}:9C41 {loopback}:1F90 {rest}\n")
    assert not is_other_user(PEER, VIEW, [table])
    assert not is_other_user(Endpoint("::1", 0x9C41), Endpoint("::1", 0x1F90), [table])
    assert is_other_user(Endpoint("::1", 0x9C40), Endpoint("::1", 0x1F90), [table])


def test_a_token_that_is_no_text_is_refused() -> None:
    async def run() -> None:
        async with serving(token="a secret") as (url, _):
            parts = urlsplit(url)
            reader, writer = await asyncio.open_connection(parts.hostname, parts.port)
            writer.write(b"GET / HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer \xff\xfe\r\n\r\n")
            async with asyncio.timeout(10):
                assert (await reader.readline()).startswith(b"HTTP/1.1 401")
            writer.close()

    asyncio.run(run())
