"""The accounting of a paged KV cache with prefix reuse, without the cache. Pure and synchronous.

A full block of a prompt is identified by the hash of its tokens and of everything before them. Blocks that no request
holds stay cached until their space is needed, oldest first.
"""

from collections import OrderedDict
from collections.abc import Sequence
from typing import NamedTuple

from baton.engine_kit.block_hash import block_hashes

BLOCK = 16


class HeldBlocks(NamedTuple):
    """The blocks of one request: shareable prompt blocks, the first `cached` of them reused, and `own` others."""

    hashes: list[bytes]
    cached: int
    own: int


class BlockPool:
    """Counts blocks. `evicted` gathers the hashes of blocks that left the cache, until the caller takes the list."""

    def __init__(self, total: int) -> None:
        self.total = total
        self._held: dict[bytes, int] = {}
        self._cached: OrderedDict[bytes, None] = OrderedDict()
        self._own = 0
        self.evicted: list[bytes] = []

    @property
    def used(self) -> int:
        """Blocks that requests hold."""
        return len(self._held) + self._own

    @property
    def free(self) -> int:
        """Blocks that a new request can get, cached ones included."""
        return self.total - self.used

    def allocate(self, token_ids: Sequence[int], tokens: int, salt: str | None) -> HeldBlocks | None:
        """Hold blocks for `tokens` tokens that begin with `token_ids`, or return None if too few are free."""
        hashes = block_hashes(token_ids, BLOCK, salt)
        cached = 0
        while cached < len(hashes) and (hashes[cached] in self._held or hashes[cached] in self._cached):
            cached += 1
        own = -(-tokens // BLOCK) - len(hashes)
        needed = own + sum(name not in self._held for name in hashes)
        if needed > self.free:
            return None
        for name in hashes:
            self._held[name] = self._held.get(name, 0) + 1
            self._cached.pop(name, None)
        self._own += own
        self._evict()
        return HeldBlocks(hashes, cached, own)

    def release(self, held: HeldBlocks) -> None:
        """Release what `allocate` returned; prompt blocks without another holder stay cached."""
        self._own -= held.own
        for name in reversed(held.hashes):  # a block is evicted after those that continue it
            self._held[name] -= 1
            if self._held[name] == 0:
                del self._held[name]
                self._cached[name] = None
        self._evict()

    def _evict(self) -> None:
        while self.used + len(self._cached) > self.total:
            name, _ = self._cached.popitem(last=False)
            self.evicted.append(name)
