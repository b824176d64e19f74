"""From block numbers to bytes: checks before memory is touched, the spans to move, and the copy itself.

Knows nothing of connections. Invalid input from the other side raises PeerLost.
"""

import asyncio
import ctypes
import functools
import logging
from collections.abc import Sequence
from concurrent.futures import Future
from ctypes import POINTER, byref, c_int, c_int32, c_int64, c_void_p
from pathlib import Path
from typing import NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

from baton.engine_kit.cpp_build import BuildError, load_library
from baton.errors import PeerLost
from baton.ports.transfer import BlockMemory, KvShape

log = logging.getLogger(__name__)

Numbers = NDArray[np.int64]
T = TypeVar("T")

MAX_BLOCK_NUMBER = 2**31 - 1
_PIECE_BYTES = 4 << 20
SOURCES = (Path(__file__).with_name("copy.cpp"),)
FLAGS = ("-O2",)


class Spans(NamedTuple):
    """Contiguous pieces of memory, in the order in which they move."""

    addresses: Numbers
    lengths: Numbers

    @property
    def nbytes(self) -> int:
        return int(self.lengths.sum())


class Stop:
    """A flag that stops a copy early. Any thread may set it."""

    def __init__(self) -> None:
        self._flag = c_int32(0)

    def set(self) -> None:
        """Stop the copy before its next piece."""
        self._flag.value = 1

    def is_set(self) -> bool:
        return bool(self._flag.value)

    @property
    def flag(self) -> c_int32:
        """The flag as the compiled copy reads it."""
        return self._flag


def require_sound(memory: BlockMemory, size: int) -> None:
    """Raise PeerLost unless `memory` is consistent and fits into the `size` bytes that exist."""
    smallest = min(memory.planes, memory.plane_bytes, memory.block_bytes, memory.blocks)
    if smallest < 1:
        raise PeerLost("the KV cache has no planes, blocks or bytes")
    if memory.blocks > MAX_BLOCK_NUMBER:
        raise PeerLost(f"a KV cache of {memory.blocks} blocks is larger than {MAX_BLOCK_NUMBER}")
    if memory.block_bytes * memory.blocks > memory.plane_bytes:
        raise PeerLost(f"{memory.blocks} blocks of {memory.block_bytes} bytes do not fit {memory.plane_bytes} bytes")
    if memory.nbytes > size:
        raise PeerLost(f"a KV cache of {memory.nbytes} bytes does not fit into memory of {size} bytes")


def require_alike(mine: BlockMemory | None, theirs: BlockMemory | None) -> None:
    """Raise PeerLost unless a block of one memory is valid in the other, or both engines move KV themselves."""
    if mine is None and theirs is None:
        return
    if mine is None or theirs is None:
        raise PeerLost("one engine moves KV itself and the other does not: no handoff between them is possible")
    if type(mine.shape) is not type(theirs.shape):
        raise PeerLost("one worker has a KV cache and the other has embeddings: no handoff between them is possible")
    if different := _differences(mine, theirs):
        raise PeerLost(f"{_name(mine)} are not compatible: {', '.join(different)}")


def _differences(mine: BlockMemory, theirs: BlockMemory) -> list[str]:
    pairs = [(name, getattr(mine.shape, name), getattr(theirs.shape, name)) for name in mine.shape.__struct_fields__]
    pairs += [(name, getattr(mine, name), getattr(theirs, name)) for name in ("planes", "block_bytes")]
    return [f"{name} is {own} here and {other} there" for name, own, other in pairs if own != other]


def _name(memory: BlockMemory) -> str:
    return "the KV caches" if isinstance(memory.shape, KvShape) else "the embeddings of the two workers"


def require_host(memory: BlockMemory, transport: str) -> None:
    """Raise PeerLost unless the CPU can read and write `memory`."""
    if memory.device != "cpu":
        raise PeerLost(f"{transport} cannot move KV of device {memory.device}")


def block_numbers(memory: BlockMemory, blocks: Sequence[int] | Numbers) -> Numbers:
    """Return `blocks` as an array. Raises PeerLost unless `memory` has all of them."""
    try:
        numbers: Numbers = np.asarray(blocks, dtype=np.int64)
    except (OverflowError, TypeError, ValueError):
        raise PeerLost("invalid block numbers") from None
    if numbers.ndim != 1:
        raise PeerLost("block numbers are not a flat list")
    if numbers.size and (numbers.min() < 0 or numbers.max() >= memory.blocks):
        raise PeerLost(f"blocks {numbers.min()} to {numbers.max()} are not all within the {memory.blocks} of the cache")
    return numbers


def block_pairs(
    their_memory: BlockMemory, theirs: Sequence[int], my_memory: BlockMemory, mine: Sequence[int]
) -> tuple[Numbers, Numbers]:
    """Return both lists as arrays. Raises PeerLost unless they are equally long and within the caches."""
    if len(theirs) != len(mine):
        raise PeerLost(f"{len(theirs)} blocks cannot be copied into {len(mine)}")
    return block_numbers(their_memory, theirs), block_numbers(my_memory, mine)


def spans(memory: BlockMemory, blocks: Numbers) -> Spans:
    """Return the spans of `blocks`: plane by plane, in their order, with adjacent blocks joined."""
    starts, counts = _runs(blocks)
    return _spans(memory, blocks[starts], counts)


def paired_spans(
    their_memory: BlockMemory, theirs: Numbers, my_memory: BlockMemory, mine: Numbers
) -> tuple[Spans, Spans]:
    """Return the spans of both lists, cut alike: span i of one is as long as span i of the other."""
    starts, counts = _runs(theirs, mine)
    return _spans(their_memory, theirs[starts], counts), _spans(my_memory, mine[starts], counts)


def copy_blocks(to: BlockMemory, source: BlockMemory, theirs: Numbers, mine: Numbers, stop: Stop) -> bool:
    """Copy blocks `theirs` of `source` into blocks `mine` of `to`; both are validated memory of this process.

    Returns whether everything was copied: False if `stop` was set meanwhile. Other threads run while it copies.
    """
    library = load_copier()
    if library is None:
        return copy_blocks_with_numpy(to, source, theirs, mine, stop)
    theirs, mine = np.ascontiguousarray(theirs), np.ascontiguousarray(mine)
    copied = library.baton_copy_blocks(
        to.address,
        to.plane_bytes,
        source.address,
        source.plane_bytes,
        to.planes,
        to.block_bytes,
        theirs.ctypes.data,
        mine.ctypes.data,
        len(mine),
        byref(stop.flag),
    )
    return bool(copied)


@functools.cache
def load_copier() -> ctypes.CDLL | None:
    """Return the compiled copy, building it if need be; None, with the reason logged, if it cannot be built."""
    try:
        library = load_library(SOURCES, FLAGS)
    except BuildError as error:
        log.warning("KV is copied by numpy, which is slow for scattered blocks: %s", error)
        return None
    counts = [c_int64] * 4
    library.baton_copy_blocks.argtypes = [c_void_p, counts[0], c_void_p, *counts[1:], *[c_void_p] * 2, c_int64]
    library.baton_copy_blocks.argtypes += [POINTER(c_int32)]
    library.baton_copy_blocks.restype = c_int
    return library


def copy_blocks_with_numpy(to: BlockMemory, source: BlockMemory, theirs: Numbers, mine: Numbers, stop: Stop) -> bool:
    """Copy like `copy_blocks`, without the compiled code.

    It takes the interpreter lock again for every run of blocks and waits for it while other threads are busy: a
    fragmented request then takes a hundred times as long. The compiled copy releases the lock once.
    """
    target, origin = _view(to), _view(source)
    starts, counts = _runs(theirs, mine)
    piece_blocks = max(1, _PIECE_BYTES // (to.planes * to.block_bytes))
    for start, count in zip(starts.tolist(), counts.tolist(), strict=True):
        first, theirs_first = int(mine[start]), int(theirs[start])
        for done in range(0, count, piece_blocks):
            if stop.is_set():
                return False
            size = min(piece_blocks, count - done)
            piece = origin[:, theirs_first + done : theirs_first + done + size]
            target[:, first + done : first + done + size] = piece
    return True


async def wait_for_thread(work: Future[T], stop: Stop) -> T:
    """Wait for `work`, which checks `stop`. Cancelled, it sets `stop` and ends only when the thread is done."""
    future = asyncio.wrap_future(work)
    try:
        return await asyncio.shield(future)
    except asyncio.CancelledError:
        stop.set()
        while not future.done():
            try:
                await asyncio.wait([future])
            except asyncio.CancelledError:
                continue  # the thread still writes; the first cancellation is raised below
        if not future.cancelled():
            future.exception()  # marks it as retrieved
        raise


def _view(memory: BlockMemory) -> NDArray[np.uint8]:
    """Return the blocks of `memory` as an array of planes, blocks and bytes."""
    raw = memoryview((ctypes.c_uint8 * memory.nbytes).from_address(memory.address)).cast("B")
    planes = np.frombuffer(raw, np.uint8).reshape(memory.planes, memory.plane_bytes)
    blocks = planes[:, : memory.blocks * memory.block_bytes]
    return blocks.reshape(memory.planes, memory.blocks, memory.block_bytes)


def _runs(*lists: Numbers) -> tuple[Numbers, Numbers]:
    """Return the starts and lengths of runs; within a run the numbers of each list are consecutive."""
    size = len(lists[0])
    if not size:
        return np.empty(0, np.int64), np.empty(0, np.int64)
    broken = np.zeros(size - 1, np.bool_)
    for numbers in lists:
        broken |= np.diff(numbers) != 1
    starts = np.concatenate(([0], np.flatnonzero(broken) + 1))
    return starts, np.diff(starts, append=size)


def _spans(memory: BlockMemory, firsts: Numbers, counts: Numbers) -> Spans:
    planes = memory.address + np.arange(memory.planes, dtype=np.int64)[:, None] * memory.plane_bytes
    return Spans((planes + firsts * memory.block_bytes).ravel(), np.tile(counts * memory.block_bytes, memory.planes))
