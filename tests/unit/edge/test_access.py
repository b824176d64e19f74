"""Who may come in: keys, their limits, the control token, web pages, and ids of requests."""

import asyncio
from pathlib import Path

import pytest

from baton.edge.access import ApiKeys, KeyLimits
from baton.errors import ConfigError
from baton.testing.bounded import eventually
from tests.unit.edge.stage import Received, get, on_uvloop, post, stage, whole
from tests.unit.edge.test_connection import CHAT, error_of


@pytest.mark.parametrize(
    ("header", "status"),
    [
        ("Authorization: Bearer one", 200),
        ("authorization: bearer two", 200),
        ("x-api-key: two", 200),
        ("Authorization: Bearer three", 401),
        ("Authorization: Bearer ", 401),
        ("Authorization: Basic one", 401),
        ("x-api-key: ", 401),
        ("A: b", 401),
        ("Authorization: Bearer control-token", 401),
    ],
)
@on_uvloop
async def test_a_key_is_needed_where_there_are_keys(header: str, status: int) -> None:
    async with stage(keys=("one", "two")) as s:
        client = await s.connect()
        client.send(post(CHAT, b"{}", header))
        got, _, body = await client.answer()
        assert got == status
        if status == 401:
            assert error_of(body)["type"] == "invalid_request_error"
            assert s.frontend.received == []
        else:
            assert not {"authorization", "x-api-key"} & set(s.frontend.received[0].headers)


@on_uvloop
async def test_health_needs_no_key() -> None:
    async with stage(keys=("one",)) as s:
        client = await s.connect()
        for path, status in (("/health", 200), ("/live", 200), ("/metrics", 401), ("/v1/models", 401)):
            client.send(get(path))
            assert (await client.answer())[0] == status


@on_uvloop
async def test_a_body_is_not_read_without_a_key() -> None:
    async with stage(keys=("one",)) as s:
        client = await s.connect()
        client.send(
            f"POST {CHAT} HTTP/1.1\r\nHost: a\r\nContent-Length: 1000000\r\nExpect: 100-continue\r\n\r\n".encode()
        )
        assert (await client.answer())[0] == 401


def test_a_key_file_is_read_again_when_it_changes(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_text("# keys\none\n\n two \n")
    keys = ApiKeys((), file, KeyLimits())
    one = keys.client(b"one")
    assert one is not None
    assert keys.client(b"two") is not None
    assert keys.client(b"# keys") is None
    file.write_text("one\nthree\n")
    keys.reload_changed()
    assert keys.client(b"two") is None
    assert keys.client(b"one") is one  # with what it has in progress
    file.unlink()
    keys.reload_changed()
    assert keys.client(b"three") is not None
    file.write_text("")
    keys.reload_changed()
    assert keys.client(b"three") is not None
    assert keys.client(None) is None


def test_a_key_file_without_keys_is_refused_at_the_start(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    with pytest.raises(ConfigError, match="cannot read --api-key-file"):
        ApiKeys((), file, KeyLimits())
    file.write_text("# none\n")
    with pytest.raises(ConfigError, match="has no key"):
        ApiKeys((), file, KeyLimits())


@on_uvloop
async def test_requests_per_minute_are_counted_for_each_key() -> None:
    async with stage(keys=("one", "two"), key_limits=KeyLimits(requests_per_minute=2)) as s:
        client = await s.connect()
        statuses = []
        for key in ("one", "one", "one", "two"):
            client.send(post(CHAT, b"{}", f"x-api-key: {key}"))
            status, headers, body = await client.answer()
            statuses.append(status)
            if status == 429:
                assert int(headers["retry-after"]) in (29, 30)
                assert error_of(body)["type"] == "rate_limit_error"
        assert statuses == [200, 200, 429, 200]
        client.send(get("/live", "x-api-key: one"))
        assert (await client.answer())[0] == 200


@on_uvloop
async def test_concurrent_requests_are_counted_for_each_key_until_they_end() -> None:
    async with stage(keys=("one",), key_limits=KeyLimits(max_concurrency=1)) as s:
        go = asyncio.Event()

        async def reply(request: Received, writer: asyncio.StreamWriter) -> None:
            await go.wait()
            writer.write(whole(200, b"{}"))

        s.frontend.reply = reply
        first, second = await s.connect(), await s.connect()
        request = post(CHAT, b"{}", "x-api-key: one")
        first.send(request)
        await eventually(lambda: bool(s.frontend.received))
        second.send(request)
        assert (await second.answer())[0] == 429
        first.writer.transport.abort()  # a client that leaves is counted out too
        async with asyncio.timeout(10):
            await s.frontend.lost.wait()
        go.set()
        second.send(request)
        assert (await second.answer())[0] == 200


@on_uvloop
async def test_admin_routes_need_the_control_token() -> None:
    async with stage() as s:
        client = await s.connect()
        for header, status in (("A: b", 401), ("Authorization: Bearer control-token", 200)):
            client.send(post("/busy_threshold", b"{}", header))
            assert (await client.answer())[0] == status
        assert len(s.frontend.received) == 1


@on_uvloop
async def test_web_pages_of_allowed_origins_may_call() -> None:
    async with stage(keys=("one",), origins=frozenset(("https://a.example",))) as s:
        client = await s.connect()
        preflight = (
            f"OPTIONS {CHAT} HTTP/1.1\r\nHost: a\r\nOrigin: %s\r\nAccess-Control-Request-Method: POST\r\n"
            "Access-Control-Request-Headers: authorization, x-stainless-os\r\n\r\n"
        )
        client.send((preflight % "https://a.example").encode())
        status, headers, _ = await client.answer(has_body=False)
        assert (status, headers["access-control-allow-origin"]) == (204, "https://a.example")
        assert headers["access-control-allow-headers"] == "authorization, x-stainless-os"
        assert headers["access-control-allow-methods"] == "POST"
        assert "content-length" not in headers
        client.send((preflight % "https://b.example").encode())
        status, headers, _ = await client.answer()
        assert (status, headers.get("access-control-allow-origin")) == (405, None)
        client.send(post(CHAT, b"{}", "Origin: https://a.example", "x-api-key: wrong"))
        status, headers, _ = await client.answer()
        assert (status, headers["access-control-allow-origin"]) == (401, "https://a.example")


@pytest.mark.parametrize(
    ("given", "kept"),
    [("abc-1.2:3", True), ("a" * 128, True), ("a" * 129, False), ("a b", False), ('a"b', False), ("", False)],
)
@on_uvloop
async def test_the_id_of_a_client_is_kept_if_it_is_safe(given: str, kept: bool) -> None:
    async with stage() as s:
        client = await s.connect()
        for data in (post(CHAT, b"{}", f"X-Request-Id: {given}"), get("/nothing", f"X-Request-Id: {given}")):
            client.send(data)
            _, headers, _ = await client.answer()
            assert (headers["x-request-id"] == given) == kept
            assert headers["x-request-id"]
        assert (s.frontend.received[0].headers["x-request-id"] == given) == kept
