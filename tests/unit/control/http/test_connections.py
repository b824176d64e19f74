"""Clients that send half a request, or nothing, do not keep the system server from others."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from baton.control.http.connections import ConnectionLimits
from baton.control.http.server import SystemServer
from baton.testing import ScriptedEngine, eventually, run_bounded
from tests.unit.control.worker_harness import EVERYTHING, ONE_TOKEN, TOKEN, WorkerHarness

GET_LIVE = b"GET /live HTTP/1.1\r\nHost: localhost\r\n\r\n"
HALF_A_HEAD = b"GET /live HTTP/1.1\r\nHost: local"
HALF_A_BODY = (
    f"POST /control/pause HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer {TOKEN}\r\nContent-Length: 100\r\n\r\n{{"
).encode()

Connection = tuple[asyncio.StreamReader, asyncio.StreamWriter]


@asynccontextmanager
async def server_with(limits: ConnectionLimits) -> AsyncIterator[SystemServer]:
    server = SystemServer("127.0.0.1", 0, token=TOKEN, limits=limits)
    await server.start()
    try:
        yield server
    finally:
        await server.aclose()


async def connect(server: SystemServer, data: bytes = b"") -> Connection:
    reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
    writer.write(data)
    return reader, writer


async def is_closed(connection: Connection) -> bool:
    """Wait until the server closes the connection; return whether it has sent nothing."""
    reader, writer = connection
    try:
        return await reader.read() == b""
    except ConnectionError:
        return True
    finally:
        writer.close()


async def is_live(connection: Connection) -> bool:
    """Whether a request on the connection is answered."""
    reader, writer = connection
    writer.write(GET_LIVE)
    try:
        return b" 200 " in await reader.readuntil(b"}")
    except (ConnectionError, asyncio.IncompleteReadError):
        return False


def test_a_connection_that_sends_no_complete_head_is_closed() -> None:
    async def body() -> None:
        async with server_with(ConnectionLimits(head_timeout_s=0.05)) as server:
            for data in (b"", HALF_A_HEAD):
                assert await is_closed(await connect(server, data))

    run_bounded(body())


def test_a_connection_that_sends_half_a_second_request_is_closed() -> None:
    async def body() -> None:
        async with server_with(ConnectionLimits(head_timeout_s=0.3)) as server:
            connection = await connect(server)
            assert await is_live(connection)
            connection[1].write(HALF_A_HEAD)
            assert await is_closed(connection)

    run_bounded(body())


def test_a_body_that_does_not_arrive_is_a_408() -> None:
    async def body() -> None:
        engine = ScriptedEngine(ONE_TOKEN, capabilities=EVERYTHING)
        harness = WorkerHarness(engine, limits=ConnectionLimits(body_timeout_s=0.05, min_bytes_per_s=1 << 40))
        await harness.server.start()
        await harness.ready.wait()
        reader, writer = await connect(harness.server, HALF_A_BODY)
        reply = await reader.readuntil(b"}}")
        assert reply.startswith(b"HTTP/1.1 408 ")
        assert b'"code":"body_timeout"' in reply
        writer.close()
        harness.stop.set()
        await harness.running
        await harness.server.aclose()

    run_bounded(body())


def test_of_too_many_connections_the_one_that_waits_longest_is_closed() -> None:
    async def body() -> None:
        async with server_with(ConnectionLimits(max_connections=3)) as server:
            held = [await connect(server, HALF_A_HEAD) for _ in range(3)]
            newest = await connect(server)
            assert await is_live(newest)
            assert await is_closed(held[0])
            flood = [await connect(server, HALF_A_HEAD) for _ in range(100)]
            for connection in (*held[1:], newest, *flood[:-3]):
                assert await is_closed(connection)
            last = await connect(server)
            assert await is_live(last)
            for _, writer in (*flood[-3:], last):
                writer.close()

    run_bounded(body())


def test_connections_whose_commands_run_are_kept() -> None:
    async def body() -> None:
        engine = ScriptedEngine(ONE_TOKEN, capabilities=EVERYTHING, control=[asyncio.Event()])
        harness = WorkerHarness(engine, limits=ConnectionLimits(max_connections=1, head_timeout_s=0.05))
        await harness.server.start()
        await harness.ready.wait()
        command = asyncio.create_task(harness.send("cache/clear"))
        await eventually(lambda: bool(engine.commands))
        assert await is_closed(await connect(harness.server))
        assert not command.done()
        await harness.server.aclose()
        await asyncio.wait([command])
        harness.stop.set()
        await harness.running

    run_bounded(body())
