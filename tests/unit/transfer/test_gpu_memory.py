"""KV in GPU memory between processes: mapped (shm) and through the hosts (tcp); on a GPU if there is one."""

import asyncio
import signal
import threading
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from multiprocessing.connection import Connection

import msgspec
import numpy as np
import pytest

from baton.config.transfer import KvTransferOptions
from baton.errors import PeerLost
from baton.ports.transfer import Channel
from baton.testing import eventually, run_bounded
from baton.transfer.device_copy import DeviceCopier, Piece, Staging, pieces
from baton.transfer.shm import ShmClient, ShmServer
from baton.transfer.tcp import TcpClient
from baton.transfer.transports import transport_clients, transport_servers
from tests.doubles.host_driver import HostDriver
from tests.unit.transfer.gpu_caches import DRIVER, GpuCache, gpu_producer
from tests.unit.transfer.kv_caches import Cache, Producer, ProducerSetup, content, expected, only, producer

pytestmark = pytest.mark.process

PAIRS = list(zip([0, 1, 2, 3, 31, 17, 16, 4, 5, 6], [10, 11, 12, 49, 48, 0, 1, 2, 3, 4], strict=True))
THEIRS, MINE = [pair[0] for pair in PAIRS], [pair[1] for pair in PAIRS]


@asynccontextmanager
async def connected(peer: Producer, mine: GpuCache, transport: str, checksum: bool = False) -> AsyncIterator[Channel]:
    if transport == "shm":
        client: ShmClient | TcpClient = ShmClient(mine.memory, copier=DeviceCopier(mine.memory, DRIVER))
    else:
        client = TcpClient(mine.memory, checksum, staging=Staging(mine.memory, DRIVER))
    channel = await client.connect(peer.ticket, peer.memory, peer.details)
    try:
        yield channel
    finally:
        channel.close()
        await client.close()


@pytest.mark.parametrize("transport", ["shm", "tcp"])
@pytest.mark.parametrize("block_bytes", [6144, 36])
def test_scattered_blocks_arrive_and_nothing_else_changes(transport: str, block_bytes: int) -> None:
    async def body(peer: Producer) -> None:
        mine = GpuCache(2, blocks=50, block_bytes=block_bytes, spare_bytes=4096)
        wanted = mine.expected(peer.memory, 1, PAIRS)
        async with connected(peer, mine, transport, checksum=True) as channel:
            await channel.fetch(peer.ticket, THEIRS[:5], MINE[:5])
            await channel.fetch(peer.ticket, THEIRS[5:], MINE[5:])
            await channel.fetch(peer.ticket, [], [])
            assert (mine.bytes == wanted).all()
            await asyncio.gather(*(channel.fetch(peer.ticket, [n % 32], [n % 32]) for n in range(20)))
            with pytest.raises(PeerLost, match="not all within"):
                await channel.fetch(peer.ticket, [32], [0])
        mine.region.close()

    with gpu_producer(ProducerSetup(transport, block_bytes=block_bytes)) as (peer, _):
        run_bounded(body(peer), 60)


def test_requests_larger_than_a_buffer_arrive_over_tcp() -> None:
    async def body(peer: Producer) -> None:
        mine = GpuCache(2, planes=3, blocks=40, block_bytes=1 << 20)
        theirs, blocks = list(range(39, -1, -1)), [(7 * n) % 40 for n in range(40)]
        wanted = mine.expected(peer.memory, 1, list(zip(theirs, blocks, strict=True)))
        async with connected(peer, mine, "tcp") as channel:
            await channel.fetch(peer.ticket, theirs, blocks)
        assert (mine.bytes == wanted).all()
        mine.region.close()

    with gpu_producer(ProducerSetup("tcp", planes=3, blocks=40, block_bytes=1 << 20)) as (peer, _):
        run_bounded(body(peer), 60)


def test_tcp_moves_kv_between_a_host_and_a_gpu() -> None:
    async def to_gpu(peer: Producer) -> None:
        mine = GpuCache(2)
        wanted = mine.expected(peer.memory, 1, [(3, 5), (4, 6)])
        async with connected(peer, mine, "tcp") as channel:
            await channel.fetch(peer.ticket, [3, 4], [5, 6])
        assert (mine.bytes == wanted).all()
        mine.region.close()

    async def to_host(peer: Producer) -> None:
        mine = Cache(2)
        wanted = expected(mine, mine.bytes.copy(), peer.memory, 1, [(3, 5), (9, 6)])
        client = TcpClient(mine.memory)
        channel = await client.connect(peer.ticket, peer.memory, peer.details)
        await channel.fetch(peer.ticket, [3, 9], [5, 6])
        assert (mine.bytes == wanted).all()
        channel.close()

    with producer(ProducerSetup("tcp")) as host:
        run_bounded(to_gpu(host), 60)
    with gpu_producer(ProducerSetup("tcp")) as (gpu, _):
        run_bounded(to_host(gpu), 60)


@pytest.mark.parametrize("transport", ["shm", "tcp"])
def test_a_dead_producer_is_a_lost_peer_and_its_memory_is_unmapped(transport: str) -> None:
    async def body(peer: Producer) -> None:
        mine = GpuCache(2)
        before = _mapped()
        async with connected(peer, mine, transport) as channel:
            await channel.fetch(peer.ticket, [1], [1])
            peer.signal(signal.SIGKILL)
            peer.process.join(10)
            if transport == "shm":  # until the end of the connection is noticed, the memory can be read
                await asyncio.sleep(0.2)
                await eventually(lambda: _mapped() == before)
            with pytest.raises(PeerLost):
                await channel.fetch(peer.ticket, [1], [1])
        mine.region.close()

    with gpu_producer(ProducerSetup(transport)) as (peer, _):
        run_bounded(body(peer), 60)


def test_a_cancelled_fetch_writes_nothing_afterwards() -> None:
    async def body(peer: Producer) -> None:
        mine = GpuCache(2)
        async with connected(peer, mine, "shm") as channel:
            for delay_s in (0.0, 0.0001, 0.001):
                fetch = asyncio.create_task(channel.fetch(peer.ticket, list(range(32)), list(range(32))))
                await asyncio.sleep(delay_s)
                fetch.cancel()
                await asyncio.wait([fetch])
                mine.fill(3)
                await asyncio.sleep(0.01)
                assert (mine.bytes == content(3, mine.memory.nbytes)).all()
            await channel.fetch(peer.ticket, [1], [1])
        mine.region.close()

    with gpu_producer(ProducerSetup("shm")) as (peer, _):
        run_bounded(body(peer), 60)


def test_memory_that_the_producer_releases_is_unmapped_and_mapped_again_when_there_is_some() -> None:
    async def body(peer: Producer, control: Connection) -> None:
        mine = GpuCache(2)
        before = _mapped()
        loop = asyncio.get_running_loop()

        async def tell(seed: int | None) -> None:
            control.send(seed)
            assert await loop.run_in_executor(None, control.recv) == "done"

        async with connected(peer, mine, "shm") as channel:
            await channel.fetch(peer.ticket, [1], [1])
            await tell(None)
            if isinstance(DRIVER, HostDriver):
                await eventually(lambda: _mapped() == before)
            else:
                await asyncio.sleep(0.2)
            with pytest.raises(PeerLost, match="released"):
                await channel.fetch(peer.ticket, [1], [1])
            await tell(5)
            wanted = mine.expected(peer.memory, 5, [(2, 3)])
            await channel.fetch(peer.ticket, [2], [3])
            assert (mine.bytes == wanted).all()
        mine.region.close()

    with gpu_producer(ProducerSetup("shm")) as (peer, control):
        run_bounded(body(peer, control), 60)


def test_memory_that_the_consumer_has_released_is_not_written() -> None:
    async def body(peer: Producer) -> None:
        mine = GpuCache(2)
        async with connected(peer, mine, "shm") as channel:
            mine.region.drop()
            with pytest.raises(PeerLost, match="released"):
                await channel.fetch(peer.ticket, [1], [1])
            mine.region.fill()
            await channel.fetch(peer.ticket, [1], [1])
        mine.region.close()

    with gpu_producer(ProducerSetup("shm")) as (peer, _):
        run_bounded(body(peer), 60)


def test_shm_does_not_mix_memory_of_hosts_and_gpus() -> None:
    async def body(peer: Producer) -> None:
        gpu, host = GpuCache(2), Cache(2)
        copier = DeviceCopier(gpu.memory, DRIVER)
        for mine, theirs, options in (
            (gpu.memory, host.memory, {"copier": copier}),
            (host.memory, gpu.memory, {}),
        ):
            client = ShmClient(mine, **options)
            with pytest.raises(PeerLost):
                await client.connect(peer.ticket, msgspec.structs.replace(theirs), peer.details)
            await client.close()
        gpu.region.close()

    with gpu_producer(ProducerSetup("shm")) as (peer, _):
        run_bounded(body(peer), 60)


def test_a_wrong_secret_gets_no_memory() -> None:
    async def body(peer: Producer) -> None:
        mine = GpuCache(2)
        client = ShmClient(mine.memory, copier=DeviceCopier(mine.memory, DRIVER))
        with pytest.raises(PeerLost, match="secret"):
            await client.connect(msgspec.structs.replace(peer.ticket, secret=b"another"), peer.memory, peer.details)
        await client.close()
        mine.region.close()

    with gpu_producer(ProducerSetup("shm")) as (peer, _):
        run_bounded(body(peer), 60)


def test_nothing_is_left_after_a_server_and_a_client() -> None:
    async def body() -> None:
        mine = GpuCache(2)
        server = ShmServer(mine.memory, only(None), region=mine.region)
        await server.open()
        await server.close()
        staging = Staging(mine.memory, DRIVER)
        async for part in staging.read(np.arange(3)):
            assert part.nbytes == 3 * 4 * 512
        await staging.close()
        await staging.close()
        mine.region.close()

    run_bounded(body())
    if isinstance(DRIVER, HostDriver):
        assert not DRIVER.mapped
        assert not DRIVER.handles
        assert not DRIVER.allocations


def test_pieces_cover_every_block_once_in_the_order_of_the_wire() -> None:
    memory = Cache(1, planes=5).memory
    assert list(pieces(memory, 0)) == []
    assert list(pieces(memory, 4, limit=4 * 512 * 2)) == [Piece(0, 2, 0, 4), Piece(2, 2, 0, 4), Piece(4, 1, 0, 4)]
    parts = list(pieces(memory, 5, limit=1024))
    assert parts[:3] == [Piece(0, 1, 0, 2), Piece(0, 1, 2, 2), Piece(0, 1, 4, 1)]
    assert len(parts) == 15


@pytest.mark.skipif(isinstance(DRIVER, HostDriver), reason="there is no GPU")
def test_a_gpu_has_every_transport() -> None:
    async def body() -> None:
        mine = GpuCache(2)
        options = KvTransferOptions(transports="shm,tcp")
        servers, clients = transport_servers(options, mine.memory, only(None)), transport_clients(options, mine.memory)
        assert [*servers] == [client.name for client in clients] == ["shm", "tcp"]
        for each in (*servers.values(), *clients):
            await each.close()
        mine.region.close()

    run_bounded(body())


def _mapped() -> int:
    return len(DRIVER.mapped) if isinstance(DRIVER, HostDriver) else 0


def test_a_buffer_belongs_to_the_read_that_has_waited_for_it() -> None:
    """A second read begins between the pinning of a buffer for the first one and its use, and keeps what it gets."""

    async def body() -> None:
        mine = GpuCache(1)
        staging = Staging(mine.memory, DRIVER)
        pinned, pin = threading.Event(), staging._pin
        first_has_ended = asyncio.Event()

        def pin_and_tell() -> int:
            buffer = pin()
            pinned.set()
            time.sleep(0.05)
            return buffer

        async def first() -> int:
            try:
                return sum([part.nbytes async for part in staging.read(np.arange(4))])
            finally:
                first_has_ended.set()

        async def second() -> int:
            await asyncio.to_thread(pinned.wait, 5)
            sizes = []
            async for part in staging.read(np.arange(4)):
                sizes.append(part.nbytes)
                await first_has_ended.wait()
            return sum(sizes)

        staging._pin = pin_and_tell  # type: ignore[method-assign]
        try:
            nbytes = 4 * mine.memory.planes * mine.memory.block_bytes
            assert await asyncio.gather(first(), second()) == [nbytes, nbytes]
        finally:
            await staging.close()
            mine.region.close()

    run_bounded(body())
