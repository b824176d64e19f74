"""KV arrives over a socket directly in its blocks; every fetch is authorised, and every wait has a timeout."""

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
from baton.transfer.sockets import PIECE_BYTES, receive_bytes, receive_spans
from baton.transfer.tcp import ANSWER_HEAD, REQUEST_HEAD, Request, TcpClient, TcpServer
from baton.transfer.wire import DATA_PREAMBLE
from tests.unit.transfer.kv_caches import (
    ROOM,
    SECRET,
    SHAPE,
    Cache,
    Producer,
    ProducerSetup,
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

pytestmark = pytest.mark.process

SO_SNDBUFFORCE = 32
BIG = ProducerSetup("tcp", planes=2, blocks=64, block_bytes=1 << 20)


def big_cache(seed: int = 2) -> Cache:
    return Cache(seed, planes=2, blocks=64, block_bytes=1 << 20)


@asynccontextmanager
async def connected(
    mine: Cache, peer: Producer, ticket: Ticket | None = None, checksum: bool = False, stall_timeout_s: float = 5.0
) -> AsyncIterator[Channel]:
    client = TcpClient(mine.memory, checksum, stall_timeout_s=stall_timeout_s)
    channel = await client.connect(ticket or peer.ticket, peer.memory, peer.details)
    try:
        yield channel
    finally:
        channel.close()
        await client.close()


def run_on_asyncio(main: Coroutine[Any, Any, None]) -> None:
    run_bounded(main)


def run_on_uvloop(main: Coroutine[Any, Any, None]) -> None:
    uvloop.run(asyncio.wait_for(main, 20))


@pytest.mark.parametrize("run", [run_on_asyncio, run_on_uvloop])
@pytest.mark.parametrize("checksum", [False, True])
@pytest.mark.parametrize("host", ["127.0.0.1", "::1"])
@pytest.mark.parametrize("block_bytes", [8, 512, 100_000])
def test_a_fetch_changes_exactly_the_target_blocks(
    run: Callable[[Any], None], checksum: bool, host: str, block_bytes: int
) -> None:
    setup = ProducerSetup("tcp", block_bytes=block_bytes, host=host, use_uvloop=run is run_on_uvloop)
    mine = Cache(2, blocks=50, block_bytes=block_bytes, spare_bytes=4096)
    before = mine.bytes.copy()
    theirs = [0, 1, 2, 3, 31, 17, 16, 4, 5, 6]
    mine_blocks = [10, 11, 12, 49, 48, 0, 1, 2, 3, 4]

    async def body(peer: Producer) -> None:
        async with connected(mine, peer, checksum=checksum) as channel:
            both = (
                channel.fetch(peer.ticket, theirs[:5], mine_blocks[:5]),
                channel.fetch(peer.ticket, theirs[5:], mine_blocks[5:]),
            )
            await asyncio.gather(*both)
        assert (mine.bytes == expected(mine, before, peer.memory, 1, list(zip(theirs, mine_blocks, strict=True)))).all()

    with producer(setup) as peer:
        run(body(peer))


def test_more_scattered_spans_than_one_system_call_takes_arrive() -> None:
    setup = ProducerSetup("tcp", planes=8, blocks=1000, block_bytes=64)
    mine = Cache(2, planes=8, blocks=1000, block_bytes=64)
    theirs, mine_blocks = (np.random.default_rng(seed).permutation(1000).tolist() for seed in (3, 4))

    async def body(peer: Producer) -> None:
        async with connected(mine, peer) as channel:
            await channel.fetch(peer.ticket, theirs, mine_blocks)
        wanted = expected(mine, mine.bytes, peer.memory, 1, list(zip(theirs, mine_blocks, strict=True)))
        assert (mine.bytes == wanted).all()

    with producer(setup) as peer:
        run_bounded(body(peer))


def test_one_iteration_of_the_event_loop_moves_a_bounded_piece() -> None:
    """However much there is to read."""
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
        assert max(np.diff(moved)) <= PIECE_BYTES

    with sender, receiver:
        run_bounded(body())


@pytest.mark.parametrize("ticket", [{"secret": b"another"}, {"room": 8}])
def test_connecting_needs_the_secret_of_the_room(ticket: dict[str, Any]) -> None:
    async def body(peer: Producer) -> None:
        with pytest.raises(PeerLost, match="no such room"):
            async with connected(Cache(2), peer, msgspec.structs.replace(peer.ticket, **ticket)):
                pass

    with producer(ProducerSetup("tcp")) as peer:
        run_bounded(body(peer))


def test_every_fetch_needs_the_secret_of_its_room() -> None:
    mine = Cache(2)

    async def body(peer: Producer) -> None:
        async with connected(mine, peer) as channel:
            with pytest.raises(PeerLost, match="no such room"):
                await channel.fetch(msgspec.structs.replace(peer.ticket, secret=b"another"), [0], [0])
            assert (mine.bytes == content(2, mine.bytes.size)).all()
            await channel.fetch(peer.ticket, [0], [0])

    with producer(ProducerSetup("tcp")) as peer:
        run_bounded(body(peer))


def test_blocks_that_are_not_offered_are_not_sent() -> None:
    mine = Cache(2)
    before = mine.bytes.copy()

    async def body(peer: Producer) -> None:
        async with connected(mine, peer) as channel:
            with pytest.raises(PeerLost, match="not all of these blocks are offered"):
                await channel.fetch(peer.ticket, [3, 5], [0, 1])
            assert (mine.bytes == before).all()
            await channel.fetch(peer.ticket, [3, 4], [0, 1])
        assert (mine.bytes == expected(mine, before, peer.memory, 1, [(3, 0), (4, 1)])).all()

    with producer(ProducerSetup("tcp", offered=(3, 4))) as peer:
        run_bounded(body(peer))


@pytest.mark.parametrize(("theirs", "mine_blocks"), [([32], [0]), ([0], [32]), ([-1], [0]), ([0], [-1]), ([1, 2], [1])])
def test_blocks_outside_either_cache_are_not_requested(theirs: list[int], mine_blocks: list[int]) -> None:
    mine = Cache(2)

    async def body(peer: Producer) -> None:
        async with connected(mine, peer) as channel:
            with pytest.raises(PeerLost):
                await channel.fetch(peer.ticket, theirs, mine_blocks)

    with producer(ProducerSetup("tcp")) as peer:
        run_bounded(body(peer))
    assert (mine.bytes == content(2, mine.bytes.size)).all()


def test_incompatible_caches_are_refused_with_the_difference() -> None:
    async def body() -> None:
        client = TcpClient(Cache(2).memory)
        ticket = Ticket(host="127.0.0.1", port=1, room=ROOM, secret=SECRET)
        theirs = msgspec.structs.replace(Cache(1).memory, shape=msgspec.structs.replace(SHAPE, layers=3))
        with pytest.raises(PeerLost, match="layers is 2 here and 3 there"):
            await client.connect(ticket, theirs, {})
        with pytest.raises(PeerLost, match="cuda"):
            await TcpClient(msgspec.structs.replace(Cache(2).memory, device="cuda")).connect(
                ticket, Cache(1).memory, {}
            )

    run_bounded(body())


@pytest.mark.parametrize("host", ["127.0.0.1", "::1", "no-such-host.invalid"])
def test_an_address_without_a_producer_is_a_lost_peer(host: str) -> None:
    async def body() -> None:
        client = TcpClient(Cache(2).memory, connect_timeout_s=2.0)
        ticket = Ticket(host=host, port=1, room=ROOM, secret=SECRET)
        with pytest.raises(PeerLost, match="cannot connect to the producer"):
            await client.connect(ticket, Cache(1).memory, {"checksum": False})

    run_bounded(body())


@pytest.mark.parametrize(("by_producer", "by_consumer"), [(True, False), (False, True)])
def test_checksums_detect_a_changed_byte(by_producer: bool, by_consumer: bool) -> None:
    mine = Cache(2, block_bytes=4096)
    corrupts = True

    def intercept(forwarded: int, data: bytes) -> bytes:
        # An offset within the KV, after the first answer and the head.
        if corrupts and forwarded <= 50_000 < forwarded + len(data):
            at = 50_000 - forwarded
            return data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :]
        return data

    async def body(peer: Producer, port: int) -> None:
        nonlocal corrupts
        ticket = msgspec.structs.replace(peer.ticket, port=port)
        async with connected(mine, peer, ticket, checksum=by_consumer) as channel:
            with pytest.raises(PeerLost, match="corrupted in transit"):
                await channel.fetch(ticket, range(32), range(32))
            corrupts = False
            await channel.fetch(ticket, range(32), range(32))
            assert (mine.bytes == content(1, mine.bytes.size)).all()

    setup = ProducerSetup("tcp", block_bytes=4096, checksum=by_producer)
    with producer(setup) as peer, proxy((peer.host, peer.port), intercept) as between:
        run_bounded(body(peer, between.port))


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_a_producer_that_dies_or_stops_during_a_fetch_is_a_lost_peer(number: int) -> None:
    mine = big_cache()

    async def body(peer: Producer, port: int) -> None:
        ticket = msgspec.structs.replace(peer.ticket, port=port)
        async with connected(mine, peer, ticket, stall_timeout_s=0.5) as channel:
            with pytest.raises(PeerLost):
                await channel.fetch(ticket, range(64), range(64))
            frozen = mine.bytes.copy()
            assert (frozen != content(1, frozen.size)).any()
            assert (frozen != content(2, frozen.size)).any(), "it was in the middle"
            peer.signal(signal.SIGCONT)
            await asyncio.sleep(0.1)
            assert (mine.bytes == frozen).all()

    with producer(BIG) as peer:

        def intercept(forwarded: int, data: bytes) -> bytes:
            if forwarded <= 1 << 20 < forwarded + len(data):
                peer.signal(number)
            return data

        with proxy((peer.host, peer.port), intercept) as between:
            run_bounded(body(peer, between.port))


def test_a_producer_that_never_answers_is_a_lost_peer() -> None:
    async def body(peer: Producer) -> None:
        peer.signal(signal.SIGSTOP)
        with pytest.raises(PeerLost, match=r"not moved a byte for 0\.2 s"):
            async with connected(Cache(2), peer, stall_timeout_s=0.2):
                pass

    with producer(ProducerSetup("tcp")) as peer:
        run_bounded(body(peer))


def test_nothing_is_written_after_a_cancelled_fetch_and_the_next_one_reconnects() -> None:
    mine = big_cache()
    incomplete = 0

    async def body(peer: Producer) -> None:
        nonlocal incomplete
        complete = content(1, peer.memory.nbytes)
        async with connected(mine, peer) as channel:
            for delay_s in (0.0, 0.002, 0.01):
                mine.bytes[:] = 0
                fetch = asyncio.create_task(channel.fetch(peer.ticket, range(64), range(64)))
                await asyncio.sleep(delay_s)
                fetch.cancel()
                with pytest.raises(asyncio.CancelledError):
                    await fetch
                frozen = mine.bytes.copy()
                await asyncio.sleep(0.05)
                assert (mine.bytes == frozen).all()
                incomplete += bool((frozen != complete).any())
            await channel.fetch(peer.ticket, range(64), range(64))
            assert (mine.bytes == complete).all()

    with producer(BIG) as peer:
        run_bounded(body(peer))
    assert incomplete, "no fetch was cancelled before its end: the test proves nothing"


async def receive_request(connection: socket.socket) -> Request:
    (length,) = REQUEST_HEAD.unpack(await receive_bytes(connection, REQUEST_HEAD.size, 5.0))
    return msgspec.msgpack.decode(await receive_bytes(connection, length, 5.0), type=Request)


@pytest.mark.parametrize("run", [run_on_asyncio, run_on_uvloop])
def test_closing_a_channel_ends_its_fetch_and_leaves_other_sockets_alone(run: Callable[[Any], None]) -> None:
    cache, mine = Cache(1), Cache(2)

    async def body() -> None:
        loop = asyncio.get_running_loop()
        listener = listening("127.0.0.1")
        silent = asyncio.Event()

        async def answer_once() -> None:
            connection, _ = await loop.sock_accept(listener)
            with connection:
                connection.setblocking(False)
                await receive_bytes(connection, len(DATA_PREAMBLE), 5.0)
                await receive_request(connection)
                await loop.sock_sendall(connection, ANSWER_HEAD.pack(0, 0))
                await receive_request(connection)
                silent.set()
                await loop.sock_recv(connection, 1)

        server = asyncio.create_task(answer_once())
        ticket = Ticket(host="127.0.0.1", port=listener.getsockname()[1], room=ROOM, secret=SECRET)
        channel = await TcpClient(mine.memory, stall_timeout_s=60.0).connect(ticket, cache.memory, {})
        fetch = asyncio.create_task(channel.fetch(ticket, [0], [0]))
        await silent.wait()
        channel.close()
        readable = asyncio.Event()
        here, there = socket.socketpair()  # takes the lowest free descriptor
        loop.add_reader(here.fileno(), readable.set)
        with pytest.raises(PeerLost):
            await fetch
        there.send(b"x")
        await readable.wait()
        loop.remove_reader(here.fileno())
        await server
        for each in (here, there, listener):
            each.close()

    run(body())


def test_two_hundred_fetches_leak_nothing() -> None:
    mine = Cache(2)

    async def body(peer: Producer) -> None:
        outside = settled_holdings()
        async with connected(mine, peer) as channel:
            inside = holdings()
            for start in range(200):
                await channel.fetch(peer.ticket, [start % 32, 3], [4, start % 32])
            assert holdings() == inside
        assert holdings() == outside

    with producer(ProducerSetup("tcp")) as peer:
        run_bounded(body(peer))


@asynccontextmanager
async def served(server: TcpServer) -> AsyncIterator[int]:
    """Serve in this process; yields the port."""
    listener = listening("127.0.0.1")
    task = asyncio.create_task(serve_all(server, listener))
    try:
        yield listener.getsockname()[1]
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        listener.close()


async def open_data_connection(port: int) -> socket.socket:
    connection = socket.create_connection(("127.0.0.1", port))
    connection.setblocking(False)
    await asyncio.get_running_loop().sock_sendall(connection, DATA_PREAMBLE)
    return connection


def framed(request: Request) -> bytes:
    body = msgspec.msgpack.encode(request)
    return REQUEST_HEAD.pack(len(body)) + body


def blocks_as_bytes(*blocks: int) -> bytes:
    return np.array(blocks, "<u4").tobytes()


async def count_until_closed(connection: socket.socket) -> int:
    """Return how many bytes arrive before the other side closes."""
    loop, count = asyncio.get_running_loop(), 0
    try:
        while data := await asyncio.wait_for(loop.sock_recv(connection, 1 << 20), 10):
            count += len(data)
    except ConnectionResetError:
        pass
    return count


def test_a_consumer_that_does_not_read_is_disconnected() -> None:
    cache = big_cache(1)

    async def body() -> None:
        server = TcpServer(cache.memory, only(None), stall_timeout_s=0.3)
        async with served(server) as port:
            connection = await open_data_connection(port)
            connection.send(framed(Request(ROOM, SECRET, blocks_as_bytes(*range(64)), False)))
            await asyncio.sleep(1.0)
            assert await count_until_closed(connection) < cache.memory.nbytes
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
def test_a_connection_without_a_valid_request_is_closed(sent: bytes) -> None:
    cache = Cache(1)

    async def body() -> None:
        async with served(TcpServer(cache.memory, only(None), stall_timeout_s=0.2)) as port:
            connection = await open_data_connection(port)
            connection.send(sent)
            assert await count_until_closed(connection) == 0
            connection.close()

    run_bounded(body())


@pytest.mark.parametrize("proved", [False, True])
def test_only_a_consumer_with_a_secret_may_send_long_requests(proved: bool) -> None:
    cache = Cache(1, planes=1, blocks=2000, block_bytes=8)

    async def body() -> None:
        async with served(TcpServer(cache.memory, only(None))) as port:
            connection = await open_data_connection(port)
            if proved:
                connection.send(framed(Request(ROOM, SECRET, b"", False)))
                await receive_bytes(connection, ANSWER_HEAD.size, 5.0)
            connection.send(framed(Request(ROOM, SECRET, blocks_as_bytes(*range(2000)), False)))
            if proved:
                await receive_bytes(connection, ANSWER_HEAD.size + cache.memory.nbytes, 5.0)
            else:
                assert await count_until_closed(connection) == 0
            connection.close()

    run_bounded(body())


def test_an_authorised_consumer_may_be_idle() -> None:
    cache, mine = Cache(1), Cache(2)

    async def body() -> None:
        async with served(TcpServer(cache.memory, only(None), stall_timeout_s=0.1)) as port:
            ticket = Ticket(host="127.0.0.1", port=port, room=ROOM, secret=SECRET)
            channel = await TcpClient(mine.memory).connect(ticket, cache.memory, {})
            before = os.listdir("/proc/self/fd")
            await asyncio.sleep(0.5)
            await channel.fetch(ticket, [0], [0])
            assert os.listdir("/proc/self/fd") == before
            channel.close()

    run_bounded(body())


@pytest.mark.parametrize("blocks", [blocks_as_bytes(32), blocks_as_bytes(2**32 - 1), b"odd"])
def test_the_server_refuses_blocks_outside_its_cache(blocks: bytes) -> None:
    cache = Cache(1)

    async def body() -> None:
        async with served(TcpServer(cache.memory, only(None))) as port:
            connection = await open_data_connection(port)
            connection.send(framed(Request(ROOM, SECRET, blocks, False)))
            answer = await asyncio.wait_for(asyncio.get_running_loop().sock_recv(connection, 5000), 10)
            reason_bytes, nbytes = ANSWER_HEAD.unpack_from(answer)
            assert reason_bytes
            assert not nbytes
            assert b"block" in answer
            connection.close()

    run_bounded(body())


@pytest.mark.parametrize("reason", ["because", ""])
def test_a_refused_connection_is_closed(reason: str) -> None:
    def refuse(*_: object) -> None:
        raise PeerLost(reason)

    cache = Cache(1)

    async def body() -> None:
        async with served(TcpServer(cache.memory, refuse)) as port:
            ticket = Ticket(host="127.0.0.1", port=port, room=ROOM, secret=SECRET)
            with pytest.raises(PeerLost):
                await TcpClient(Cache(2).memory).connect(ticket, cache.memory, {})
            connection = await open_data_connection(port)
            connection.send(framed(Request(ROOM, SECRET, b"", False)))
            assert await count_until_closed(connection) == ANSWER_HEAD.size + len(reason or "refused")
            connection.close()

    run_bounded(body())


def test_closing_the_server_ends_its_connections() -> None:
    cache = big_cache(1)

    async def body() -> None:
        before = settled_holdings()[0]
        server = TcpServer(cache.memory, only(None))
        async with served(server) as port:
            idle, busy = await open_data_connection(port), await open_data_connection(port)
            busy.send(framed(Request(ROOM, SECRET, blocks_as_bytes(*range(64)), False)))
            await asyncio.sleep(0.1)
            await server.close()
            await server.close()
            assert await count_until_closed(idle) == 0
            assert await count_until_closed(busy) < cache.memory.nbytes
            idle.close()
            busy.close()
        await eventually(lambda: holdings()[0] == before)

    run_bounded(body())


def test_gpu_memory_is_refused() -> None:
    memory = msgspec.structs.replace(Cache(1).memory, device="cuda:0")
    with pytest.raises(PeerLost, match="cuda:0"):
        run_bounded(TcpServer(memory, only(None)).open())
