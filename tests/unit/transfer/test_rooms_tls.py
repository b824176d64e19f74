"""Rooms over TLS: blocks arrive, every end of a room reaches both sides, and a peer that is cut off leaves nothing."""

import asyncio
import os
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import msgspec
import pytest
import uvloop

from baton.config.peer_tls import PeerTls, peer_tls
from baton.config.runtime import RuntimeOptions
from baton.errors import Cancelled, EngineFailed, PeerLost
from baton.protocol.handoff import Ticket
from baton.protocol.outputs import KvComputed, KvWanted
from baton.testing import eventually
from baton.transfer.room_client import open_room_client
from baton.transfer.room_server import open_room_server
from tests.certificates import Authority
from tests.unit.transfer.kv_caches import SECRET, Cache
from tests.unit.transfer.test_rooms_end_to_end import QUICK, Pair

pytestmark = pytest.mark.process

OPTIONS = msgspec.structs.replace(QUICK, transports="tcp", checksum=True, peer_timeout_s=3.0)
PLANES, BLOCK_BYTES, BLOCKS = 2, 1 << 20, 24  # more than the buffers of a connection


@pytest.fixture(scope="module")
def tls(tmp_path_factory: pytest.TempPathFactory) -> PeerTls:
    directory = tmp_path_factory.mktemp("certificates")
    files = Authority(directory).issue(directory, "baton")
    named = {f"tls_{name}": str(path) for name, path in files._asdict().items()}
    made = peer_tls(RuntimeOptions(**named))
    assert made is not None
    return made


@asynccontextmanager
async def pair(tls: PeerTls) -> AsyncIterator[Pair]:
    """A producer and a consumer of one authority. Afterwards there is no socket left of them."""
    theirs, mine = Cache(1, PLANES, BLOCKS, BLOCK_BYTES), Cache(2, PLANES, BLOCKS, BLOCK_BYTES)
    before = open_sockets()
    producer = await open_room_server(OPTIONS, theirs.memory, "127.0.0.1", tls=tls)
    consumer = open_room_client(OPTIONS, mine.memory, tls)
    try:
        yield Pair(producer, consumer, theirs, mine)
        await eventually(lambda: producer.open_sessions + producer.waiting_claims + consumer.open_claims == 0)
    finally:
        await consumer.close()
        await producer.close()
    await eventually(lambda: open_sockets() <= before, 20)


def open_sockets() -> int:
    links = [Path("/proc/self/fd", name) for name in os.listdir("/proc/self/fd")]
    return sum(os.path.realpath(link).rpartition("/")[2].startswith("socket:") for link in links)


def run(tls: PeerTls, body: Callable[[Pair], Awaitable[None]]) -> None:
    """Run `body` on both event loops: workers have uvloop."""

    async def work() -> None:
        async with asyncio.timeout(50), pair(tls) as it:
            await body(it)

    for factory in (asyncio.new_event_loop, uvloop.new_event_loop):
        with asyncio.Runner(loop_factory=factory) as runner:
            runner.run(work())


def test_blocks_arrive_and_the_room_is_done(tls: PeerTls) -> None:
    async def body(it: Pair) -> None:
        for room in range(3):
            it.producer.offer(it.ticket(room), 16).computed(KvComputed((room, 20), True))
            it.claim(room).place(KvWanted(0, (room + 10, room)))
        await eventually(lambda: it.arrived == 3)
        assert (it.mine.blocks[:, 10:13] == it.theirs.blocks[:, :3]).all()
        await it.ended("done", 3)

    run(tls, body)


def test_the_reason_for_an_end_reaches_the_other_side(tls: PeerTls) -> None:
    """Although the connection is closed behind it."""

    async def body(it: Pair) -> None:
        lease = it.producer.offer(it.ticket(), 16)
        it.claim()
        await it.claimed()
        lease.fail(EngineFailed("out of memory"))
        await it.lost_with(EngineFailed, "out of memory")

    run(tls, body)


def test_a_claim_that_is_given_up_ends_its_room(tls: PeerTls) -> None:
    async def body(it: Pair) -> None:
        lease = it.producer.offer(it.ticket(), 16)
        it.consumer.decline(it.ticket())
        await it.ended("cancelled")
        with pytest.raises(Cancelled, match="given up"):
            await lease.ended()

    run(tls, body)


def test_a_peer_that_is_cut_off_in_the_middle_of_its_blocks_leaves_nothing(tls: PeerTls) -> None:
    """Packets are lost from one moment on, and no connection is closed."""

    async def body(it: Pair) -> None:
        async with cut_after(it.producer.address[1], 5_000_000) as port:
            it.producer.offer(it.ticket(), 16).computed(KvComputed(tuple(range(BLOCKS)), True))
            ticket = Ticket(host="127.0.0.1", port=port, room=0, secret=SECRET)
            it.consumer.claim(ticket, it.count, it.lost.append).place(KvWanted(0, tuple(range(BLOCKS))))
            await eventually(lambda: bool(it.lost), 20)
            assert isinstance(it.lost[0], PeerLost)
            await it.ended("failed")
            await eventually(lambda: it.producer.connections == 0, 20)

    run(tls, body)


@asynccontextmanager
async def cut_after(port: int, nbytes: int) -> AsyncIterator[int]:
    """A port that forwards connections to `port`, until `nbytes` have come from there; then nothing moves."""
    left = nbytes
    held: list[socket.socket] = []
    tasks: set[asyncio.Task[None]] = set()
    loop = asyncio.get_running_loop()

    async def forward(source: socket.socket, target: socket.socket, counts: bool) -> None:
        nonlocal left
        while data := await loop.sock_recv(source, 1 << 16):
            left -= len(data) if counts else 0
            if left <= 0:
                await loop.create_future()
            await loop.sock_sendall(target, data)

    async def accept(listener: socket.socket) -> None:
        while True:
            client, _ = await loop.sock_accept(listener)
            server = socket.socket()
            server.setblocking(False)
            held.extend((client, server))
            await loop.sock_connect(server, ("127.0.0.1", port))
            tasks.add(asyncio.create_task(forward(client, server, False)))
            tasks.add(asyncio.create_task(forward(server, client, True)))

    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.setblocking(False)
        tasks.add(asyncio.create_task(accept(listener)))
        try:
            yield listener.getsockname()[1]
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.wait(tasks)
            for each in held:
                each.close()
