"""KV caches in GPU memory with known content, and producers of them that are real processes.

Without a GPU the memory is that of a driver made of host memory.
"""

import asyncio
import multiprocessing
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from multiprocessing.connection import Connection

import numpy as np
from numpy.typing import NDArray

from baton.engine_kit.cuda.driver import Driver, find_driver
from baton.engine_kit.cuda.regions import Region
from baton.ports.transfer import BlockMemory
from baton.transfer.device_copy import Staging
from baton.transfer.shm import ShmServer
from baton.transfer.tcp import TcpServer
from tests.doubles.host_driver import HostDriver
from tests.unit.transfer.kv_caches import (
    SHAPE,
    SPAWN,
    TIMEOUT_S,
    Producer,
    ProducerSetup,
    content,
    listening,
    only,
    parts,
    serve_all,
)

DRIVER: Driver = find_driver() or HostDriver()


class GpuCache:
    """A cache in a region. Its bytes follow from its seed."""

    def __init__(
        self, seed: int, planes: int = 4, blocks: int = 32, block_bytes: int = 512, spare_bytes: int = 0
    ) -> None:
        plane_bytes = blocks * block_bytes + spare_bytes
        self.region = Region(DRIVER, 0, planes * plane_bytes)
        self.memory = BlockMemory(
            shape=SHAPE,
            address=self.region.address,
            planes=planes,
            plane_bytes=plane_bytes,
            block_bytes=block_bytes,
            blocks=blocks,
            device="cuda:0",
        )
        self.fill(seed)

    def fill(self, seed: int) -> None:
        """Write the bytes of `seed`."""
        self._copy(self.memory.address, content(seed, self.memory.nbytes), writes=True)

    @property
    def bytes(self) -> NDArray[np.uint8]:
        """A copy of the content."""
        data = np.empty(self.memory.nbytes, np.uint8)
        self._copy(self.memory.address, data, writes=False)
        return data

    def expected(self, theirs: BlockMemory, seed: int, pairs: Sequence[tuple[int, int]]) -> NDArray[np.uint8]:
        """The content after each (their block, my block) is copied."""
        after = self.bytes
        source, target = parts(theirs, content(seed, theirs.nbytes)), parts(self.memory, after)
        for their_block, my_block in pairs:
            target[:, my_block] = source[:, their_block]
        return after

    def _copy(self, address: int, data: NDArray[np.uint8], writes: bool) -> None:
        DRIVER.use(0)
        to, source = (address, data.ctypes.data) if writes else (data.ctypes.data, address)
        DRIVER.copy(to, source, data.nbytes, 0)
        DRIVER.wait(0)


@contextmanager
def gpu_producer(setup: ProducerSetup) -> Iterator[tuple[Producer, Connection]]:
    """Start a producer; it is killed afterwards. It drops and fills its memory when it is sent a seed."""
    ours, its = SPAWN.Pipe()
    process: multiprocessing.process.BaseProcess = SPAWN.Process(target=run, args=(its, setup), daemon=True)
    process.start()
    its.close()
    try:
        assert ours.poll(2 * TIMEOUT_S), "the producer did not start"
        memory, details = ours.recv()
        yield Producer(process, memory, details), ours
    finally:
        process.kill()
        process.join(TIMEOUT_S)
        process.close()
        ours.close()


def run(parent: Connection, setup: ProducerSetup) -> None:
    """The main function of a producer process."""
    asyncio.run(_run(parent, setup))


async def _run(parent: Connection, setup: ProducerSetup) -> None:
    cache = GpuCache(setup.seed, setup.planes, setup.blocks, setup.block_bytes, setup.spare_bytes)
    check = only(setup.offered)
    if setup.transport == "shm":
        shm = ShmServer(cache.memory, check, region=cache.region)
        parent.send((cache.memory, await shm.open()))
        await _refill(parent, cache)
    staging = Staging(cache.memory, DRIVER)
    tcp = TcpServer(cache.memory, check, setup.checksum, setup.stall_timeout_s, staging)
    listener = listening(setup.host)
    parent.send((cache.memory, await tcp.open() | {"host": setup.host, "port": listener.getsockname()[1]}))
    await serve_all(tcp, listener)


async def _refill(parent: Connection, cache: GpuCache) -> None:
    loop = asyncio.get_running_loop()
    while True:
        seed = await loop.run_in_executor(None, parent.recv)
        await loop.run_in_executor(None, cache.region.drop)
        if seed is not None:
            cache.region.fill()
            cache.fill(seed)
        parent.send("done")
