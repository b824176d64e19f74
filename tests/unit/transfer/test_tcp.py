"""KV comes over a socket straight into its blocks; who may not have it gets none, and nobody is waited for for ever."""

import asyncio
import os
import signal
import socket
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from typing import Any

import msgspec
import numpy as np
import pytest
import uvloop

from baton.errors import PeerLost
from baton.ports.transfer import Channel
from baton.protocol.handoff import Ticket
from baton.testing.bounded import eventually, run_bounded
from baton.transfer.block_copy import Spans
from baton.transfer.sockets import TURN_BYTES, receive_spans
from baton.transfer.tcp import ANSWER_HEAD, REQUEST_HEAD, Request, TcpClient, TcpServer
from baton.transfer.wire import DATA
from tests.unit.transfer.kv_caches import (
    ROOM,
    SECRET,
    SHAPE,
    Cache,
    Lent,
    Producer,
    content,
    expected,
    holdings,
    listening,
    only,
    producer,
    proxy,
    serve_all,
    settled_holdings,
)

SO_SNDBUFFORCE = 32
BIG = Lent("tcp", planes=2, blocks=64, block_bytes=1 << 20)


def big_cache(seed: int = 2) -> Cache:
    return Cache(seed, planes=2, blocks=64, block_bytes=1 << 20)


@asynccontextmanager
async def reached(
    mine: Cache, lent: Producer, ticket: Ticket | None = None, checksum: bool = False, stall_timeout_s: float = 5.0
) -> AsyncIterator[Channel]:
    connect = TcpClient(mine.memory, checksum, stall_timeout_s=stall_timeout_s)
    path = await connect.connect(ticket or lent.ticket, lent.memory, lent.details)
    try:
        yield path
    finally:
        path.close()
        await connect.close()


def run_on_asyncio(main: Coroutine[Any, Any, None]) -> None:
    run_bounded(main)


def run_on_uvloop(main: Coroutine[Any, Any, None]) -> None:
    uvloop.run(asyncio.wait_for(main, 20))


@pytest.mark.parametrize("run", [run_on_asyncio, run_on_uvloop])
@pytest.mark.parametrize("checksum", [False, True])
@pytest.mark.parametrize("host", ["127.0.0.1", "::1"])
@pytest.mark.parametrize("block_bytes", [8, 512, 100_000])
def test_every_byte_arrives_and_no_other_changes(
    run: Callable[[Any], None], checksum: bool, host: str, block_bytes: int
) -> None:
    setup = Lent("tcp", block_bytes=block_bytes, host=host, use_uvloop=run is run_on_uvloop)
    mine = Cache(2, blocks=50, block_bytes=block_bytes, spare_bytes=4096)
    before = mine.bytes.copy()
    theirs = [0, 1, 2, 3, 31, 17, 16, 4, 5, 6]
    places = [10, 11, 12, 49, 48, 0, 1, 2, 3, 4]

    async def body(lent: Producer) -> None:
        async with reached(mine, lent, checksum=checksum) as path:
            both = (path.fetch(lent.ticket, theirs[:5], places[:5]), path.fetch(lent.ticket, theirs[5:], places[5:]))
            await asyncio.gather(*both)
        assert (mine.bytes == expected(mine, before, lent.memory, 1, list(zip(theirs, places, strict=True)))).all()

    with producer(setup) as lent:
        run(body(lent))


def test_more_scattered_spans_than_one_call_takes() -> None:
    setup = Lent("tcp", planes=8, blocks=1000, block_bytes=64)
    mine = Cache(2, planes=8, blocks=1000, block_bytes=64)
    theirs, places = (np.random.default_rng(seed).permutation(1000).tolist() for seed in (3, 4))

    async def body(lent: Producer) -> None:
        async with reached(mine, lent) as path:
            await path.fetch(lent.ticket, theirs, places)
        wanted = expected(mine, mine.bytes, lent.memory, 1, list(zip(theirs, places, strict=True)))
        assert (mine.bytes == wanted).all()

    with producer(setup) as lent:
        run_bounded(body(lent))


def test_one_turn_of_the_event_loop_moves_a_bounded_part() -> None:
    """However much there is to read at once."""
    sender, receiver = socket.socketpair()
    try:
        sender.setsockopt(socket.SOL_SOCKET, SO_SNDBUFFORCE, 64 << 20)
    except PermissionError:
        pytest.skip("only root can make a socket hold that much")
    mine = Cache(2, planes=1, blocks=1, block_bytes=4 << 20)
    mine.bytes[:] = 0

    async def body() -> None:
        loop = asyncio.get_running_loop()
        for each in (sender, receiver):
            each.setblocking(False)
        await loop.sock_sendall(sender, b"\x01" * mine.bytes.size)
        where = Spans(np.array([mine.memory.address]), np.array([mine.bytes.size]))
        task = asyncio.create_task(receive_spans(receiver, where, 5.0))
        moved = [0]
        while not task.done():
            await asyncio.sleep(0)
            moved.append(int(np.count_nonzero(mine.bytes)))
        assert moved[-1] == mine.bytes.size
        assert max(np.diff(moved)) <= TURN_BYTES

    with sender, receiver:
        run_bounded(body())


@pytest.mark.parametrize("ticket", [{"secret": b"another"}, {"room": 8}])
def test_without_the_secret_of_the_room_there_is_no_path(ticket: dict[str, Any]) -> None:
    async def body(lent: Producer) -> None:
        with pytest.raises(PeerLost, match="no such room"):
            async with reached(Cache(2), lent, msgspec.structs.replace(lent.ticket, **ticket)):
                pass

    with producer(Lent("tcp")) as lent:
        run_bounded(body(lent))


def test_each_fetch_proves_its_own_secret() -> None:
    mine = Cache(2)

    async def body(lent: Producer) -> None:
        async with reached(mine, lent) as path:
            with pytest.raises(PeerLost, match="no such room"):
                await path.fetch(msgspec.structs.replace(lent.ticket, secret=b"another"), [0], [0])
            assert (mine.bytes == content(2, mine.bytes.size)).all()
            await path.fetch(lent.ticket, [0], [0])

    with producer(Lent("tcp")) as lent:
        run_bounded(body(lent))


def test_blocks_that_are_not_lent_are_not_sent() -> None:
    mine = Cache(2)
    before = mine.bytes.copy()

    async def body(lent: Producer) -> None:
        async with reached(mine, lent) as path:
            with pytest.raises(PeerLost, match="not all of these blocks are lent"):
                await path.fetch(lent.ticket, [3, 5], [0, 1])
            assert (mine.bytes == before).all()
            await path.fetch(lent.ticket, [3, 4], [0, 1])
        assert (mine.bytes == expected(mine, before, lent.memory, 1, [(3, 0), (4, 1)])).all()

    with producer(Lent("tcp", lent=(3, 4))) as lent:
        run_bounded(body(lent))


@pytest.mark.parametrize(("theirs", "places"), [([32], [0]), ([0], [32]), ([-1], [0]), ([0], [-1]), ([1, 2], [1])])
def test_blocks_that_are_not_there_are_not_asked_for(theirs: list[int], places: list[int]) -> None:
    mine = Cache(2)

    async def body(lent: Producer) -> None:
        async with reached(mine, lent) as path:
            with pytest.raises(PeerLost):
                await path.fetch(lent.ticket, theirs, places)

    with producer(Lent("tcp")) as lent:
        run_bounded(body(lent))
    assert (mine.bytes == content(2, mine.bytes.size)).all()


def test_caches_that_do_not_fit_are_refused_by_name() -> None:
    async def body() -> None:
        connect = TcpClient(Cache(2).memory)
        ticket = Ticket(host="127.0.0.1", port=1, room=ROOM, secret=SECRET)
        theirs = msgspec.structs.replace(Cache(1).memory, shape=msgspec.structs.replace(SHAPE, layers=3))
        with pytest.raises(PeerLost, match="layers is 2 here and 3 there"):
            await connect.connect(ticket, theirs, {})
        with pytest.raises(PeerLost, match="cuda"):
            await TcpClient(msgspec.structs.replace(Cache(2).memory, device="cuda")).connect(
                ticket, Cache(1).memory, {}
            )

    run_bounded(body())


@pytest.mark.parametrize("host", ["127.0.0.1", "::1", "no-such-host.invalid"])
def test_a_lender_that_nobody_is_at_is_a_lost_peer(host: str) -> None:
    async def body() -> None:
        connect = TcpClient(Cache(2).memory, connect_timeout_s=2.0)
        ticket = Ticket(host=host, port=1, room=ROOM, secret=SECRET)
        with pytest.raises(PeerLost, match="cannot be reached"):
            await connect.connect(ticket, Cache(1).memory, {"checksum": False})

    run_bounded(body())


@pytest.mark.parametrize(("by_lender", "by_borrower"), [(True, False), (False, True)])
def test_with_checksums_a_changed_byte_is_noticed(by_lender: bool, by_borrower: bool) -> None:
    mine = Cache(2, block_bytes=4096)
    spoilt = True

    def meddle(passed: int, data: bytes) -> bytes:
        # Past the answers to the knock and the head: within the KV.
        if spoilt and passed <= 50_000 < passed + len(data):
            at = 50_000 - passed
            return data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :]
        return data

    async def body(lent: Producer, port: int) -> None:
        nonlocal spoilt
        ticket = msgspec.structs.replace(lent.ticket, port=port)
        async with reached(mine, lent, ticket, checksum=by_borrower) as path:
            with pytest.raises(PeerLost, match="changed on its way"):
                await path.fetch(ticket, range(32), range(32))
            spoilt = False
            await path.fetch(ticket, range(32), range(32))
            assert (mine.bytes == content(1, mine.bytes.size)).all()

    setup = Lent("tcp", block_bytes=4096, checksum=by_lender)
    with producer(setup) as lent, proxy((lent.host, lent.port), meddle) as between:
        run_bounded(body(lent, between.port))


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_a_lender_that_dies_or_freezes_in_the_middle_is_a_lost_peer(number: int) -> None:
    mine = big_cache()

    async def body(lent: Producer, port: int) -> None:
        ticket = msgspec.structs.replace(lent.ticket, port=port)
        async with reached(mine, lent, ticket, stall_timeout_s=0.5) as path:
            with pytest.raises(PeerLost):
                await path.fetch(ticket, range(64), range(64))
            frozen = mine.bytes.copy()
            assert (frozen != content(1, frozen.size)).any()
            assert (frozen != content(2, frozen.size)).any(), "it was in the middle"
            lent.signal(signal.SIGCONT)
            await asyncio.sleep(0.1)
            assert (mine.bytes == frozen).all()

    with producer(BIG) as lent:

        def meddle(passed: int, data: bytes) -> bytes:
            if passed <= 1 << 20 < passed + len(data):
                lent.signal(number)
            return data

        with proxy((lent.host, lent.port), meddle) as between:
            run_bounded(body(lent, between.port))


def test_a_lender_that_never_answers_is_a_lost_peer() -> None:
    async def body(lent: Producer) -> None:
        lent.signal(signal.SIGSTOP)
        with pytest.raises(PeerLost, match=r"not moved a byte for 0\.2 s"):
            async with reached(Cache(2), lent, stall_timeout_s=0.2):
                pass

    with producer(Lent("tcp")) as lent:
        run_bounded(body(lent))


def test_after_a_cancelled_fetch_nothing_is_written_and_the_next_one_connects_anew() -> None:
    mine = big_cache()
    incomplete = 0

    async def body(lent: Producer) -> None:
        nonlocal incomplete
        whole = content(1, lent.memory.nbytes)
        async with reached(mine, lent) as path:
            for delay_s in (0.0, 0.002, 0.01):
                mine.bytes[:] = 0
                fetch = asyncio.create_task(path.fetch(lent.ticket, range(64), range(64)))
                await asyncio.sleep(delay_s)
                fetch.cancel()
                with pytest.raises(asyncio.CancelledError):
                    await fetch
                frozen = mine.bytes.copy()
                await asyncio.sleep(0.05)
                assert (mine.bytes == frozen).all()
                incomplete += bool((frozen != whole).any())
            await path.fetch(lent.ticket, range(64), range(64))
            assert (mine.bytes == whole).all()

    with producer(BIG) as lent:
        run_bounded(body(lent))
    assert incomplete, "no fetch was cancelled before its end: the test shows nothing"


def test_nothing_is_left_of_two_hundred_fetches() -> None:
    mine = Cache(2)

    async def body(lent: Producer) -> None:
        outside = settled_holdings()
        async with reached(mine, lent) as path:
            inside = holdings()
            for start in range(200):
                await path.fetch(lent.ticket, [start % 32, 3], [4, start % 32])
            assert holdings() == inside
        assert holdings() == outside

    with producer(Lent("tcp")) as lent:
        run_bounded(body(lent))


@asynccontextmanager
async def served(source: TcpServer) -> AsyncIterator[int]:
    """A source in this process; yields its port."""
    listener = listening("127.0.0.1")
    task = asyncio.create_task(serve_all(source, listener))
    try:
        yield listener.getsockname()[1]
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        listener.close()


async def greeted(port: int) -> socket.socket:
    connection = socket.create_connection(("127.0.0.1", port))
    connection.setblocking(False)
    await asyncio.get_running_loop().sock_sendall(connection, DATA)
    return connection


def framed(request: Request) -> bytes:
    body = msgspec.msgpack.encode(request)
    return REQUEST_HEAD.pack(len(body)) + body


def blocks_as_bytes(*blocks: int) -> bytes:
    return np.array(blocks, "<u4").tobytes()


async def drained(connection: socket.socket) -> int:
    """How many bytes came before the other side closed."""
    loop, count = asyncio.get_running_loop(), 0
    try:
        while data := await asyncio.wait_for(loop.sock_recv(connection, 1 << 20), 10):
            count += len(data)
    except ConnectionResetError:
        pass
    return count


def test_a_borrower_that_does_not_read_is_given_up() -> None:
    cache = big_cache(1)

    async def body() -> None:
        source = TcpServer(cache.memory, only(None), stall_timeout_s=0.3)
        async with served(source) as port:
            connection = await greeted(port)
            connection.send(framed(Request(ROOM, SECRET, blocks_as_bytes(*range(64)), False)))
            await asyncio.sleep(1.0)
            assert await drained(connection) < cache.memory.nbytes
            connection.close()

    run_bounded(body())


@pytest.mark.parametrize(
    "sent",
    [
        b"",
        b"\x01",
        REQUEST_HEAD.pack(100) + b"not all of it",
        REQUEST_HEAD.pack(2**32 - 1),
        REQUEST_HEAD.pack(5) + b"\xff\xff\xff\xff\xff",
    ],
)
def test_who_says_nothing_or_nonsense_is_left(sent: bytes) -> None:
    cache = Cache(1)

    async def body() -> None:
        async with served(TcpServer(cache.memory, only(None), stall_timeout_s=0.2)) as port:
            connection = await greeted(port)
            connection.send(sent)
            assert await drained(connection) == 0
            connection.close()

    run_bounded(body())


def test_who_has_proved_a_secret_may_be_silent_for_long() -> None:
    cache, mine = Cache(1), Cache(2)

    async def body() -> None:
        async with served(TcpServer(cache.memory, only(None), stall_timeout_s=0.1)) as port:
            ticket = Ticket(host="127.0.0.1", port=port, room=ROOM, secret=SECRET)
            path = await TcpClient(mine.memory).connect(ticket, cache.memory, {})
            before = os.listdir("/proc/self/fd")
            await asyncio.sleep(0.5)
            await path.fetch(ticket, [0], [0])
            assert os.listdir("/proc/self/fd") == before
            path.close()

    run_bounded(body())


@pytest.mark.parametrize("blocks", [blocks_as_bytes(32), blocks_as_bytes(2**32 - 1), b"odd"])
def test_a_source_itself_refuses_blocks_that_are_not_there(blocks: bytes) -> None:
    cache = Cache(1)

    async def body() -> None:
        async with served(TcpServer(cache.memory, only(None))) as port:
            connection = await greeted(port)
            connection.send(framed(Request(ROOM, SECRET, blocks, False)))
            answer = await asyncio.wait_for(asyncio.get_running_loop().sock_recv(connection, 5000), 10)
            reason_bytes, nbytes = ANSWER_HEAD.unpack_from(answer)
            assert reason_bytes
            assert not nbytes
            assert b"block" in answer
            connection.close()

    run_bounded(body())


@pytest.mark.parametrize("reason", ["because", ""])
def test_who_is_refused_is_left(reason: str) -> None:
    def refuse(*_: object) -> None:
        raise PeerLost(reason)

    cache = Cache(1)

    async def body() -> None:
        async with served(TcpServer(cache.memory, refuse)) as port:
            ticket = Ticket(host="127.0.0.1", port=port, room=ROOM, secret=SECRET)
            with pytest.raises(PeerLost):
                await TcpClient(Cache(2).memory).connect(ticket, cache.memory, {})
            connection = await greeted(port)
            connection.send(framed(Request(ROOM, SECRET, b"", False)))
            assert await drained(connection) == ANSWER_HEAD.size + len(reason or "refused")
            connection.close()

    run_bounded(body())


def test_closing_a_source_ends_its_connections() -> None:
    cache = big_cache(1)

    async def body() -> None:
        before = settled_holdings()[0]
        source = TcpServer(cache.memory, only(None))
        async with served(source) as port:
            idle, busy = await greeted(port), await greeted(port)
            busy.send(framed(Request(ROOM, SECRET, blocks_as_bytes(*range(64)), False)))
            await asyncio.sleep(0.1)
            await source.close()
            await source.close()
            assert await drained(idle) == 0
            assert await drained(busy) < cache.memory.nbytes
            idle.close()
            busy.close()
        await eventually(lambda: holdings()[0] == before)

    run_bounded(body())


def test_a_source_of_gpu_memory_is_refused() -> None:
    memory = msgspec.structs.replace(Cache(1).memory, device="cuda:0")
    with pytest.raises(PeerLost, match="cuda:0"):
        run_bounded(TcpServer(memory, only(None)).open())
