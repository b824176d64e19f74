"""TLS on the KV port: only peers with a certificate of the same authority get through, and bytes arrive unchanged."""

import asyncio
import os
import resource
import socket
import ssl
import subprocess
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import uvloop

from baton.config.peer_tls import PeerTls, peer_tls
from baton.config.runtime import RuntimeOptions
from baton.errors import ConfigError, PeerLost
from baton.transfer.connection_limit import ConnectionSlot
from baton.transfer.listener import TLS_FILES, KvListener, connections_allowed
from baton.transfer.sockets import receive_bytes, send_bytes
from baton.transfer.tls import accepted, connect_to
from baton.transfer.wire import PREAMBLE_BYTES
from tests.certificates import Authority

pytestmark = pytest.mark.process

PREAMBLE = b"t" * PREAMBLE_BYTES
LIMIT_S = 20.0


def tls_of(authority: Authority, directory: Path, name: str = "baton") -> PeerTls:
    files = authority.issue(directory, name)
    made = peer_tls(
        RuntimeOptions(tls_ca=str(files.ca), tls_certificate=str(files.certificate), tls_key=str(files.key))
    )
    assert made is not None
    return made


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority(tmp_path_factory.mktemp("authority"))


@asynccontextmanager
async def echoing(tls: PeerTls | None) -> AsyncIterator[int]:
    """A KV port that sends back what it gets, and its number."""

    async def serve(connection: socket.socket, slot: ConnectionSlot) -> None:
        with connection:
            while True:
                size = int.from_bytes(await receive_bytes(connection, 4, LIMIT_S))
                await send_bytes(connection, await receive_bytes(connection, size, LIMIT_S), LIMIT_S)

    listener = socket.create_server(("127.0.0.1", 0))
    listener.setblocking(False)
    port = KvListener(listener, 100, {PREAMBLE: serve}, tls)
    try:
        yield listener.getsockname()[1]
    finally:
        await port.close()


async def echo(port: int, tls: PeerTls | None, data: bytes) -> bytes:
    connection = await connect_to("127.0.0.1", port, LIMIT_S, tls)
    with connection:
        await send_bytes(connection, PREAMBLE + len(data).to_bytes(4), LIMIT_S)
        sending = asyncio.create_task(send_bytes(connection, data, LIMIT_S))
        received = await receive_bytes(connection, len(data), LIMIT_S)
        await sending
        return received


LOOPS = (asyncio.new_event_loop, uvloop.new_event_loop)


def run(work: Callable[[], Coroutine[Any, Any, None]], *factories: Callable[[], asyncio.AbstractEventLoop]) -> None:
    """Run `work` on both event loops: workers have uvloop."""
    for factory in factories or LOOPS:
        with asyncio.Runner(loop_factory=factory) as runner:
            runner.run(asyncio.wait_for(work(), 60))


def test_bytes_arrive_unchanged(authority: Authority, tmp_path: Path) -> None:
    async def work() -> None:
        data = os.urandom(5_000_000)
        tls = tls_of(authority, tmp_path)
        async with echoing(tls) as port:
            assert await asyncio.gather(*(echo(port, tls, data) for _ in range(3))) == [data] * 3

    run(work)


def test_a_peer_without_tls_gets_nothing(authority: Authority, tmp_path: Path) -> None:
    async def work() -> None:
        async with echoing(tls_of(authority, tmp_path)) as port:
            with pytest.raises(PeerLost):
                await echo(port, None, b"hello")

    run(work)


def test_a_peer_of_another_authority_is_refused(authority: Authority, tmp_path: Path) -> None:
    async def work() -> None:
        for name in ("mine", "other"):
            (tmp_path / name).mkdir(exist_ok=True)
        stranger = tls_of(Authority(tmp_path / "other"), tmp_path / "other")
        async with echoing(tls_of(authority, tmp_path / "mine")) as port:
            with pytest.raises(PeerLost):
                await echo(port, stranger, b"hello")

    run(work)


def test_a_client_without_a_certificate_is_refused(authority: Authority, tmp_path: Path) -> None:
    async def work() -> None:
        tls = tls_of(authority, tmp_path)
        nameless = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        nameless.load_verify_locations(authority.certificate)
        async with echoing(tls) as port:
            with pytest.raises(PeerLost):
                await echo(port, PeerTls(tls.server, nameless, tls.name), b"hello")

    run(work)


def test_a_server_with_another_name_is_refused(authority: Authority, tmp_path: Path) -> None:
    async def work() -> None:
        for name in ("server", "client"):
            (tmp_path / name).mkdir(exist_ok=True)
        async with echoing(tls_of(authority, tmp_path / "server", "elsewhere")) as port:
            with pytest.raises(PeerLost, match="certificate"):
                await echo(port, tls_of(authority, tmp_path / "client"), b"hello")

    run(work)


def test_a_closed_end_closes_the_other(authority: Authority, tmp_path: Path) -> None:
    async def work() -> None:
        tls = tls_of(authority, tmp_path)
        async with echoing(tls) as port:
            connection = await connect_to("127.0.0.1", port, LIMIT_S, tls)
            await send_bytes(connection, PREAMBLE, LIMIT_S)
        with connection, pytest.raises(PeerLost):
            await receive_bytes(connection, 1, LIMIT_S)

    run(work)


def test_a_peer_that_does_not_read_keeps_no_descriptor(authority: Authority, tmp_path: Path) -> None:
    """What serves it has given it up; its bytes cannot be sent any more."""

    async def work() -> None:
        tls = tls_of(authority, tmp_path)
        with socket.create_server(("127.0.0.1", 0)) as listener:
            listener.setblocking(False)
            connecting = asyncio.create_task(connect_to("127.0.0.1", listener.getsockname()[1], LIMIT_S, tls))
            connection, _ = await asyncio.get_running_loop().sock_accept(listener)
            served = await accepted(connection, tls, LIMIT_S, stall_timeout_s=0.5)
            with await connecting as peer:
                with served, pytest.raises(PeerLost):
                    await send_bytes(served, bytes(100_000_000), 0.2)
                await until_closed(connection)
                with pytest.raises(PeerLost):  # what was under way arrives
                    await receive_bytes(peer, 100_000_000, LIMIT_S)

    run(work)


def test_a_slow_reader_is_kept(authority: Authority, tmp_path: Path) -> None:
    async def work() -> None:
        tls = tls_of(authority, tmp_path)
        data = os.urandom(30_000_000)
        with socket.create_server(("127.0.0.1", 0)) as listener:
            listener.setblocking(False)
            connecting = asyncio.create_task(connect_to("127.0.0.1", listener.getsockname()[1], LIMIT_S, tls))
            connection, _ = await asyncio.get_running_loop().sock_accept(listener)
            with await accepted(connection, tls, LIMIT_S, stall_timeout_s=4.0) as served, await connecting as peer:
                sending = asyncio.create_task(send_bytes(served, data, LIMIT_S))
                received = b""
                for _ in range(10):
                    await asyncio.sleep(0.5)  # much less than the limit, and all together more
                    received += await receive_bytes(peer, len(data) // 10, LIMIT_S)
                await sending
        assert received == data

    run(work, uvloop.new_event_loop)


async def until_closed(connection: socket.socket) -> None:
    """Wait until a socket that asyncio owns is closed."""
    async with asyncio.timeout(LIMIT_S):
        while connection.fileno() >= 0:  # noqa: ASYNC110 - nothing tells
            await asyncio.sleep(0.02)


def test_a_refused_handshake_leaves_no_descriptor(authority: Authority, tmp_path: Path) -> None:
    async def work() -> None:
        tls = tls_of(authority, tmp_path)
        async with echoing(tls) as port:
            before = open_sockets()
            for _ in range(5):
                with pytest.raises(PeerLost):
                    await echo(port, None, b"hello")
                with pytest.raises(PeerLost):
                    await connect_to("127.0.0.1", port, LIMIT_S, PeerTls(tls.server, tls.client, "elsewhere"))
            async with asyncio.timeout(LIMIT_S):
                while open_sockets() > before:  # noqa: ASYNC110 - nothing tells
                    await asyncio.sleep(0.02)

    run(work)


def open_sockets() -> int:
    links = [Path("/proc/self/fd", name) for name in os.listdir("/proc/self/fd")]
    return sum(os.path.realpath(link).rpartition("/")[2].startswith("socket:") for link in links)


def test_connections_with_tls_have_half_of_the_files_too() -> None:
    """Each of them takes three, also before its peer has shown a certificate."""
    half = resource.getrlimit(resource.RLIMIT_NOFILE)[0] // 2
    assert connections_allowed(10**9, 1) == half
    assert half - 3 < TLS_FILES * connections_allowed(10**9, TLS_FILES) <= half
    assert connections_allowed(7, TLS_FILES) == 7


def test_a_key_with_a_passphrase_is_refused_without_a_prompt(authority: Authority, tmp_path: Path) -> None:
    files = authority.issue(tmp_path, "baton")
    locked = tmp_path / "locked.key"
    command = ["openssl", "pkey", "-in", str(files.key), "-aes256", "-passout", "pass:secret", "-out", str(locked)]
    subprocess.run(command, check=True, capture_output=True, timeout=60)
    options = RuntimeOptions(tls_ca=str(files.ca), tls_certificate=str(files.certificate), tls_key=str(locked))
    with pytest.raises(ConfigError, match="passphrase"):
        peer_tls(options)


@pytest.mark.parametrize("given", ["tls_ca", "tls_certificate", "tls_key"])
def test_some_of_the_files_are_not_enough(given: str) -> None:
    with pytest.raises(ConfigError, match="add --runtime-tls"):
        peer_tls(RuntimeOptions(**{given: "file.pem"}))


def test_files_that_cannot_be_used_are_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="--runtime-tls-certificate"):
        peer_tls(RuntimeOptions(tls_ca=str(tmp_path / "a"), tls_certificate=str(tmp_path / "b"), tls_key="c"))
