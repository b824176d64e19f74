"""KV is copied from another process's cache; mapping it is authorised, and a dead producer's cache is unmapped."""

import asyncio
import mmap
import os
import signal
import socket
import subprocess
import sys
import threading
import traceback
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from typing import Any

import msgspec
import pytest
import uvloop

from baton.errors import PeerLost
from baton.ports.transfer import BlockMemory, Channel
from baton.protocol.handoff import Ticket
from baton.testing.bounded import eventually, run_bounded
from baton.transfer.shm import MapAnswer, MapRequest, ShmClient, ShmServer
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
    only,
    producer,
    settled_holdings,
)

pytestmark = pytest.mark.process

TICKET = Ticket(host="127.0.0.1", port=1, room=ROOM, secret=SECRET)
BIG = ProducerSetup("shm", planes=2, blocks=64, block_bytes=1 << 20)


@asynccontextmanager
async def connected(mine: Cache, peer: Producer, ticket: Ticket = TICKET, threads: int = 2) -> AsyncIterator[Channel]:
    client = ShmClient(mine.memory, threads=threads)
    try:
        channel = await client.connect(ticket, peer.memory, peer.details)
        try:
            yield channel
        finally:
            channel.close()
    finally:
        await client.close()


def run_on_asyncio(main: Coroutine[Any, Any, None]) -> None:
    run_bounded(main)


def run_on_uvloop(main: Coroutine[Any, Any, None]) -> None:
    uvloop.run(asyncio.wait_for(main, 20))


@pytest.mark.parametrize("run", [run_on_asyncio, run_on_uvloop])
@pytest.mark.parametrize("block_bytes", [512, 64 << 10], ids=["inline", "in a thread"])
def test_a_fetch_changes_exactly_the_target_blocks(run: Callable[[Any], None], block_bytes: int) -> None:
    setup = ProducerSetup("shm", block_bytes=block_bytes, spare_bytes=64, use_uvloop=run is run_on_uvloop)
    mine = Cache(2, blocks=50, block_bytes=block_bytes, spare_bytes=4096)
    before = mine.bytes.copy()
    theirs = [0, 1, 2, 3, 31, 17, 16, 4, 5, 6]
    mine_blocks = [10, 11, 12, 49, 48, 0, 1, 2, 3, 4]

    async def body(peer: Producer) -> None:
        async with connected(mine, peer) as channel:
            await channel.fetch(TICKET, theirs[:5], mine_blocks[:5])
            await channel.fetch(TICKET, theirs[5:], mine_blocks[5:])
        assert (mine.bytes == expected(mine, before, peer.memory, 1, list(zip(theirs, mine_blocks, strict=True)))).all()

    with producer(setup) as peer:
        run(body(peer))


@pytest.mark.parametrize("ticket", [{"secret": b"another"}, {"room": 8}])
def test_mapping_needs_the_secret_of_the_room(ticket: dict[str, Any]) -> None:
    async def body(peer: Producer) -> None:
        with pytest.raises(PeerLost, match="no such room"):
            async with connected(Cache(2), peer, msgspec.structs.replace(TICKET, **ticket)):
                pass

    with producer(ProducerSetup("shm")) as peer:
        run_bounded(body(peer))


@pytest.mark.parametrize(("theirs", "mine_blocks"), [([32], [0]), ([0], [32]), ([-1], [0]), ([0], [-1]), ([1, 2], [1])])
def test_blocks_outside_either_cache_are_refused(theirs: list[int], mine_blocks: list[int]) -> None:
    mine = Cache(2)

    async def body(peer: Producer) -> None:
        async with connected(mine, peer) as channel:
            with pytest.raises(PeerLost):
                await channel.fetch(TICKET, theirs, mine_blocks)

    with producer(ProducerSetup("shm")) as peer:
        run_bounded(body(peer))
    assert (mine.bytes == content(2, mine.bytes.size)).all()


def test_incompatible_caches_are_refused_with_the_difference() -> None:
    async def body() -> None:
        client = ShmClient(Cache(2).memory)
        other = msgspec.structs.replace(SHAPE, dtype="float32")
        theirs = msgspec.structs.replace(Cache(1).memory, shape=other)
        with pytest.raises(PeerLost, match="dtype is bfloat16 here and float32 there"):
            await client.connect(TICKET, theirs, {"socket": "nowhere"})
        await client.close()

    run_bounded(body())


@pytest.mark.parametrize("details", [{"socket": "baton-kv-none"}, {"socket": "a" * 200}, {"socket": 5}, {}])
def test_a_socket_without_a_producer_is_a_lost_peer(details: dict[str, object]) -> None:
    async def body() -> None:
        client = ShmClient(Cache(2).memory)
        with pytest.raises(PeerLost):
            await client.connect(TICKET, Cache(1).memory, details)
        await client.close()

    run_bounded(body())


@pytest.mark.parametrize("changes", [{"descriptor": None}, {"device": "cuda:0"}])
def test_only_a_cache_that_is_a_file_can_be_served(changes: dict[str, Any]) -> None:
    cache = Cache(1)
    server = ShmServer(msgspec.structs.replace(cache.memory, **changes), only(None))
    with pytest.raises(PeerLost):
        run_bounded(server.open())


def test_the_server_does_not_pass_a_file_that_may_shrink() -> None:
    cache = Cache(1, sealed=False)
    with pytest.raises(PeerLost, match="not sealed"):
        run_bounded(ShmServer(cache.memory, only(None)).open())


@asynccontextmanager
async def impostor(answer: bytes, descriptors: list[int]) -> AsyncIterator[str]:
    """A producer that answers with these bytes and descriptors."""
    name = f"baton-test-{os.getpid()}-{id(answer)}"
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_NONBLOCK)
    listener.bind(f"\0{name}")
    listener.listen()

    async def run() -> None:
        loop = asyncio.get_running_loop()
        connection, _ = await loop.sock_accept(listener)
        with connection:
            connection.setblocking(False)
            request = msgspec.msgpack.decode(await loop.sock_recv(connection, 4096), type=MapRequest)
            assert (request.room, request.secret) == (ROOM, SECRET)
            socket.send_fds(connection, [answer], descriptors)
            await loop.sock_recv(connection, 1)

    task = asyncio.create_task(run())
    try:
        yield name
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        listener.close()


def test_the_client_maps_only_sealed_files_of_sufficient_size() -> None:
    good = Cache(1)
    unsealed = Cache(1, sealed=False)
    small = Cache(1, blocks=31)
    answer = msgspec.msgpack.encode(MapAnswer(size=good.memory.nbytes))
    null = os.open("/dev/null", os.O_RDONLY)
    cases: list[tuple[str, bytes, list[int], BlockMemory]] = [
        ("not sealed", answer, [unsealed.descriptor], good.memory),
        ("does not fit into", answer, [small.descriptor], good.memory),
        ("not a memory file", answer, [null], good.memory),
        ("passed no descriptor", answer, [], good.memory),
        ("because", msgspec.msgpack.encode(MapAnswer(problem="because")), [good.descriptor], good.memory),
        ("invalid answer", b"\xff", [good.descriptor], good.memory),
        ("do not fit", answer, [good.descriptor], msgspec.structs.replace(good.memory, blocks=33)),
    ]

    async def body() -> None:
        client = ShmClient(Cache(2).memory)
        for problem, packet, descriptors, memory in cases:
            async with impostor(packet, descriptors) as name:
                with pytest.raises(PeerLost, match=problem):
                    await client.connect(TICKET, memory, {"socket": name})
        await client.close()

    before = settled_holdings()
    run_bounded(body())
    assert holdings()[0] == before[0]
    os.close(null)


async def request_mapping(name: str, packet: bytes) -> tuple[bytes, list[int]]:
    """Send one packet to a server; return its answer and the descriptors that it passed."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as connection:
        connection.settimeout(5)
        await asyncio.to_thread(connection.connect, f"\0{name}")
        connection.send(packet)
        answer, descriptors, _, _ = await asyncio.to_thread(socket.recv_fds, connection, 4096, 4)
        return answer, descriptors


def test_the_passed_descriptor_is_read_only() -> None:
    cache = Cache(1)

    async def body() -> None:
        server = ShmServer(cache.memory, only(None))
        name = str((await server.open())["socket"])
        packet = msgspec.msgpack.encode(MapRequest(ROOM, SECRET))
        _, (descriptor,) = await request_mapping(name, packet)
        with pytest.raises(PermissionError):
            mmap.mmap(descriptor, cache.memory.nbytes, prot=mmap.PROT_WRITE)
        with pytest.raises(OSError):
            os.pwrite(descriptor, b"x", 0)
        assert os.pread(descriptor, 100, 0) == cache.bytes[:100].tobytes()
        os.close(descriptor)
        await server.close()

    run_bounded(body())


@pytest.mark.parametrize("packet", [b"", b"x", b"\x92\x07", msgspec.msgpack.encode([7, SECRET, 1, 2])[:-9]])
def test_the_server_survives_invalid_requests(packet: bytes) -> None:
    cache = Cache(1)

    async def body() -> None:
        server = ShmServer(cache.memory, only(None), request_timeout_s=0.5)
        name = str((await server.open())["socket"])
        if packet:
            answer, descriptors = await request_mapping(name, packet)
            assert not descriptors
            assert msgspec.msgpack.decode(answer, type=MapAnswer).problem
        silent = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        silent.connect(f"\0{name}")
        silent.settimeout(10)
        assert await asyncio.to_thread(silent.recv, 1) == b"", "a silent connection is closed"
        silent.close()
        _, descriptors = await request_mapping(name, msgspec.msgpack.encode(MapRequest(ROOM, SECRET)))
        os.close(*descriptors)
        await server.close()

    run_bounded(body())


@asynccontextmanager
async def serving(cache: Cache, **options: Any) -> AsyncIterator[str]:
    """Serve the cache in this process; yields the name of the socket."""
    server = ShmServer(cache.memory, only(None), **options)
    yield str((await server.open())["socket"])
    await server.close()


def open_connection(name: str) -> socket.socket:
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    connection.settimeout(10)
    connection.connect(f"\0{name}")
    return connection


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can switch users")
@pytest.mark.parametrize("user", [0, 65534])
def test_only_processes_of_the_same_user_are_served(user: int) -> None:
    """A process of another user is disconnected before it has sent anything."""
    program = (
        "import socket, sys; s = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET); s.settimeout(10);"
        "s.connect('\\0' + sys.argv[1]); request = bytes.fromhex(sys.argv[2]); request and s.send(request);"
        "answer, fds, _, _ = socket.recv_fds(s, 4096, 1); print(len(fds), answer)"
    )
    cache = Cache(1)

    async def body() -> str:
        packet = msgspec.msgpack.encode(MapRequest(ROOM, SECRET)).hex() if user == 0 else ""
        async with serving(cache, request_timeout_s=60.0) as name:
            done = await asyncio.to_thread(
                subprocess.run,
                ["/usr/bin/env", "python3", "-c", program, name, packet],
                user=user,
                cwd="/",
                capture_output=True,
                text=True,
                timeout=15,
                check=True,
            )
        return str(done.stdout)

    answer = run_bounded(body())
    assert answer.startswith("1 ") if user == 0 else answer == "0 b''\n"


def test_a_refused_connection_is_closed() -> None:
    cache = Cache(1)

    async def body() -> None:
        async with serving(cache) as name:
            before = len(os.listdir("/proc/self/fd"))
            refused = [open_connection(name) for _ in range(20)]
            for connection in refused:
                connection.send(msgspec.msgpack.encode(MapRequest(ROOM, b"a wrong secret")))
                answer = await asyncio.to_thread(connection.recv, 4096)
                assert "no such room" in msgspec.msgpack.decode(answer, type=MapAnswer).problem
                assert await asyncio.to_thread(connection.recv, 1) == b""
            await eventually(lambda: len(os.listdir("/proc/self/fd")) == before + len(refused))
            for connection in refused:
                connection.close()

    run_bounded(body())


def test_connections_beyond_the_limit_are_closed() -> None:
    cache, mine = Cache(1), Cache(2)

    async def body() -> None:
        server, client = ShmServer(cache.memory, only(None), max_connections=2), ShmClient(mine.memory)
        details = await server.open()
        channels = [await client.connect(TICKET, cache.memory, details) for _ in range(2)]
        with pytest.raises(PeerLost, match="max_connections"):
            await client.connect(TICKET, cache.memory, details)
        channels.pop().close()
        await eventually(lambda: server.connections == 1)
        channels.append(await client.connect(TICKET, cache.memory, details))
        for channel in channels:
            await channel.fetch(TICKET, [0], [0])
            channel.close()
        await client.close()
        await server.close()

    run_bounded(body())


def test_the_memory_of_a_dead_producer_is_unmapped() -> None:
    mine = Cache(2, name="baton-test-mine")

    async def body(peer: Producer) -> None:
        async with connected(mine, peer) as channel:
            await channel.fetch(TICKET, [0], [0])
            mapped = holdings()[2]
            peer.signal(signal.SIGKILL)
            await eventually(lambda: holdings()[2] == mapped - 1)
            with pytest.raises(PeerLost, match="has closed its KV cache"):
                await channel.fetch(TICKET, [0], [0])

    with producer(ProducerSetup("shm")) as peer:
        run_bounded(body(peer))


def test_a_producer_that_dies_during_a_copy_is_a_lost_peer() -> None:
    mine = Cache(2, planes=2, blocks=64, block_bytes=1 << 20, name="baton-test-mine")

    async def body(peer: Producer) -> None:
        async with connected(mine, peer) as channel:
            mapped = holdings()[2]
            fetches = [asyncio.create_task(channel.fetch(TICKET, range(64), range(64))) for _ in range(100)]
            await asyncio.sleep(0.005)
            peer.signal(signal.SIGKILL)
            ends = await asyncio.gather(*fetches, return_exceptions=True)
            assert isinstance(ends[-1], PeerLost)
            assert all(end is None or isinstance(end, PeerLost) for end in ends)
            await eventually(lambda: holdings()[2] == mapped - 1)

    with producer(BIG) as peer:
        run_bounded(body(peer))


def test_connecting_to_a_stopped_producer_times_out() -> None:
    async def body(peer: Producer) -> None:
        client = ShmClient(Cache(2).memory, connect_timeout_s=0.2)
        peer.signal(signal.SIGSTOP)
        with pytest.raises(PeerLost, match=r"not answered within 0\.2 s"):
            await client.connect(TICKET, peer.memory, peer.details)
        peer.signal(signal.SIGCONT)
        await client.close()

    with producer(ProducerSetup("shm")) as peer:
        run_bounded(body(peer))


def test_a_stopped_producer_can_still_be_copied_from() -> None:
    mine = Cache(2)
    before = mine.bytes.copy()

    async def body(peer: Producer) -> None:
        async with connected(mine, peer) as channel:
            peer.signal(signal.SIGSTOP)
            await channel.fetch(TICKET, [3], [4])
        assert (mine.bytes == expected(mine, before, peer.memory, 1, [(3, 4)])).all()

    with producer(ProducerSetup("shm")) as peer:
        run_bounded(body(peer))


def is_copying() -> bool:
    """Return whether a thread is copying at this moment."""
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    for ident, frame in sys._current_frames().items():
        if names.get(ident, "").startswith("baton-kv-shm"):
            return any(each.name == "copy_blocks" for each in traceback.extract_stack(frame))
    return False


def test_nothing_is_written_after_a_cancelled_fetch() -> None:
    mine = Cache(2, planes=2, blocks=64, block_bytes=1 << 20)
    incomplete = 0

    async def body(peer: Producer) -> None:
        nonlocal incomplete
        complete = content(1, peer.memory.nbytes)
        async with connected(mine, peer, threads=1) as channel:
            for delay_s in (0.0, 0.001, 0.003, 0.0, 0.0):
                mine.bytes[:] = 0
                fetch = asyncio.create_task(channel.fetch(TICKET, range(64), range(64)))
                await asyncio.sleep(delay_s)
                fetch.cancel()
                await asyncio.sleep(0)
                fetch.cancel()
                with pytest.raises(asyncio.CancelledError):
                    await fetch
                assert not is_copying()
                frozen = mine.bytes.copy()
                await asyncio.sleep(0.05)
                assert (mine.bytes == frozen).all()
                incomplete += bool((frozen != complete).any())
            await channel.fetch(TICKET, range(64), range(64))
            assert (mine.bytes == complete).all()

    with producer(BIG) as peer:
        run_bounded(body(peer))
    assert incomplete, "no fetch was cancelled before its end: the test proves nothing"


def test_closing_a_channel_stops_its_copy_and_unmaps() -> None:
    mine = Cache(2, planes=2, blocks=64, block_bytes=1 << 20, name="baton-test-mine")

    async def body(peer: Producer) -> None:
        async with connected(mine, peer) as channel:
            mapped = holdings()[2]
            fetch = asyncio.create_task(channel.fetch(TICKET, range(64), range(64)))
            await asyncio.sleep(0.001)
            channel.close()
            channel.close()
            await asyncio.gather(fetch, return_exceptions=True)
            await eventually(lambda: holdings()[2] == mapped - 1)

    with producer(BIG) as peer:
        run_bounded(body(peer))


def test_two_hundred_fetches_leak_nothing() -> None:
    mine = Cache(2, block_bytes=16 << 10, name="baton-test-mine")

    async def body(peer: Producer) -> None:
        outside = settled_holdings()
        async with connected(mine, peer) as channel:
            await asyncio.gather(*(channel.fetch(TICKET, range(32), range(32)) for _ in range(3)))
            inside = holdings()
            for start in range(200):
                await channel.fetch(TICKET, range(32) if start % 2 else [3], range(32) if start % 2 else [start % 32])
            assert holdings() == inside
        assert holdings() == outside
        for _ in range(20):
            async with connected(mine, peer) as channel:
                await channel.fetch(TICKET, [1], [1])
        assert holdings() == outside

    with producer(ProducerSetup("shm", block_bytes=16 << 10)) as peer:
        run_bounded(body(peer))


def test_closing_the_server_disconnects_consumers_and_leaks_nothing() -> None:
    cache, mine = Cache(1), Cache(2, name="baton-test-mine")

    async def body() -> None:
        before = settled_holdings()
        server, client = ShmServer(cache.memory, only(None)), ShmClient(mine.memory)
        details = await server.open()
        assert await server.open() == details
        channel = await client.connect(TICKET, cache.memory, details)
        await channel.fetch(TICKET, [0], [0])
        await server.close()
        await server.close()
        await eventually(lambda: holdings()[2] == before[2])
        with pytest.raises(PeerLost):
            await channel.fetch(TICKET, [0], [0])
        channel.close()
        await client.close()
        assert holdings() == before

    run_bounded(body())
