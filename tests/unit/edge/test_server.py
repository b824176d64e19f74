"""The listener: TLS, and what a stop does."""

import asyncio
import errno
import shutil
import socket
import ssl
import subprocess
from pathlib import Path

import pytest

from baton.edge.limits import EdgeLimits
from baton.edge.server import tls_context
from baton.edge.tls_listener import TlsListener
from baton.errors import ConfigError, PeerLost
from baton.testing.bounded import eventually
from tests.unit.edge.stage import EVENTS_HEAD, HOST, Client, Received, chunk, get, on_uvloop, post, stage, whole
from tests.unit.edge.test_connection import CHAT


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    if shutil.which("openssl") is None:
        pytest.skip("needs openssl")
    directory = tmp_path_factory.mktemp("tls")
    files = str(directory / "certificate.pem"), str(directory / "key.pem")
    command = "openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -days 1 -subj /CN=localhost"
    subprocess.run([*command.split(), "-out", files[0], "-keyout", files[1]], check=True, capture_output=True)
    return files


@pytest.mark.process
@on_uvloop
async def test_requests_are_served_over_tls(certificate: tuple[str, str]) -> None:
    trusting = ssl.create_default_context(cafile=certificate[0])
    trusting.check_hostname = False
    async with stage(tls=tls_context(*certificate)) as s:
        client = Client(*await asyncio.open_connection(HOST, s.edge.port, ssl=trusting))
        s.clients.append(client)
        for _ in range(2):
            client.send(post(CHAT, b"{}"))
            assert (await client.answer())[0] == 200


@pytest.mark.process
@on_uvloop
async def test_a_handshake_that_takes_too_long_is_ended(certificate: tuple[str, str]) -> None:
    async with stage(tls=tls_context(*certificate), limits=EdgeLimits(handshake_timeout_s=0.1)) as s:
        client = await s.connect()
        assert await client.closed() == b""


@pytest.mark.process
@on_uvloop
async def test_handshakes_count_as_connections_and_the_oldest_makes_room(certificate: tuple[str, str]) -> None:
    trusting = ssl.create_default_context(cafile=certificate[0])
    trusting.check_hostname = False
    async with stage(tls=tls_context(*certificate), limits=EdgeLimits(max_connections=3)) as s:
        client = Client(*await asyncio.open_connection(HOST, s.edge.port, ssl=trusting))
        s.clients.append(client)
        silent = [await s.connect() for _ in range(4)]
        assert [await each.closed() for each in silent[:2]] == [b"", b""]
        another = Client(*await asyncio.open_connection(HOST, s.edge.port, ssl=trusting))
        s.clients.append(another)
        assert await silent[2].closed() == b""
        for each in (client, another):
            each.send(post(CHAT, b"{}"))
            assert (await each.answer())[0] == 200
        assert not silent[3].reader.at_eof()


class _WithoutFiles(socket.socket):
    failures = 2

    def accept(self) -> tuple[socket.socket, object]:
        if self.failures:
            self.failures -= 1
            raise OSError(errno.EMFILE, "Too many open files")
        return super().accept()


@pytest.mark.process
@on_uvloop
async def test_a_listener_that_has_no_files_for_a_moment_accepts_after_it(certificate: tuple[str, str]) -> None:
    tls = tls_context(*certificate)
    assert tls is not None
    sock = _WithoutFiles()
    sock.setblocking(False)
    sock.bind((HOST, 0))
    sock.listen()
    trusting = ssl.create_default_context(cafile=certificate[0])
    trusting.check_hostname = False
    listener = TlsListener(sock, tls, asyncio.Protocol, 5.0, lambda: 1)
    try:
        _, writer = await asyncio.open_connection(HOST, sock.getsockname()[1], ssl=trusting)
        assert sock.failures == 0
        writer.transport.abort()
    finally:
        listener.close()
        listener.close()


@pytest.mark.process
@on_uvloop
async def test_a_stop_ends_handshakes(certificate: tuple[str, str]) -> None:
    async with stage(tls=tls_context(*certificate)) as s:
        silent, stranger = await s.connect(), await s.connect()
        stranger.send(b"GET / HTTP/1.1\r\n\r\n")  # this is no TLS
        assert await stranger.closed() == b""
        s.edge.drain()
        assert await silent.closed() == b""
        with pytest.raises(ConnectionRefusedError):
            await s.connect()


@pytest.mark.process
def test_tls_files_are_checked_at_the_start(certificate: tuple[str, str], tmp_path: Path) -> None:
    assert tls_context("", "") is None
    with pytest.raises(ConfigError, match="cannot use --tls-certificate"):
        tls_context("", certificate[1])
    with pytest.raises(ConfigError, match="cannot use --tls-certificate"):
        tls_context(certificate[0], str(tmp_path / "missing"))
    with pytest.raises(ConfigError, match="cannot use --tls-certificate"):
        tls_context(certificate[1], certificate[0])


@on_uvloop
async def test_a_stop_closes_idle_connections_and_lets_streams_end() -> None:
    async with stage() as s:
        go = asyncio.Event()

        async def reply(request: Received, writer: asyncio.StreamWriter) -> None:
            writer.write(EVENTS_HEAD + chunk(b"data: 1\n\n"))
            await go.wait()
            writer.write(chunk(b"data: [DONE]\n\n") + b"0\r\n\r\n")

        s.frontend.reply = reply
        busy, idle = await s.connect(), await s.connect()
        busy.send(post(CHAT, b"{}"))
        await busy.reader.readuntil(b"data: 1\n\n\r\n")
        s.edge.drain()
        assert await idle.closed() == b""
        with pytest.raises(ConnectionRefusedError):
            await s.connect()
        go.set()
        assert (await busy.closed()).endswith(b"data: [DONE]\n\n\r\n0\r\n\r\n")


@on_uvloop
async def test_requests_reach_the_frontend_with_their_query() -> None:
    async with stage() as s:
        client = await s.connect()
        client.send(get("/live?a=b") + get("http://else.where/live?c"))
        await client.answer()
        await client.answer()
        assert [request.target for request in s.frontend.received] == ["/live?a=b", "/live?c"]


@on_uvloop
async def test_all_who_ask_the_edge_for_the_same_share_one_request_to_the_frontend() -> None:
    async with stage(lists_models=False) as s:
        go = asyncio.Event()

        async def reply(request: Received, writer: asyncio.StreamWriter) -> None:
            await go.wait()
            writer.write(whole(200, b"{}"))

        s.frontend.reply = reply
        asking = [asyncio.ensure_future(s.edge.fetch("/metrics")) for _ in range(50)]
        await eventually(lambda: bool(s.frontend.received))
        asking.pop().cancel()  # the others still wait for it
        asking.append(asyncio.ensure_future(s.edge.fetch("/metrics")))
        go.set()
        assert await asyncio.gather(*asking) == [(200, b"{}")] * 50
        assert (len(s.frontend.received), s.frontend.connections) == (1, 1)
        assert await s.edge.fetch("/metrics") == (200, b"{}")
        assert len(s.frontend.received) == 2


@on_uvloop
async def test_a_request_to_the_frontend_that_fails_fails_for_all_who_share_it() -> None:
    async with stage(lists_models=False) as s:

        async def reply(request: Received, writer: asyncio.StreamWriter) -> None:
            writer.transport.abort()

        s.frontend.reply = reply
        failed = await asyncio.gather(*(s.edge.fetch("/metrics") for _ in range(3)), return_exceptions=True)
        assert [type(each) for each in failed] == [PeerLost] * 3
        assert len(s.frontend.received) == 1
