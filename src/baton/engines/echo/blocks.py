"""Who holds which blocks: the accounting of a paged KV cache with prefix reuse, without the cache.

A block is named by the hash of its tokens and of everything before them. Blocks that nobody holds stay for reuse until
their room is needed, oldest first. Pure and synchronous.
"""

from collections import OrderedDict
from collections.abc import Sequence

from baton.engine_kit.block_hash import block_hashes

BLOCK = 16


class Hold:
    """What one request holds: named prompt blocks that may be shared, and a number of blocks of its own."""

    __slots__ = ("cached", "fresh", "named", "own")

    def __init__(self, named: list[int], cached: int, own: int) -> None:
        self.named = named
        self.cached = cached
        self.own = own
        self.fresh = named[cached:]


class BlockLedger:
    """Counts blocks. `free` is what a new request can get: empty blocks and blocks kept only for reuse."""

    def __init__(self, total: int) -> None:
        self.total = total
        self._held: dict[int, int] = {}
        self._kept: OrderedDict[int, None] = OrderedDict()
        self._own = 0
        self.evicted: list[int] = []

    @property
    def used(self) -> int:
        """Blocks that requests hold now."""
        return len(self._held) + self._own

    @property
    def free(self) -> int:
        """Blocks that requests do not hold now."""
        return self.total - self.used

    def take(self, token_ids: Sequence[int], tokens: int, salt: str | None) -> Hold | None:
        """Hold blocks for `tokens` tokens that begin with `token_ids`, or return None if there are not enough now."""
        named = block_hashes(token_ids, BLOCK, salt)
        cached = 0
        while cached < len(named) and (named[cached] in self._held or named[cached] in self._kept):
            cached += 1
        own = -(-tokens // BLOCK) - len(named)
        needed = own + sum(name not in self._held for name in named)
        if needed > self.free:
            return None
        for name in named:
            self._held[name] = self._held.get(name, 0) + 1
            self._kept.pop(name, None)
        self._own += own
        self._evict()
        return Hold(named, cached, own)

    def give_back(self, hold: Hold) -> None:
        """Release what `take` gave; named blocks nobody else holds are kept for reuse."""
        self._own -= hold.own
        for name in reversed(hold.named):  # what continues a block is kept behind it, and so evicted before it
            self._held[name] -= 1
            if self._held[name] == 0:
                del self._held[name]
                self._kept[name] = None
        self._evict()

    def _evict(self) -> None:
        while self.used + len(self._kept) > self.total:
            name, _ = self._kept.popitem(last=False)
            self.evicted.append(name)
