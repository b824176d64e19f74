"""NIXL between real processes: each test runs its producer in one and its consumer in another: UCX stays loaded."""

import asyncio
import os
import signal
from collections.abc import AsyncIterator, Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from multiprocessing.connection import Connection
from pathlib import Path as File
from typing import Any

import msgspec
import pytest

from baton.errors import PeerLost
from baton.ports.transfer import BlockMemory, Channel
from baton.protocol.handoff import Ticket
from baton.testing.bounded import run_bounded
from baton.transfer.block_copy import Stop, block_pairs, paired_spans
from baton.transfer.nixl import Agent, NixlChannel, NixlClient, NixlDetails, NixlServer, available
from tests.unit.transfer.kv_caches import (
    SHAPE,
    SPAWN,
    TIMEOUT_S,
    Cache,
    Producer,
    ProducerSetup,
    content,
    expected,
    holdings,
    producer,
)

pytestmark = [pytest.mark.process, pytest.mark.skipif(not available(), reason="nixl-cu12 is not installed")]

TICKET = Ticket(host="", port=0, room=1, secret=b"")
OVER_TCP = {"UCX_TLS": "tcp"}
BIG = ProducerSetup("nixl", planes=2, blocks=64, block_bytes=1 << 20)


class Peer(msgspec.Struct, frozen=True):
    """A producer, as the consumer's process sees it."""

    pid: int
    memory: BlockMemory
    details: dict[str, object]


Scenario = Callable[[list[Peer]], Coroutine[Any, Any, None]]


def run_in_consumer(scenario: Scenario, setup: ProducerSetup, producers: int = 1) -> None:
    """Run `scenario` in another process."""
    started = [producer(setup) for _ in range(producers)]
    peers = [each.__enter__() for each in started]
    ours, its = SPAWN.Pipe()
    process = SPAWN.Process(
        target=consume, args=(its, scenario, setup.env, [as_peer(each) for each in peers]), daemon=True
    )
    process.start()
    its.close()
    try:
        assert ours.poll(2 * TIMEOUT_S), "the consumer did not end"
        problem = ours.recv()
    finally:
        process.kill()
        process.join(TIMEOUT_S)
        for each in started:
            each.__exit__(None, None, None)
    assert not problem, problem


def as_peer(peer: Producer) -> Peer:
    assert peer.process.pid is not None
    return Peer(peer.process.pid, msgspec.structs.replace(peer.memory, descriptor=None), peer.details)


def consume(parent: Connection, scenario: Scenario, env: dict[str, str], peers: list[Peer]) -> None:
    """The main function of a consumer process."""
    os.environ.update(env)
    try:
        run_bounded(scenario(peers), TIMEOUT_S)
    except BaseException:  # noqa: BLE001 - reported to the test
        import traceback

        parent.send(traceback.format_exc())
    else:
        parent.send("")


@asynccontextmanager
async def connected(mine: Cache, peer: Peer, **options: float) -> AsyncIterator[Channel]:
    client = NixlClient(mine.memory, **options)  # type: ignore[arg-type]
    channel = await client.connect(TICKET, peer.memory, peer.details)
    try:
        yield channel
    finally:
        channel.close()
        await client.close()


def big_cache() -> Cache:
    return Cache(2, planes=2, blocks=64, block_bytes=1 << 20)


async def copies_without_leaks(peers: list[Peer]) -> None:
    mine = Cache(2, blocks=50, block_bytes=6144, spare_bytes=4096)
    before = mine.bytes.copy()
    theirs = [0, 1, 2, 3, 31, 17, 16, 4, 5, 6]
    mine_blocks = [10, 11, 12, 49, 48, 0, 1, 2, 3, 4]
    async with connected(mine, peers[0]) as channel:
        await channel.fetch(TICKET, theirs[:5], mine_blocks[:5])
        await channel.fetch(TICKET, theirs[5:], mine_blocks[5:])
        wanted = expected(mine, before, peers[0].memory, 1, list(zip(theirs, mine_blocks, strict=True)))
        assert (mine.bytes == wanted).all()
        await channel.fetch(TICKET, [], [])
        await asyncio.gather(*(channel.fetch(TICKET, [n % 32], [n % 32]) for n in range(20)))
        inside = holdings()
        for start in range(200):
            await channel.fetch(TICKET, [start % 32, 3], [4, start % 32])
        assert holdings() == inside
        for wrong in ([32], [-1]):
            with pytest.raises(PeerLost):
                await channel.fetch(TICKET, wrong, [0])
            with pytest.raises(PeerLost):
                await channel.fetch(TICKET, [0], [*wrong, 0])


@pytest.mark.parametrize("env", [{}, OVER_TCP], ids=["default", "tcp"])
def test_a_fetch_changes_exactly_the_target_blocks_and_leaks_nothing(env: dict[str, str]) -> None:
    run_in_consumer(copies_without_leaks, ProducerSetup("nixl", block_bytes=6144, spare_bytes=64, env=env))


async def leaks_no_memory(peers: list[Peer]) -> None:
    mine = Cache(2, planes=60, blocks=64, block_bytes=64)
    scattered = [*range(0, 64, 2), *range(1, 64, 2)]
    async with connected(mine, peers[0]) as channel:
        for _ in range(20):
            await channel.fetch(TICKET, scattered, scattered)
        before = resident_bytes()
        for _ in range(200):
            await channel.fetch(TICKET, scattered, scattered)
        assert resident_bytes() - before < 10 << 20


def resident_bytes() -> int:
    return int(File("/proc/self/statm").read_text().split()[1]) * 4096


@pytest.mark.slow
def test_two_hundred_fetches_of_thousands_of_spans_leak_no_memory() -> None:
    run_in_consumer(leaks_no_memory, ProducerSetup("nixl", planes=60, blocks=64, block_bytes=64))


async def fetches_more_than_one_request(peers: list[Peer]) -> None:
    mine = big_cache()
    async with connected(mine, peers[0]) as channel:
        await channel.fetch(TICKET, range(64), range(64))
        assert (mine.bytes == content(1, mine.bytes.size)).all()


@pytest.mark.slow
def test_a_fetch_larger_than_one_request_arrives() -> None:
    run_in_consumer(fetches_more_than_one_request, BIG)


async def refuses_invalid_peers(peers: list[Peer]) -> None:
    peer, mine = peers[0], Cache(2)
    other = msgspec.structs.replace(peer.memory, shape=msgspec.structs.replace(SHAPE, kv_heads=3))
    client = NixlClient(mine.memory)
    with pytest.raises(PeerLost, match="kv_heads is 2 here and 3 there"):
        await client.connect(TICKET, other, peer.details)
    for details in ({}, {"agent": "a", "metadata": b"nonsense"}, peer.details | {"agent": "another"}):
        with pytest.raises(PeerLost):
            await client.connect(TICKET, peer.memory, details)
    elsewhere = msgspec.structs.replace(peer.memory, address=peer.memory.address + peer.memory.nbytes)
    channel = await client.connect(TICKET, elsewhere, peer.details)
    with pytest.raises(PeerLost):
        await channel.fetch(TICKET, [0], [0])
    channel.close()
    assert (mine.bytes == content(2, mine.bytes.size)).all()
    channel = await client.connect(TICKET, peer.memory, peer.details)
    await channel.fetch(TICKET, [0], [0])
    channel.close()
    await client.close()
    await client.close()


def test_incompatible_or_unregistered_memory_is_refused() -> None:
    run_in_consumer(refuses_invalid_peers, ProducerSetup("nixl"))


async def survives_a_dead_producer(peers: list[Peer]) -> None:
    mine = big_cache()
    async with connected(mine, peers[0], stall_timeout_s=2.0, connect_timeout_s=5.0) as channel:
        await channel.fetch(TICKET, [0], [0])
        fetch = asyncio.create_task(channel.fetch(TICKET, range(64), range(64)))
        await asyncio.sleep(0.002)
        os.kill(peers[0].pid, signal.SIGKILL)
        await asyncio.gather(fetch, return_exceptions=True)
        for _ in range(2):
            with pytest.raises(PeerLost):
                await channel.fetch(TICKET, range(64), range(64))
        frozen = mine.bytes.copy()
        await asyncio.sleep(0.1)
        assert (mine.bytes == frozen).all()


@pytest.mark.parametrize("env", [{}, OVER_TCP], ids=["default", "tcp"])
def test_a_dead_producer_is_a_lost_peer(env: dict[str, str]) -> None:
    run_in_consumer(survives_a_dead_producer, msgspec.structs.replace(BIG, env=env))


async def abandons_a_stopped_producer(peers: list[Peer]) -> None:
    mine = big_cache()
    client = NixlClient(mine.memory, stall_timeout_s=0.5)
    stopped_channel = await client.connect(TICKET, peers[0].memory, peers[0].details)
    other_channel = await client.connect(TICKET, peers[1].memory, peers[1].details)
    await stopped_channel.fetch(TICKET, [0], [0])
    await other_channel.fetch(TICKET, [0], [0])
    os.kill(peers[0].pid, signal.SIGSTOP)
    mine.bytes[:] = 0
    with pytest.raises(PeerLost, match="did not answer in time"):
        await stopped_channel.fetch(TICKET, range(32), range(32))
    before = mine.bytes.copy()
    os.kill(peers[0].pid, signal.SIGCONT)
    # Whatever this side does from now on, the abandoned read must not write.
    for _ in range(5):
        await other_channel.fetch(TICKET, [5], [63])
        await asyncio.sleep(0.1)
    wanted = before.reshape(2, 64, -1)
    wanted[:, 63] = content(1, mine.bytes.size).reshape(2, 64, -1)[:, 5]
    assert (mine.bytes == wanted.ravel()).all()
    stopped_channel.close()
    other_channel.close()
    await client.close()


@pytest.mark.slow
def test_an_abandoned_read_of_a_stopped_producer_never_writes() -> None:
    run_in_consumer(abandons_a_stopped_producer, msgspec.structs.replace(BIG, env=OVER_TCP), producers=2)


async def stops_when_cancelled(peers: list[Peer]) -> None:
    mine = big_cache()
    complete = content(1, mine.bytes.size)
    async with connected(mine, peers[0]) as channel:
        await channel.fetch(TICKET, [0], [0])
        partial = 0
        for delay_s in (0.0, 0.002, 0.01, 0.002, 0.0):
            mine.bytes[:] = 0
            fetch = asyncio.create_task(channel.fetch(TICKET, range(64), range(64)))
            await asyncio.sleep(delay_s)
            fetch.cancel()
            await asyncio.sleep(0)
            fetch.cancel()
            with pytest.raises(asyncio.CancelledError):
                await fetch
            frozen = mine.bytes.copy()
            await asyncio.sleep(0.05)
            assert (mine.bytes == frozen).all()
            partial += bool(frozen.any() and (frozen != complete).any())
        assert partial, "no fetch was stopped in the middle"
        await channel.fetch(TICKET, range(64), range(64))
        assert (mine.bytes == complete).all()


@pytest.mark.parametrize("env", [{}, OVER_TCP], ids=["default", "tcp"])
def test_nothing_is_written_after_a_cancelled_fetch(env: dict[str, str]) -> None:
    run_in_consumer(stops_when_cancelled, msgspec.structs.replace(BIG, env=env))


async def cancels_a_fetch_of_a_stopped_producer(peers: list[Peer]) -> None:
    mine = big_cache()
    async with connected(mine, peers[0], stall_timeout_s=20.0) as channel:
        await channel.fetch(TICKET, [0], [0])
        os.kill(peers[0].pid, signal.SIGSTOP)
        mine.bytes[:] = 0
        fetch = asyncio.create_task(channel.fetch(TICKET, range(64), range(64)))
        await asyncio.sleep(0.1)
        fetch.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asyncio.wait_for(fetch, 10)
        frozen = mine.bytes.copy()
        os.kill(peers[0].pid, signal.SIGCONT)
        await asyncio.sleep(0.3)
        assert (mine.bytes == frozen).all()


def test_a_cancelled_fetch_from_a_stopped_producer_ends() -> None:
    run_in_consumer(cancels_a_fetch_of_a_stopped_producer, msgspec.structs.replace(BIG, env=OVER_TCP))


async def forgets_unused_peers(peers: list[Peer]) -> None:
    peer, mine = peers[0], Cache(2)
    client = NixlClient(mine.memory)
    agent = await client.agent()

    connecting = asyncio.create_task(client.connect(TICKET, peer.memory, peer.details))
    await asyncio.sleep(0)
    connecting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await connecting
    await until_unknown(agent, mine, peer)

    remote = msgspec.convert(peer.details, NixlDetails)
    with ThreadPoolExecutor(1) as pool:
        late = NixlChannel(client, pool, mine.memory, peer.memory, remote, connect_timeout_s=0.0, stall_timeout_s=5.0)
        with pytest.raises(PeerLost, match="was not loaded within"):
            await late.connect()
        await until_unknown(agent, mine, peer)

    channel = await client.connect(TICKET, peer.memory, peer.details)
    agent.close()  # as after a producer that did not answer
    await asyncio.gather(*(channel.fetch(TICKET, [number], [number]) for number in range(2)))
    agent = await client.agent()
    read(agent, mine, peer)
    channel.close()
    await until_unknown(agent, mine, peer)
    await client.close()


def read(agent: Agent, mine: Cache, peer: Peer) -> None:
    source, target = block_pairs(peer.memory, [0], mine.memory, [0])
    spans = paired_spans(peer.memory, source, mine.memory, target)
    agent.read(peer.details["agent"], peer.memory, *spans, 5.0, Stop())  # type: ignore[arg-type]


async def until_unknown(agent: Agent, mine: Cache, peer: Peer) -> None:
    """Wait until the agent has removed the producer's metadata."""
    while True:
        await asyncio.sleep(0.1)  # longer than loading them takes
        try:
            read(agent, mine, peer)
        except PeerLost:
            return


def test_the_metadata_of_a_producer_are_removed_when_no_channel_uses_them() -> None:
    run_in_consumer(forgets_unused_peers, ProducerSetup("nixl"))


async def opens_and_closes(peers: list[Peer]) -> None:
    cache, mine = Cache(1), Cache(2)
    server, client = NixlServer(cache.memory), NixlClient(mine.memory)
    details = await server.open()
    assert await server.open() == details
    channel = await client.connect(TICKET, cache.memory, details)
    await channel.fetch(TICKET, [3], [4])
    first = holdings()
    channel.close()
    channel.close()
    with pytest.raises(PeerLost, match="closed"):
        await channel.fetch(TICKET, [3], [4])
    await client.close()
    await server.close()
    await server.close()
    assert holdings()[1] < first[1]
    again = NixlServer(cache.memory)
    assert (await again.open())["agent"] != details["agent"]
    await again.close()


def test_a_server_opens_once_and_agent_names_are_never_reused() -> None:
    run_in_consumer(opens_and_closes, ProducerSetup("nixl"), producers=0)
