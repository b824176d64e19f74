"""KV is copied out of another process's cache; nobody maps it without leave, and nobody holds on to a dead one's."""

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
from baton.ports.transfer import Channel, KvMemory
from baton.protocol.handoff import Ticket
from baton.testing.bounded import eventually, run_bounded
from baton.transfer.shm import Answer, Knock, ShmClient, ShmServer
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
    only,
    producer,
    settled_holdings,
)

TICKET = Ticket(host="127.0.0.1", port=1, room=ROOM, secret=SECRET)
BIG = Lent("shm", planes=2, blocks=64, block_bytes=1 << 20)


@asynccontextmanager
async def reached(mine: Cache, lent: Producer, ticket: Ticket = TICKET, threads: int = 2) -> AsyncIterator[Channel]:
    connect = ShmClient(mine.memory, threads=threads)
    try:
        path = await connect.connect(ticket, lent.memory, lent.details)
        try:
            yield path
        finally:
            path.close()
    finally:
        await connect.close()


def run_on_asyncio(main: Coroutine[Any, Any, None]) -> None:
    run_bounded(main)


def run_on_uvloop(main: Coroutine[Any, Any, None]) -> None:
    uvloop.run(asyncio.wait_for(main, 20))


@pytest.mark.parametrize("run", [run_on_asyncio, run_on_uvloop])
@pytest.mark.parametrize("block_bytes", [512, 64 << 10], ids=["at once", "in a thread"])
def test_every_byte_arrives_and_no_other_changes(run: Callable[[Any], None], block_bytes: int) -> None:
    setup = Lent("shm", block_bytes=block_bytes, spare_bytes=64, use_uvloop=run is run_on_uvloop)
    mine = Cache(2, blocks=50, block_bytes=block_bytes, spare_bytes=4096)
    before = mine.bytes.copy()
    theirs = [0, 1, 2, 3, 31, 17, 16, 4, 5, 6]
    places = [10, 11, 12, 49, 48, 0, 1, 2, 3, 4]

    async def body(lent: Producer) -> None:
        async with reached(mine, lent) as path:
            await path.fetch(TICKET, theirs[:5], places[:5])
            await path.fetch(TICKET, theirs[5:], places[5:])
        assert (mine.bytes == expected(mine, before, lent.memory, 1, list(zip(theirs, places, strict=True)))).all()

    with producer(setup) as lent:
        run(body(lent))


@pytest.mark.parametrize("ticket", [{"secret": b"another"}, {"room": 8}])
def test_without_the_secret_of_the_room_nothing_is_mapped(ticket: dict[str, Any]) -> None:
    async def body(lent: Producer) -> None:
        with pytest.raises(PeerLost, match="no such room"):
            async with reached(Cache(2), lent, msgspec.structs.replace(TICKET, **ticket)):
                pass

    with producer(Lent("shm")) as lent:
        run_bounded(body(lent))


@pytest.mark.parametrize(("theirs", "places"), [([32], [0]), ([0], [32]), ([-1], [0]), ([0], [-1]), ([1, 2], [1])])
def test_blocks_that_are_not_there_are_refused(theirs: list[int], places: list[int]) -> None:
    mine = Cache(2)

    async def body(lent: Producer) -> None:
        async with reached(mine, lent) as path:
            with pytest.raises(PeerLost):
                await path.fetch(TICKET, theirs, places)

    with producer(Lent("shm")) as lent:
        run_bounded(body(lent))
    assert (mine.bytes == content(2, mine.bytes.size)).all()


def test_a_cache_of_another_shape_is_refused_by_name() -> None:
    async def body() -> None:
        connect = ShmClient(Cache(2).memory)
        other = msgspec.structs.replace(SHAPE, dtype="float32")
        theirs = msgspec.structs.replace(Cache(1).memory, shape=other)
        with pytest.raises(PeerLost, match="dtype is bfloat16 here and float32 there"):
            await connect.connect(TICKET, theirs, {"socket": "nowhere"})
        await connect.close()

    run_bounded(body())


@pytest.mark.parametrize("details", [{"socket": "baton-kv-nobody"}, {"socket": "a" * 200}, {"socket": 5}, {}])
def test_a_name_that_nobody_listens_on_is_a_lost_peer(details: dict[str, object]) -> None:
    async def body() -> None:
        connect = ShmClient(Cache(2).memory)
        with pytest.raises(PeerLost):
            await connect.connect(TICKET, Cache(1).memory, details)
        await connect.close()

    run_bounded(body())


@pytest.mark.parametrize("changes", [{"descriptor": None}, {"device": "cuda:0"}])
def test_only_a_cache_that_is_a_file_can_be_opened(changes: dict[str, Any]) -> None:
    cache = Cache(1)
    source = ShmServer(msgspec.structs.replace(cache.memory, **changes), only(None))
    with pytest.raises(PeerLost):
        run_bounded(source.open())


def test_a_source_does_not_offer_a_file_that_may_shrink() -> None:
    cache = Cache(1, sealed=False)
    with pytest.raises(PeerLost, match="not sealed"):
        run_bounded(ShmServer(cache.memory, only(None)).open())


@asynccontextmanager
async def impostor(answer: bytes, descriptors: list[int]) -> AsyncIterator[str]:
    """A lender that answers like this."""
    name = f"baton-test-{os.getpid()}-{id(answer)}"
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_NONBLOCK)
    listener.bind(f"\0{name}")
    listener.listen()

    async def run() -> None:
        loop = asyncio.get_running_loop()
        connection, _ = await loop.sock_accept(listener)
        with connection:
            connection.setblocking(False)
            knock = msgspec.msgpack.decode(await loop.sock_recv(connection, 4096), type=Knock)
            assert (knock.room, knock.secret) == (ROOM, SECRET)
            socket.send_fds(connection, [answer], descriptors)
            await loop.sock_recv(connection, 1)

    task = asyncio.create_task(run())
    try:
        yield name
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        listener.close()


def test_a_borrower_maps_only_what_is_sealed_large_enough_and_a_file() -> None:
    good = Cache(1)
    unsealed = Cache(1, sealed=False)
    small = Cache(1, blocks=31)
    answer = msgspec.msgpack.encode(Answer(size=good.memory.nbytes))
    null = os.open("/dev/null", os.O_RDONLY)
    cases: list[tuple[str, bytes, list[int], KvMemory]] = [
        ("not sealed", answer, [unsealed.descriptor], good.memory),
        ("does not fit the", answer, [small.descriptor], good.memory),
        ("no memory file", answer, [null], good.memory),
        ("passed no KV cache", answer, [], good.memory),
        ("because", msgspec.msgpack.encode(Answer(problem="because")), [good.descriptor], good.memory),
        ("something else", b"\xff", [good.descriptor], good.memory),
        ("do not fit", answer, [good.descriptor], msgspec.structs.replace(good.memory, blocks=33)),
    ]

    async def body() -> None:
        connect = ShmClient(Cache(2).memory)
        for complaint, packet, descriptors, memory in cases:
            async with impostor(packet, descriptors) as name:
                with pytest.raises(PeerLost, match=complaint):
                    await connect.connect(TICKET, memory, {"socket": name})
        await connect.close()

    before = settled_holdings()
    run_bounded(body())
    assert holdings()[0] == before[0]
    os.close(null)


async def knocked(name: str, packet: bytes) -> tuple[bytes, list[int]]:
    """Knock at a source by hand; returns its answer and the descriptors it passed."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as connection:
        connection.settimeout(5)
        await asyncio.to_thread(connection.connect, f"\0{name}")
        connection.send(packet)
        answer, descriptors, _, _ = await asyncio.to_thread(socket.recv_fds, connection, 4096, 4)
        return answer, descriptors


def test_what_is_passed_can_only_be_read() -> None:
    cache = Cache(1)

    async def body() -> None:
        source = ShmServer(cache.memory, only(None))
        name = str((await source.open())["socket"])
        packet = msgspec.msgpack.encode(Knock(ROOM, SECRET))
        _, (descriptor,) = await knocked(name, packet)
        with pytest.raises(PermissionError):
            mmap.mmap(descriptor, cache.memory.nbytes, prot=mmap.PROT_WRITE)
        with pytest.raises(OSError):
            os.pwrite(descriptor, b"x", 0)
        assert os.pread(descriptor, 100, 0) == cache.bytes[:100].tobytes()
        os.close(descriptor)
        await source.close()

    run_bounded(body())


@pytest.mark.parametrize("packet", [b"", b"x", b"\x92\x07", msgspec.msgpack.encode([7, SECRET, 1, 2])[:-9]])
def test_a_source_survives_what_is_no_knock(packet: bytes) -> None:
    cache = Cache(1)

    async def body() -> None:
        source = ShmServer(cache.memory, only(None), knock_s=0.5)
        name = str((await source.open())["socket"])
        if packet:
            answer, descriptors = await knocked(name, packet)
            assert not descriptors
            assert msgspec.msgpack.decode(answer, type=Answer).problem
        silent = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        silent.connect(f"\0{name}")
        silent.settimeout(10)
        assert await asyncio.to_thread(silent.recv, 1) == b"", "who says nothing is not waited for"
        silent.close()
        _, descriptors = await knocked(name, msgspec.msgpack.encode(Knock(ROOM, SECRET)))
        os.close(*descriptors)
        await source.close()

    run_bounded(body())


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become somebody else")
def test_another_user_gets_nothing() -> None:
    program = (
        "import socket, sys; s = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET); s.settimeout(10);"
        "s.connect('\\0' + sys.argv[1]); s.send(bytes.fromhex(sys.argv[2]));"
        "answer, fds, _, _ = socket.recv_fds(s, 4096, 1); print(len(fds), answer)"
    )
    cache = Cache(1)

    async def body(user: int) -> str:
        source = ShmServer(cache.memory, only(None))
        name = str((await source.open())["socket"])
        packet = msgspec.msgpack.encode(Knock(ROOM, SECRET)).hex()
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
        await source.close()
        return str(done.stdout)

    refused = run_bounded(body(65534))
    assert refused.startswith("0 ")
    assert "same user" in refused
    assert run_bounded(body(0)).startswith("1 ")


def test_a_dead_lenders_memory_is_let_go() -> None:
    mine = Cache(2, name="baton-test-mine")

    async def body(lent: Producer) -> None:
        async with reached(mine, lent) as path:
            await path.fetch(TICKET, [0], [0])
            mapped = holdings()[2]
            lent.signal(signal.SIGKILL)
            await eventually(lambda: holdings()[2] == mapped - 1)
            with pytest.raises(PeerLost, match="gone"):
                await path.fetch(TICKET, [0], [0])

    with producer(Lent("shm")) as lent:
        run_bounded(body(lent))


def test_a_lender_that_dies_while_its_kv_is_copied_is_a_lost_peer() -> None:
    mine = Cache(2, planes=2, blocks=64, block_bytes=1 << 20, name="baton-test-mine")

    async def body(lent: Producer) -> None:
        async with reached(mine, lent) as path:
            mapped = holdings()[2]
            fetches = [asyncio.create_task(path.fetch(TICKET, range(64), range(64))) for _ in range(100)]
            await asyncio.sleep(0.005)
            lent.signal(signal.SIGKILL)
            ends = await asyncio.gather(*fetches, return_exceptions=True)
            assert isinstance(ends[-1], PeerLost)
            assert all(end is None or isinstance(end, PeerLost) for end in ends)
            await eventually(lambda: holdings()[2] == mapped - 1)

    with producer(BIG) as lent:
        run_bounded(body(lent))


def test_a_stopped_lender_is_waited_for_only_so_long() -> None:
    async def body(lent: Producer) -> None:
        connect = ShmClient(Cache(2).memory, connect_timeout_s=0.2)
        lent.signal(signal.SIGSTOP)
        with pytest.raises(PeerLost, match=r"not answered within 0\.2 s"):
            await connect.connect(TICKET, lent.memory, lent.details)
        lent.signal(signal.SIGCONT)
        await connect.close()

    with producer(Lent("shm")) as lent:
        run_bounded(body(lent))


def test_a_stopped_lender_can_still_be_copied_from() -> None:
    mine = Cache(2)
    before = mine.bytes.copy()

    async def body(lent: Producer) -> None:
        async with reached(mine, lent) as path:
            lent.signal(signal.SIGSTOP)
            await path.fetch(TICKET, [3], [4])
        assert (mine.bytes == expected(mine, before, lent.memory, 1, [(3, 4)])).all()

    with producer(Lent("shm")) as lent:
        run_bounded(body(lent))


def is_copying() -> bool:
    """Whether a thread is at this moment within a copy."""
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    for ident, frame in sys._current_frames().items():
        if names.get(ident, "").startswith("baton-kv-shm"):
            return any(each.name == "copy_blocks" for each in traceback.extract_stack(frame))
    return False


def test_after_a_cancelled_fetch_nothing_is_written_any_more() -> None:
    mine = Cache(2, planes=2, blocks=64, block_bytes=1 << 20)
    incomplete = 0

    async def body(lent: Producer) -> None:
        nonlocal incomplete
        whole = content(1, lent.memory.nbytes)
        async with reached(mine, lent, threads=1) as path:
            for delay_s in (0.0, 0.001, 0.003, 0.0, 0.0):
                mine.bytes[:] = 0
                fetch = asyncio.create_task(path.fetch(TICKET, range(64), range(64)))
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
                incomplete += bool((frozen != whole).any())
            await path.fetch(TICKET, range(64), range(64))
            assert (mine.bytes == whole).all()

    with producer(BIG) as lent:
        run_bounded(body(lent))
    assert incomplete, "no fetch was cancelled before its end: the test shows nothing"


def test_closing_a_path_stops_what_is_copied_and_unmaps() -> None:
    mine = Cache(2, planes=2, blocks=64, block_bytes=1 << 20, name="baton-test-mine")

    async def body(lent: Producer) -> None:
        async with reached(mine, lent) as path:
            mapped = holdings()[2]
            fetch = asyncio.create_task(path.fetch(TICKET, range(64), range(64)))
            await asyncio.sleep(0.001)
            path.close()
            path.close()
            await asyncio.gather(fetch, return_exceptions=True)
            await eventually(lambda: holdings()[2] == mapped - 1)

    with producer(BIG) as lent:
        run_bounded(body(lent))


def test_nothing_is_left_of_two_hundred_fetches() -> None:
    mine = Cache(2, block_bytes=16 << 10, name="baton-test-mine")

    async def body(lent: Producer) -> None:
        outside = settled_holdings()
        async with reached(mine, lent) as path:
            await asyncio.gather(*(path.fetch(TICKET, range(32), range(32)) for _ in range(3)))
            inside = holdings()
            for start in range(200):
                await path.fetch(TICKET, range(32) if start % 2 else [3], range(32) if start % 2 else [start % 32])
            assert holdings() == inside
        assert holdings() == outside
        for _ in range(20):
            async with reached(mine, lent) as path:
                await path.fetch(TICKET, [1], [1])
        assert holdings() == outside

    with producer(Lent("shm", block_bytes=16 << 10)) as lent:
        run_bounded(body(lent))


def test_a_closed_source_tells_its_borrowers_and_holds_nothing() -> None:
    cache, mine = Cache(1), Cache(2, name="baton-test-mine")

    async def body() -> None:
        before = settled_holdings()
        source, connect = ShmServer(cache.memory, only(None)), ShmClient(mine.memory)
        details = await source.open()
        assert await source.open() == details
        path = await connect.connect(TICKET, cache.memory, details)
        await path.fetch(TICKET, [0], [0])
        await source.close()
        await source.close()
        await eventually(lambda: holdings()[2] == before[2])
        with pytest.raises(PeerLost):
            await path.fetch(TICKET, [0], [0])
        path.close()
        await connect.close()
        assert holdings() == before

    run_bounded(body())
