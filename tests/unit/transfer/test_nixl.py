"""NIXL between real processes: each test has its lender in one and its borrower in another, since UCX stays loaded."""

import asyncio
import os
import signal
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from multiprocessing.connection import Connection
from pathlib import Path as File
from typing import Any

import msgspec
import pytest

from baton.errors import PeerLost
from baton.ports.transfer import Channel, KvMemory
from baton.protocol.handoff import Ticket
from baton.testing.bounded import run_bounded
from baton.transfer.nixl import NixlClient, NixlServer, available
from tests.unit.transfer.kv_caches import (
    PATIENCE_S,
    SHAPE,
    SPAWN,
    Cache,
    Lent,
    Producer,
    content,
    expected,
    holdings,
    producer,
)

pytestmark = [pytest.mark.slow, pytest.mark.skipif(not available(), reason="nixl-cu12 is not installed")]

TICKET = Ticket(host="", port=0, room=1, secret=b"")
OVER_TCP = {"UCX_TLS": "tcp"}
BIG = Lent("nixl", planes=2, blocks=64, block_bytes=1 << 20)


class Peer(msgspec.Struct, frozen=True):
    """A lender, as its borrower's process sees it."""

    pid: int
    memory: KvMemory
    details: dict[str, object]


Scenario = Callable[[list[Peer]], Coroutine[Any, Any, None]]


def play(scenario: Scenario, setup: Lent, lenders: int = 1) -> None:
    """Run `scenario` in a process of its own."""
    opened = [producer(setup) for _ in range(lenders)]
    peers = [told.__enter__() for told in opened]
    ours, its = SPAWN.Pipe()
    process = SPAWN.Process(target=claim, args=(its, scenario, setup.env, [seen(peer) for peer in peers]), daemon=True)
    process.start()
    its.close()
    try:
        assert ours.poll(2 * PATIENCE_S), "the borrower did not end"
        problem = ours.recv()
    finally:
        process.kill()
        process.join(PATIENCE_S)
        for told in opened:
            told.__exit__(None, None, None)
    assert not problem, problem


def seen(peer: Producer) -> Peer:
    assert peer.process.pid is not None
    return Peer(peer.process.pid, msgspec.structs.replace(peer.memory, descriptor=None), peer.details)


def claim(told: Connection, scenario: Scenario, env: dict[str, str], peers: list[Peer]) -> None:
    """The program of a borrower's process."""
    os.environ.update(env)
    try:
        run_bounded(scenario(peers), PATIENCE_S)
    except BaseException:  # noqa: BLE001 - told to the test
        import traceback

        told.send(traceback.format_exc())
    else:
        told.send("")


@asynccontextmanager
async def reached(mine: Cache, peer: Peer, **options: float) -> AsyncIterator[Channel]:
    connect = NixlClient(mine.memory, **options)  # type: ignore[arg-type]
    path = await connect.connect(TICKET, peer.memory, peer.details)
    try:
        yield path
    finally:
        path.close()
        await connect.close()


def big_cache() -> Cache:
    return Cache(2, planes=2, blocks=64, block_bytes=1 << 20)


async def copies_and_leaves_nothing(peers: list[Peer]) -> None:
    mine = Cache(2, blocks=50, block_bytes=6144, spare_bytes=4096)
    before = mine.bytes.copy()
    theirs = [0, 1, 2, 3, 31, 17, 16, 4, 5, 6]
    places = [10, 11, 12, 49, 48, 0, 1, 2, 3, 4]
    async with reached(mine, peers[0]) as path:
        await path.fetch(TICKET, theirs[:5], places[:5])
        await path.fetch(TICKET, theirs[5:], places[5:])
        wanted = expected(mine, before, peers[0].memory, 1, list(zip(theirs, places, strict=True)))
        assert (mine.bytes == wanted).all()
        await path.fetch(TICKET, [], [])
        await asyncio.gather(*(path.fetch(TICKET, [n % 32], [n % 32]) for n in range(20)))
        inside = holdings()
        for start in range(200):
            await path.fetch(TICKET, [start % 32, 3], [4, start % 32])
        assert holdings() == inside
        for wrong in ([32], [-1]):
            with pytest.raises(PeerLost):
                await path.fetch(TICKET, wrong, [0])
            with pytest.raises(PeerLost):
                await path.fetch(TICKET, [0], [*wrong, 0])


@pytest.mark.parametrize("env", [{}, OVER_TCP], ids=["default", "tcp"])
def test_every_byte_arrives_and_nothing_is_left(env: dict[str, str]) -> None:
    play(copies_and_leaves_nothing, Lent("nixl", block_bytes=6144, spare_bytes=64, env=env))


async def keeps_no_memory(peers: list[Peer]) -> None:
    mine = Cache(2, planes=60, blocks=64, block_bytes=64)
    scattered = [*range(0, 64, 2), *range(1, 64, 2)]
    async with reached(mine, peers[0]) as path:
        for _ in range(20):
            await path.fetch(TICKET, scattered, scattered)
        before = resident_bytes()
        for _ in range(200):
            await path.fetch(TICKET, scattered, scattered)
        assert resident_bytes() - before < 10 << 20


def resident_bytes() -> int:
    return int(File("/proc/self/statm").read_text().split()[1]) * 4096


def test_two_hundred_fetches_of_thousands_of_parts_keep_no_memory() -> None:
    play(keeps_no_memory, Lent("nixl", planes=60, blocks=64, block_bytes=64))


async def moves_more_than_one_request(peers: list[Peer]) -> None:
    mine = big_cache()
    async with reached(mine, peers[0]) as path:
        await path.fetch(TICKET, range(64), range(64))
        assert (mine.bytes == content(1, mine.bytes.size)).all()


def test_what_is_longer_than_one_request_arrives_whole() -> None:
    play(moves_more_than_one_request, BIG)


async def refuses(peers: list[Peer]) -> None:
    peer, mine = peers[0], Cache(2)
    other = msgspec.structs.replace(peer.memory, shape=msgspec.structs.replace(SHAPE, kv_heads=3))
    connect = NixlClient(mine.memory)
    with pytest.raises(PeerLost, match="kv_heads is 2 here and 3 there"):
        await connect.connect(TICKET, other, peer.details)
    for details in ({}, {"agent": "a", "metadata": b"nonsense"}, peer.details | {"agent": "another"}):
        with pytest.raises(PeerLost):
            await connect.connect(TICKET, peer.memory, details)
    elsewhere = msgspec.structs.replace(peer.memory, address=peer.memory.address + peer.memory.nbytes)
    path = await connect.connect(TICKET, elsewhere, peer.details)
    with pytest.raises(PeerLost):
        await path.fetch(TICKET, [0], [0])
    path.close()
    assert (mine.bytes == content(2, mine.bytes.size)).all()
    path = await connect.connect(TICKET, peer.memory, peer.details)
    await path.fetch(TICKET, [0], [0])
    path.close()
    await connect.close()
    await connect.close()


def test_what_does_not_fit_or_is_not_registered_is_refused() -> None:
    play(refuses, Lent("nixl"))


async def survives_a_dead_lender(peers: list[Peer]) -> None:
    mine = big_cache()
    async with reached(mine, peers[0], stall_timeout_s=2.0, connect_timeout_s=5.0) as path:
        await path.fetch(TICKET, [0], [0])
        fetch = asyncio.create_task(path.fetch(TICKET, range(64), range(64)))
        await asyncio.sleep(0.002)
        os.kill(peers[0].pid, signal.SIGKILL)
        await asyncio.gather(fetch, return_exceptions=True)
        for _ in range(2):
            with pytest.raises(PeerLost):
                await path.fetch(TICKET, range(64), range(64))
        frozen = mine.bytes.copy()
        await asyncio.sleep(0.1)
        assert (mine.bytes == frozen).all()


@pytest.mark.parametrize("env", [{}, OVER_TCP], ids=["default", "tcp"])
def test_a_dead_lender_is_a_lost_peer(env: dict[str, str]) -> None:
    play(survives_a_dead_lender, msgspec.structs.replace(BIG, env=env))


async def gives_up_a_frozen_lender(peers: list[Peer]) -> None:
    mine = big_cache()
    connect = NixlClient(mine.memory, stall_timeout_s=0.5)
    frozen_path = await connect.connect(TICKET, peers[0].memory, peers[0].details)
    other_path = await connect.connect(TICKET, peers[1].memory, peers[1].details)
    await frozen_path.fetch(TICKET, [0], [0])
    await other_path.fetch(TICKET, [0], [0])
    os.kill(peers[0].pid, signal.SIGSTOP)
    mine.bytes[:] = 0
    with pytest.raises(PeerLost, match="did not answer in time"):
        await frozen_path.fetch(TICKET, range(32), range(32))
    before = mine.bytes.copy()
    os.kill(peers[0].pid, signal.SIGCONT)
    # Whatever our side does from now on, nothing of the given up read may come.
    for _ in range(5):
        await other_path.fetch(TICKET, [5], [63])
        await asyncio.sleep(0.1)
    wanted = before.reshape(2, 64, -1)
    wanted[:, 63] = content(1, mine.bytes.size).reshape(2, 64, -1)[:, 5]
    assert (mine.bytes == wanted.ravel()).all()
    frozen_path.close()
    other_path.close()
    await connect.close()


def test_after_a_frozen_lender_is_given_up_nothing_of_it_is_written() -> None:
    play(gives_up_a_frozen_lender, msgspec.structs.replace(BIG, env=OVER_TCP), lenders=2)


async def stops_when_cancelled(peers: list[Peer]) -> None:
    mine = big_cache()
    whole = content(1, mine.bytes.size)
    async with reached(mine, peers[0]) as path:
        await path.fetch(TICKET, [0], [0])
        partial = 0
        for delay_s in (0.0, 0.002, 0.01, 0.002, 0.0):
            mine.bytes[:] = 0
            fetch = asyncio.create_task(path.fetch(TICKET, range(64), range(64)))
            await asyncio.sleep(delay_s)
            fetch.cancel()
            await asyncio.sleep(0)
            fetch.cancel()
            with pytest.raises(asyncio.CancelledError):
                await fetch
            frozen = mine.bytes.copy()
            await asyncio.sleep(0.05)
            assert (mine.bytes == frozen).all()
            partial += bool(frozen.any() and (frozen != whole).any())
        assert partial, "no fetch was stopped in the middle"
        await path.fetch(TICKET, range(64), range(64))
        assert (mine.bytes == whole).all()


@pytest.mark.parametrize("env", [{}, OVER_TCP], ids=["default", "tcp"])
def test_after_a_cancelled_fetch_nothing_is_written_any_more(env: dict[str, str]) -> None:
    play(stops_when_cancelled, msgspec.structs.replace(BIG, env=env))


async def cancels_a_frozen_fetch(peers: list[Peer]) -> None:
    mine = big_cache()
    async with reached(mine, peers[0], stall_timeout_s=20.0) as path:
        await path.fetch(TICKET, [0], [0])
        os.kill(peers[0].pid, signal.SIGSTOP)
        mine.bytes[:] = 0
        fetch = asyncio.create_task(path.fetch(TICKET, range(64), range(64)))
        await asyncio.sleep(0.1)
        fetch.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asyncio.wait_for(fetch, 10)
        frozen = mine.bytes.copy()
        os.kill(peers[0].pid, signal.SIGCONT)
        await asyncio.sleep(0.3)
        assert (mine.bytes == frozen).all()


def test_a_cancelled_fetch_from_a_frozen_lender_ends() -> None:
    play(cancels_a_frozen_fetch, msgspec.structs.replace(BIG, env=OVER_TCP))


async def opens_and_closes(peers: list[Peer]) -> None:
    cache, mine = Cache(1), Cache(2)
    source, connect = NixlServer(cache.memory), NixlClient(mine.memory)
    details = await source.open()
    assert await source.open() == details
    path = await connect.connect(TICKET, cache.memory, details)
    await path.fetch(TICKET, [3], [4])
    first = holdings()
    path.close()
    path.close()
    with pytest.raises(PeerLost, match="closed"):
        await path.fetch(TICKET, [3], [4])
    await connect.close()
    await source.close()
    await source.close()
    assert holdings()[1] < first[1]
    again = NixlServer(cache.memory)
    assert (await again.open())["agent"] != details["agent"]
    await again.close()


def test_a_source_opens_once_and_never_under_the_same_name_again() -> None:
    play(opens_and_closes, Lent("nixl"), lenders=0)
