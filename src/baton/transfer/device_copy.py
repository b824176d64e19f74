"""Copies of blocks to and from a cache in GPU memory: within the GPU, and through pinned memory of the host.

Engines report blocks when the steps that compute or use them have ended, and get them back when a copy has: so copies
need no order on the device but their own.
"""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager, nullcontext
from typing import NamedTuple

import numpy as np

from baton.engine_kit.cuda.block_kernel import BlockCopier, Blocks
from baton.engine_kit.cuda.driver import CudaError, Driver, device_number
from baton.engine_kit.cuda.regions import region_at
from baton.errors import PeerLost
from baton.ports.transfer import BlockMemory
from baton.transfer.block_copy import Numbers, Spans, Stop, wait_for_thread

BUFFER_BYTES = 16 << 20
BUFFERS = 8


class DeviceCopier:
    """Copies blocks of `memory`, which is on a GPU. Its methods block, and raise PeerLost; any thread may call them."""

    def __init__(self, memory: BlockMemory, driver: Driver) -> None:
        device = device_number(memory.device)
        if device is None:
            raise PeerLost(f"{memory.device} is not a GPU")
        self.device = device
        self.driver = driver
        self._memory = memory
        self._copier = BlockCopier(driver, device)

    def read_from(self, address: int, plane_bytes: int, theirs: Numbers, mine: Numbers) -> None:
        """Copy blocks `theirs` of a cache that is mapped at `address` into blocks `mine`."""
        to = Blocks(self._memory.address, self._memory.plane_bytes, mine)
        self._copy(to, Blocks(address, plane_bytes, theirs), self._memory.planes, len(mine), on_host=False)

    def to_host(self, piece: "Piece", numbers: Numbers, buffer: int) -> None:
        """Copy a piece of blocks `numbers` to pinned memory at `buffer`, one after the other."""
        ours, host = self._sides(piece, numbers, buffer)
        self._copy(host, ours, piece.planes, piece.blocks, on_host=True)

    def from_host(self, piece: "Piece", numbers: Numbers, buffer: int) -> None:
        """Copy what `to_host` has written, perhaps on another worker, into blocks `numbers`."""
        ours, host = self._sides(piece, numbers, buffer)
        self._copy(ours, host, piece.planes, piece.blocks, on_host=True)

    def close(self) -> None:
        """Free its resources."""
        try:
            self._copier.close()
        except CudaError as error:
            raise PeerLost(str(error)) from error

    def _sides(self, piece: "Piece", numbers: Numbers, buffer: int) -> tuple[Blocks, Blocks]:
        memory = self._memory
        first = memory.address + piece.plane * memory.plane_bytes
        ours = Blocks(first, memory.plane_bytes, numbers[piece.first : piece.first + piece.blocks])
        return ours, Blocks(buffer, piece.blocks * memory.block_bytes)

    def _copy(self, to: Blocks, source: Blocks, planes: int, count: int, on_host: bool) -> None:
        region = region_at(self._memory.address)
        try:
            with region.in_use() if region is not None else nullcontext():
                self._copier.copy(to, source, planes, self._memory.block_bytes, count, on_host)
        except (CudaError, MemoryError) as error:
            raise PeerLost(f"the GPU cannot copy KV: {error}") from error


class Piece(NamedTuple):
    """Blocks of some planes that fit a buffer: so many `blocks`, from the `first` of a list on."""

    plane: int
    planes: int
    first: int
    blocks: int


def pieces(memory: BlockMemory, blocks: int, limit: int = BUFFER_BYTES) -> Iterator[Piece]:
    """Cut so many blocks, plane by plane, into pieces of at most `limit` bytes: whole planes, or a part of one."""
    if not blocks:
        return
    planes = limit // (blocks * memory.block_bytes)
    if planes:
        for plane in range(0, memory.planes, planes):
            yield Piece(plane, min(planes, memory.planes - plane), 0, blocks)
        return
    count = max(1, limit // memory.block_bytes)
    for plane in range(memory.planes):
        for first in range(0, blocks, count):
            yield Piece(plane, 1, first, min(count, blocks - first))


class Staging:
    """Moves blocks of a GPU's memory through buffers of pinned host memory. Event-loop thread only."""

    def __init__(self, memory: BlockMemory, driver: Driver) -> None:
        self._memory = memory
        self._copier = DeviceCopier(memory, driver)
        self._pool = ThreadPoolExecutor(2, thread_name_prefix="baton-kv-staging")
        self._limit = asyncio.Semaphore(BUFFERS)
        self._free: list[int] = []
        self._bytes = max(BUFFER_BYTES, memory.block_bytes)

    async def read(self, numbers: Numbers) -> AsyncGenerator[Spans]:
        """Yield the content of blocks, plane by plane; what is yielded is valid until the next is asked for.

        Raises PeerLost.
        """
        async with self._buffer() as buffer:
            for piece in pieces(self._memory, len(numbers), self._bytes):
                copying = self._pool.submit(self._copier.to_host, piece, numbers, buffer)
                await wait_for_thread(copying, Stop())
                yield self._span(piece, buffer)

    async def write(self, numbers: Numbers) -> AsyncGenerator[Spans]:
        """Yield spans for the caller to fill with what `read` has yielded; they are then copied to the blocks.

        Raises PeerLost. A span whose successor is not asked for is not copied; after the end nothing is written.
        """
        async with self._buffer() as buffer:
            for piece in pieces(self._memory, len(numbers), self._bytes):
                yield self._span(piece, buffer)
                copying = self._pool.submit(self._copier.from_host, piece, numbers, buffer)
                await wait_for_thread(copying, Stop())

    async def close(self) -> None:
        """Free the buffers, after every read and write has ended. Idempotent."""
        if self._free:
            await asyncio.wrap_future(self._pool.submit(self._unpin))
        self._pool.shutdown()

    @asynccontextmanager
    async def _buffer(self) -> AsyncIterator[int]:
        async with self._limit:
            buffer = self._free.pop() if self._free else await self._new_buffer()
            try:
                yield buffer
            finally:
                self._free.append(buffer)

    async def _new_buffer(self) -> int:
        """Return a new buffer, for the caller alone. Cancelled, it leaves the buffer to others."""
        pinning = self._pool.submit(self._pin)
        try:
            return await wait_for_thread(pinning, Stop())
        except asyncio.CancelledError:
            if not pinning.cancelled() and pinning.exception() is None:
                self._free.append(pinning.result())
            raise

    def _span(self, piece: Piece, buffer: int) -> Spans:
        nbytes = piece.planes * piece.blocks * self._memory.block_bytes
        return Spans(np.array([buffer]), np.array([nbytes]))

    def _pin(self) -> int:
        try:
            self._copier.driver.use(self._copier.device)
            return self._copier.driver.pin(self._bytes)
        except (CudaError, MemoryError) as error:
            raise PeerLost(f"there is no pinned memory for KV: {error}") from error

    def _unpin(self) -> None:
        self._copier.driver.use(self._copier.device)
        while self._free:
            self._copier.driver.unpin(self._free.pop())
        self._copier.close()
