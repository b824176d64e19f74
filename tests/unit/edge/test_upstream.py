"""How connections to the frontend are opened: many at once are admitted together."""

import asyncio
from collections.abc import AsyncIterator, Collection
from contextlib import asynccontextmanager

from baton.edge.upstream import ADMITTED_AT_ONCE, UpstreamConnection, UpstreamPool
from baton.errors import BatonError
from baton.testing.bounded import eventually
from tests.unit.edge.stage import HOST, on_uvloop


class RecordingGuard:
    """Admits all ports, or those up to `room`."""

    def __init__(self, room: int = 1 << 16) -> None:
        self.batches: list[int] = []
        self.admitted: set[int] = set()
        self._room = room

    def admit(self, source_ports: Collection[int]) -> None:
        if len(self.admitted) + len(source_ports) > self._room:
            raise OSError("no room")
        self.batches.append(len(source_ports))
        self.admitted.update(source_ports)

    def settle(self, source_port: int) -> None:
        self.admitted.discard(source_port)


class Waiting:
    """One that waits for a connection."""

    def __init__(self) -> None:
        self.connection: UpstreamConnection | None = None
        self.error: BatonError | None = None

    def on_connected(self, connection: UpstreamConnection) -> None:
        self.connection = connection

    def on_lost(self, error: BatonError) -> None:
        self.error = error


@asynccontextmanager
async def pool_of(guard: RecordingGuard) -> AsyncIterator[UpstreamPool]:
    """A pool with a frontend that answers nothing."""
    accepted: set[asyncio.StreamWriter] = set()

    async def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        accepted.add(writer)
        await reader.read()
        writer.close()
        accepted.discard(writer)

    server = await asyncio.start_server(accept, HOST, 0, backlog=1024)
    pool = UpstreamPool(HOST, server.sockets[0].getsockname()[1], guard)
    try:
        yield pool
    finally:
        await eventually(lambda: len(accepted) == pool.open)
        pool.close()
        await eventually(lambda: not accepted)
        server.close()


@on_uvloop
async def test_connections_that_are_wanted_at_once_are_admitted_together() -> None:
    guard = RecordingGuard()
    async with pool_of(guard) as pool:
        waiting = [Waiting() for _ in range(ADMITTED_AT_ONCE + 44)]
        await asyncio.wait([pool.connect(each) for each in waiting])
        assert all(each.connection is not None for each in waiting)
        assert guard.batches == [ADMITTED_AT_ONCE, 44]
        one = Waiting()
        await pool.connect(one)
        assert one.connection is not None
        assert guard.batches == [ADMITTED_AT_ONCE, 44, 1]
    assert pool.open == 0
    assert not guard.admitted


@on_uvloop
async def test_connections_that_cannot_be_admitted_are_lost_and_the_others_open() -> None:
    guard = RecordingGuard(room=ADMITTED_AT_ONCE)
    async with pool_of(guard) as pool:
        waiting = [Waiting() for _ in range(ADMITTED_AT_ONCE + 1)]
        await asyncio.wait([pool.connect(each) for each in waiting])
        assert [each.error for each in waiting[:-1]] == [None] * ADMITTED_AT_ONCE
        assert "no room" in str(waiting[-1].error)
        assert pool.open == ADMITTED_AT_ONCE


@on_uvloop
async def test_connections_that_are_given_up_while_they_wait_are_not_opened() -> None:
    guard = RecordingGuard()
    async with pool_of(guard) as pool:
        given_up, kept = Waiting(), Waiting()
        leaving, staying = pool.connect(given_up), pool.connect(kept)
        await asyncio.sleep(0)  # both wait to be admitted
        leaving.cancel()
        await asyncio.wait([leaving, staying])
        assert kept.connection is not None
        assert given_up.connection is None
        assert given_up.error is None
        assert pool.open == 1
        assert len(guard.admitted) == 1
