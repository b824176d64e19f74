"""The accounting of a paged KV cache: who holds which block, and which blocks can be reused. No memory in sight.

A block is in one of three states:

    free      nobody holds it and it has no name             -> taken first
    kept      nobody holds it, it has a name                 -> reused by name, or evicted, oldest first
    held      one or more sequences hold it; with a name it is full, and nobody writes to it any more
"""

from collections import OrderedDict
from collections.abc import Iterable, Sequence

from baton.protocol.events import KvCleared, KvEvent, KvRemoved, KvStored


class BlockPool:
    """Blocks by number, from 0. `events` gathers what routers must know, in order, until somebody takes it."""

    def __init__(self, total: int, size: int) -> None:
        self.total = total
        self.size = size
        self.events: list[KvEvent] = []
        self._holders = [0] * total
        self._names: list[int | None] = [None] * total
        self._by_name: dict[int, int] = {}
        self._free: OrderedDict[int, None] = OrderedDict.fromkeys(range(total))

    @property
    def free(self) -> int:
        """Blocks that a sequence could take now, those kept for reuse included."""
        return len(self._free)

    @property
    def used(self) -> int:
        """Blocks that sequences hold."""
        return self.total - len(self._free)

    def holders(self, block: int) -> int:
        """How many sequences hold `block`."""
        return self._holders[block]

    def name(self, block: int) -> int | None:
        """The name that `block` can be found by, if it has one."""
        return self._names[block]

    def find(self, names: Sequence[int]) -> list[int]:
        """Return the blocks of the longest beginning of `names` that is here."""
        blocks: list[int] = []
        for name in names:
            block = self._by_name.get(name)
            if block is None:
                break
            blocks.append(block)
        return blocks

    def idle(self, blocks: Iterable[int]) -> int:
        """Return how many of `blocks` nobody holds: holding them takes so many from `free`."""
        return sum(self._holders[block] == 0 for block in blocks)

    def hold(self, blocks: Iterable[int]) -> None:
        """Hold blocks that `find` has returned."""
        for block in blocks:
            if self._holders[block] == 0:
                del self._free[block]
            self._holders[block] += 1

    def take(self) -> int:
        """Return an unnamed block for one holder, evicting the oldest kept one if there is no other; `free` > 0."""
        block, _ = self._free.popitem(last=False)
        name = self._names[block]
        if name is not None:
            self._forget(block, name)
            self.events.append(KvRemoved((name,)))
        self._holders[block] = 1
        return block

    def give_back(self, blocks: Sequence[int]) -> None:
        """Let go of a sequence's blocks. Later blocks are evicted before the ones they continue."""
        for block in reversed(blocks):
            self._holders[block] -= 1
            if self._holders[block] == 0:
                self._free[block] = None
                if self._names[block] is None:
                    self._free.move_to_end(block, last=False)

    def commit(
        self, blocks: list[int], first: int, names: Sequence[int], token_ids: Sequence[int], salt: str | None = None
    ) -> None:
        """Name the blocks of a sequence from number `first` on, as far as `names` go; nobody will write to them again.

        `names` and `token_ids` are the sequence's, from its start. A block whose name is taken gives way to the one
        that has it: `blocks` is changed in place.
        """
        fresh: list[int] = []
        for number in range(first, len(names)):
            block, name = blocks[number], names[number]
            known = self._by_name.get(name)
            if known is None:
                self._by_name[name] = block
                self._names[block] = name
                fresh.append(number)
            elif known != block:
                self.hold((known,))
                self.give_back((block,))
                blocks[number] = known
        self._tell_stored(fresh, names, token_ids, salt)

    def _tell_stored(self, fresh: list[int], names: Sequence[int], token_ids: Sequence[int], salt: str | None) -> None:
        """Announce each run of consecutive new blocks once."""
        size = self.size
        while fresh:
            start, stop = fresh[0], fresh[0] + 1
            while stop - start < len(fresh) and fresh[stop - start] == stop:
                stop += 1
            self.events.append(
                KvStored(
                    block_hashes=tuple(names[start:stop]),
                    token_ids=tuple(token_ids[start * size : stop * size]),
                    block_size=size,
                    parent_hash=names[start - 1] if start else None,
                    cache_salt=salt,
                )
            )
            fresh = fresh[stop - start :]

    def clear(self) -> None:
        """Forget every name. Blocks that are held stay so, and can no longer be found."""
        if self._by_name:
            for name, block in tuple(self._by_name.items()):
                self._forget(block, name)
            self.events.append(KvCleared())

    def _forget(self, block: int, name: int) -> None:
        del self._by_name[name]
        self._names[block] = None
