"""The embedding cache of a worker: rows of encoded media by content hash, in memory that other workers can read.

It is where rows are put after encoding and where they are fetched to from another worker. A `Hold` pins the rows of one
request; rows that nobody holds stay until their memory is needed, least recently used first.

    hold ──► slots that are new: the holder fills them, others wait for that     filled ──► release
         └─► slots that are filled, or that another holder fills

A request gets memory for all of its rows at once or waits with none, so two requests never wait for each other. The
rows of an item are contiguous. Event-loop thread only; metrics may be read from any thread.
"""

import asyncio
import ctypes
import fcntl
import mmap
import os
from bisect import insort
from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from typing import Literal, NamedTuple

from baton.errors import ConfigError, InvalidRequest
from baton.ports.transfer import BlockMemory, EmbeddingShape
from baton.protocol.media import EncodedItem

MIN_BLOCK_BYTES = 16 << 10
ITEM_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2, "float64": 8, "uint8": 1, "int8": 1}


class Wanted(NamedTuple):
    """Rows to hold: their content hash, and their size; None if only rows that are here already are wanted."""

    content_hash: str
    nbytes: int | None


class Slot:
    """The place of the rows of one item. `item` is set when they are there."""

    __slots__ = ("blocks", "content_hash", "filled", "first", "item", "nbytes", "pins")

    def __init__(self, content_hash: str, nbytes: int, first: int, blocks: int) -> None:
        self.content_hash = content_hash
        self.nbytes = nbytes
        self.first = first
        self.blocks = blocks
        self.pins = 0
        self.item: EncodedItem | None = None
        self.filled: asyncio.Future[bool] = asyncio.get_running_loop().create_future()

    @property
    def end(self) -> int:
        """The block after the last one."""
        return self.first + self.blocks

    @property
    def numbers(self) -> tuple[int, ...]:
        """The numbers of the blocks."""
        return tuple(range(self.first, self.end))


class Hold:
    """The pinned slots of one request, in its order. `new` are those that the holder has to fill."""

    def __init__(self, store: "EmbeddingStore", slots: tuple[Slot, ...], new: tuple[Slot, ...]) -> None:
        self.slots = slots
        self.new = new
        self._store = store
        self._released = False

    @property
    def settled(self) -> bool:
        """Whether no other request is filling one of the slots."""
        return all(slot.item is not None or slot in self.new for slot in self.slots)

    @property
    def items(self) -> tuple[EncodedItem, ...]:
        """The items, once every slot is filled."""
        return tuple(slot.item for slot in self.slots if slot.item is not None)

    def rows(self, slot: Slot) -> memoryview:
        """Return the memory of a slot; valid until `release`."""
        return self._store.view(slot)

    def filled(self, slot: Slot, item: EncodedItem) -> None:
        """The rows of a new slot are in its memory."""
        slot.item = item
        if not slot.filled.done():
            slot.filled.set_result(True)

    async def ready(self) -> bool:
        """Wait until other holders have filled their slots; return False if one of them has failed to."""
        others = [slot.filled for slot in self.slots if slot not in self.new]
        return all([await asyncio.shield(filled) for filled in others])

    def release(self) -> None:
        """Unpin. New slots that are not filled are dropped. Idempotent."""
        if not self._released:
            self._released = True
            self._store.release(self.slots, self.new)


class EmbeddingStore:
    """Rows of shape `shape` in at most `nbytes`. Raises ConfigError if that is not one block."""

    def __init__(self, shape: EmbeddingShape, nbytes: int) -> None:
        if shape.dtype not in ITEM_BYTES:
            raise ConfigError(f"embeddings of type {shape.dtype} cannot be stored")
        self.shape = shape
        self.row_bytes = shape.size * ITEM_BYTES[shape.dtype]
        block_bytes = -(-MIN_BLOCK_BYTES // self.row_bytes) * self.row_bytes
        blocks = nbytes // block_bytes
        if blocks < 1:
            raise ConfigError(f"--media-cache-bytes {nbytes} is less than one block of {block_bytes} bytes")
        descriptor = _sealed_file(blocks * block_bytes)
        self._pages = mmap.mmap(descriptor, blocks * block_bytes, flags=mmap.MAP_SHARED)
        self.memory = BlockMemory(
            shape=shape,
            address=ctypes.addressof(ctypes.c_char.from_buffer(self._pages)),
            planes=1,
            plane_bytes=blocks * block_bytes,
            block_bytes=block_bytes,
            blocks=blocks,
            descriptor=descriptor,
        )
        self.hits = 0
        self.misses = 0
        self._view = memoryview(self._pages)
        self._slots: OrderedDict[str, Slot] = OrderedDict()  # least recently used first
        self._placed: list[tuple[int, int]] = []  # first block and end of every slot, sorted
        self._queue = asyncio.Lock()  # first come, first served
        self._space = asyncio.Event()
        self._closed = False

    @property
    def entries(self) -> int:
        """How many items are stored."""
        return len(self._slots)

    @property
    def pinned(self) -> int:
        """How many items requests hold."""
        return sum(slot.pins > 0 for slot in tuple(self._slots.values()))

    @property
    def used_bytes(self) -> int:
        """How much memory the items take."""
        return sum(slot.blocks for slot in tuple(self._slots.values())) * self.memory.block_bytes

    def blocks_of(self, nbytes: int) -> int:
        """Return how many blocks rows of `nbytes` take."""
        return -(-nbytes // self.memory.block_bytes)

    def has(self, content_hash: str) -> bool:
        """Whether the rows are here, or another request is about to put them here."""
        return content_hash in self._slots

    async def hold(self, wanted: Sequence[Wanted]) -> Hold | None:
        """Pin the slots of `wanted`, making new ones, as soon as there is memory for all of them.

        Returns None if rows are not here whose size is not given. Raises InvalidRequest if they can never fit.
        """
        async with self._queue:
            while (hold := self._try_hold(wanted)) is False:
                self._space.clear()
                await self._space.wait()
            return hold

    async def settled(self, content_hashes: Sequence[str]) -> None:
        """Wait until no other request is filling any of these slots. The caller holds none."""
        for content_hash in content_hashes:
            while (slot := self._slots.get(content_hash)) is not None and slot.item is None:
                await asyncio.shield(slot.filled)

    def hold_present(self, content_hashes: Sequence[str]) -> Hold | None:
        """Pin these rows if all of them are here and complete; else return None and pin nothing."""
        slots = [self._slots.get(each) for each in content_hashes]
        found = [slot for slot in slots if slot is not None and slot.item is not None]
        if len(found) < len(slots):
            return None
        return self._pin(found, ())

    def view(self, slot: Slot) -> memoryview:
        """Return the memory of a slot."""
        start = slot.first * self.memory.block_bytes
        return self._view[start : start + slot.nbytes]

    def release(self, slots: Sequence[Slot], new: Sequence[Slot]) -> None:
        """See `Hold.release`."""
        _add_pins(slots, -1)
        for slot in new:
            if slot.item is None:
                self._drop(slot)
                slot.filled.set_result(False)
        self._space.set()

    def close(self) -> None:
        """Close the file; the memory itself is freed with the process. Idempotent."""
        if not self._closed and self.memory.descriptor is not None:
            self._closed = True
            os.close(self.memory.descriptor)

    def _try_hold(self, wanted: Sequence[Wanted]) -> Hold | Literal[False] | None:
        """Return the hold, None if rows are missing, or False if there is not enough memory now."""
        missing = {each.content_hash: each.nbytes for each in wanted if each.content_hash not in self._slots}
        sizes = {content_hash: nbytes for content_hash, nbytes in missing.items() if nbytes is not None}
        if len(sizes) < len(missing):
            return None
        self._check_fits(wanted)
        kept = [self._slots[each.content_hash] for each in wanted if each.content_hash not in missing]
        _add_pins(kept, 1)  # so that they are not evicted for the others
        new = self._allocate_all(sizes)
        _add_pins(kept, -1)
        return False if new is None else self._pin([self._slots[each.content_hash] for each in wanted], new)

    def _allocate_all(self, sizes: Mapping[str, int]) -> list[Slot] | None:
        """Return a new slot for each content hash, or None, with nothing allocated, if there is not enough memory."""
        allocated = [self._allocate(content_hash, nbytes) for content_hash, nbytes in sizes.items()]
        new = [slot for slot in allocated if slot is not None]
        _add_pins(new, -1)
        if len(new) == len(sizes):
            return new
        for slot in new:
            self._drop(slot)
        return None

    def _pin(self, slots: Sequence[Slot], new: Sequence[Slot]) -> Hold:
        _add_pins(slots, 1)
        for slot in slots:
            self._slots.move_to_end(slot.content_hash)
        self.misses += len(new)
        self.hits += len(slots) - len(new)
        return Hold(self, tuple(slots), tuple(new))

    def _check_fits(self, wanted: Sequence[Wanted]) -> None:
        sizes = {each.content_hash: each.nbytes or 0 for each in wanted}
        blocks = sum(map(self.blocks_of, sizes.values()))
        if blocks > self.memory.blocks:
            raise InvalidRequest(
                f"multi_modal_data: the media of this request take {blocks * self.memory.block_bytes} bytes as"
                f" embeddings, and this worker holds {self.memory.plane_bytes} (--media-cache-bytes)"
            )

    def _allocate(self, content_hash: str, nbytes: int) -> Slot | None:
        """Return a new pinned slot; evict unpinned ones if need be. None if no run of blocks is long enough."""
        blocks = max(1, self.blocks_of(nbytes))
        while (first := self._find_run(blocks)) is None:
            victim = next((slot for slot in self._slots.values() if not slot.pins), None)
            if victim is None:
                return None
            self._drop(victim)
        slot = self._slots[content_hash] = Slot(content_hash, nbytes, first, blocks)
        insort(self._placed, (slot.first, slot.end))
        slot.pins = 1  # until the caller has all of its slots
        return slot

    def _find_run(self, blocks: int) -> int | None:
        first = 0
        for start, end in self._placed:
            if start - first >= blocks:
                return first
            first = end
        return first if self.memory.blocks - first >= blocks else None

    def _drop(self, slot: Slot) -> None:
        if self._slots.get(slot.content_hash) is slot:
            del self._slots[slot.content_hash]
        self._placed.remove((slot.first, slot.end))


def _add_pins(slots: Iterable[Slot], count: int) -> None:
    for slot in slots:
        slot.pins += count


def _sealed_file(nbytes: int) -> int:
    """Return an anonymous file of this size that nobody can resize: what maps it never faults."""
    descriptor = os.memfd_create("baton-embeddings", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.ftruncate(descriptor, nbytes)
    fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL)
    return descriptor
