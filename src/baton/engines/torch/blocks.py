"""The accounting of a paged KV cache: which sequences hold which block, and which blocks can be reused. No memory.

A block is in one of three states:

    free      not held, without a hash                       -> allocated first
    cached    not held, with a hash                          -> reused by its hash, or evicted, oldest first
    held      by one or more sequences; with a hash it is full and is not written again
"""

from collections import OrderedDict
from collections.abc import Iterable, Sequence

from baton.engine_kit.block_hash import event_hash
from baton.engine_kit.kv_ledger import KvLedger, rows_within
from baton.protocol.events import KvEvent, RoutedRows


class BlockPool:
    """Blocks by number, from 0. `events` gathers KV events for routers, in order, until the caller takes the list."""

    def __init__(self, total: int, size: int) -> None:
        self.total = total
        self.size = size
        self.events: list[KvEvent] = []
        self._ledger = KvLedger(size)
        self._holders = [0] * total
        self._hashes: list[bytes | None] = [None] * total
        self._by_hash: dict[bytes, int] = {}
        self._free: OrderedDict[int, None] = OrderedDict.fromkeys(range(total))

    @property
    def free(self) -> int:
        """Blocks that can be allocated now, cached ones included."""
        return len(self._free)

    @property
    def used(self) -> int:
        """Blocks that sequences hold."""
        return self.total - len(self._free)

    def holders(self, block: int) -> int:
        """How many sequences hold `block`."""
        return self._holders[block]

    def hash_of(self, block: int) -> bytes | None:
        """The hash that `block` can be found by, if it has one."""
        return self._hashes[block]

    def find(self, hashes: Iterable[bytes]) -> list[int]:
        """Return the blocks of the longest prefix of `hashes` that is in the cache."""
        blocks: list[int] = []
        for name in hashes:
            block = self._by_hash.get(name)
            if block is None:
                break
            blocks.append(block)
        return blocks

    def idle(self, blocks: Iterable[int]) -> int:
        """Return how many of `blocks` are not held: holding them reduces `free` by that number."""
        return sum(self._holders[block] == 0 for block in blocks)

    def hold(self, blocks: Iterable[int]) -> None:
        """Hold blocks that `find` has returned."""
        for block in blocks:
            if self._holders[block] == 0:
                del self._free[block]
            self._holders[block] += 1

    def allocate(self) -> int:
        """Return a block without a hash for one holder, evicting the oldest cached one if needed; `free` > 0."""
        block, _ = self._free.popitem(last=False)
        name = self._hashes[block]
        if name is not None:
            self._forget(block, name)
            self.events += self._ledger.removed((event_hash(name),))
        self._holders[block] = 1
        return block

    def release(self, blocks: Sequence[int]) -> None:
        """Drop a sequence's hold on its blocks. Later blocks are evicted before the ones they continue."""
        for block in reversed(blocks):
            self._holders[block] -= 1
            if self._holders[block] == 0:
                self._free[block] = None
                if self._hashes[block] is None:
                    self._free.move_to_end(block, last=False)

    def commit(
        self,
        blocks: list[int],
        first: int,
        hashes: Sequence[bytes],
        token_ids: Sequence[int],
        salt: str | None = None,
        media: Sequence[RoutedRows] = (),
    ) -> None:
        """Give the blocks of a sequence their hashes, from block `first` on, as far as `hashes` go. They are full.

        `hashes`, `token_ids` and `media` are the sequence's, from its start. A block whose content is cached already is
        replaced by the cached one: `blocks` is changed in place.
        """
        for number in range(first, len(hashes)):
            block, name = blocks[number], hashes[number]
            known = self._by_hash.setdefault(name, block)
            if known == block:
                self._hashes[block] = name
            else:
                self.hold((known,))
                self.release((block,))
                blocks[number] = known
        start, stop = first * self.size, len(hashes) * self.size
        parent = event_hash(hashes[first - 1]) if first else None
        self.events += self._ledger.stored(
            [event_hash(name) for name in hashes[first:]],
            token_ids[start:stop],
            parent,
            cache_salt=salt,
            media=rows_within(media, start, stop),
        )

    def clear(self) -> None:
        """Drop every hash. Blocks that are held stay held, and can no longer be found."""
        for name, block in tuple(self._by_hash.items()):
            self._forget(block, name)
        self.events += self._ledger.cleared()

    def _forget(self, block: int, name: bytes) -> None:
        del self._by_hash[name]
        self._hashes[block] = None
