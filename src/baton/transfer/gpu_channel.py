"""The consumer's end of `shm` between caches in GPU memory: the producer's is mapped, and copied from by the GPU."""

import asyncio
import logging
import os
import socket
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

from baton.engine_kit.cuda.driver import CudaError
from baton.engine_kit.cuda.regions import MappedRegion
from baton.errors import PeerLost
from baton.ports.transfer import BlockMemory
from baton.protocol.handoff import Ticket
from baton.transfer.block_copy import Numbers, Stop, block_pairs, wait_for_thread
from baton.transfer.device_copy import DeviceCopier

log = logging.getLogger(__name__)

# Called with a ticket: returns a connection to the producer, and the descriptor of its memory. Raises PeerLost.
Request = Callable[[Ticket], Awaitable[tuple[socket.socket, int]]]


class GpuChannel:
    """One producer's cache, mapped for reading. It is unmapped when the connection ends, after a running copy.

    A producer that releases its memory closes the connection; the next fetch maps the memory that it has then. The
    threads of `pool` run one thing at a time, so that what is submitted last comes after every copy.
    """

    def __init__(
        self, request: Request, pool: ThreadPoolExecutor, copier: DeviceCopier, mine: BlockMemory, theirs: BlockMemory
    ) -> None:
        self._request = request
        self._pool = pool
        self._copier = copier
        self._mine = mine
        self._theirs = theirs
        self._loop = asyncio.get_running_loop()
        self._lock = asyncio.Lock()
        self._region: MappedRegion | None = None
        self._connection: socket.socket | None = None
        self._closed = False

    async def connect(self, ticket: Ticket) -> MappedRegion:
        """Return the producer's memory, mapped if need be. Raises PeerLost."""
        async with self._lock:
            if self._region is None and not self._closed:
                connection, descriptor = await self._request(ticket)
                try:
                    self._region = await self._map(descriptor)
                except BaseException:
                    connection.close()
                    raise
                self._connection = connection
                self._loop.add_reader(connection.fileno(), self._unmap)
        if self._region is None or self._closed:
            self._unmap()
            raise PeerLost("the channel to the producer is closed")
        return self._region

    async def fetch(self, ticket: Ticket, theirs: Sequence[int], mine: Sequence[int]) -> None:
        """Copy on the GPU. Cancelled, it returns when the copy has ended."""
        source, target = block_pairs(self._theirs, theirs, self._mine, mine)
        region = await self.connect(ticket)
        if len(target):
            await wait_for_thread(self._pool.submit(self._copy, region, source, target), Stop())

    def close(self) -> None:
        """Unmap the producer's cache."""
        self._closed = True
        self._unmap()

    def _copy(self, region: MappedRegion, source: Numbers, target: Numbers) -> None:
        if region.closed:
            raise PeerLost("the producer has closed its KV cache")
        self._copier.read_from(region.address, self._theirs.plane_bytes, source, target)

    async def _map(self, descriptor: int) -> MappedRegion:
        """Map the memory in a thread; the descriptor is closed."""
        driver, device = self._copier.driver, self._copier.device
        mapping = self._pool.submit(MappedRegion, driver, device, descriptor, self._theirs.nbytes)
        try:
            return await wait_for_thread(mapping, Stop())
        except asyncio.CancelledError:
            if not mapping.cancelled() and mapping.exception() is None:
                self._pool.submit(mapping.result().close)
            raise
        except (CudaError, MemoryError) as error:
            raise PeerLost(f"the producer's GPU memory cannot be mapped: {error}") from error
        finally:
            os.close(descriptor)

    def _unmap(self) -> None:
        if self._connection is not None:
            self._loop.remove_reader(self._connection.fileno())
            self._connection.close()
            self._connection = None
        if self._region is not None:
            self._pool.submit(_close, self._region)
            self._region = None


def _close(region: MappedRegion) -> None:
    try:
        region.close()
    except CudaError as error:
        log.warning("the KV cache of another worker cannot be unmapped: %s", error)
