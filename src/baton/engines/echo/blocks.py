"""The accounting of a paged KV cache with prefix reuse, without the cache. Pure and synchronous.

A full block of a prompt is identified by the hash of its tokens and of everything before them. Blocks that no request
holds stay cached until their space is needed, oldest first.
"""

from collections import OrderedDict
from collections.abc import Sequence

from baton.engine_kit.block_hash import block_hashes

BLOCK = 16


class HeldBlocks:
    """The blocks of one request: `numbers` in prompt order, the first `cached` of them reused.

    The first `named` are shared by hash; the others are the request's own.
    """

    __slots__ = ("cached", "hashes", "named", "numbers")

    def __init__(self, hashes: list[bytes], cached: int, named: int, numbers: list[int]) -> None:
        self.hashes = hashes
        self.cached = cached
        self.named = named
        self.numbers = numbers


class BlockPool:
    """Numbers blocks. `evicted` gathers the hashes of blocks that left the cache, until the caller takes the list."""

    def __init__(self, total: int) -> None:
        self.total = total
        self.used = 0
        """Blocks that requests hold."""
        self._held: dict[bytes, tuple[int, int]] = {}  # number, and how many requests hold it
        self._cached: OrderedDict[bytes, int] = OrderedDict()
        self._freed: list[int] = []
        self._first_unused = 0
        self.evicted: list[bytes] = []

    @property
    def free(self) -> int:
        """Blocks that a new request can get, cached ones included."""
        return self.total - self.used

    def allocate(
        self, token_ids: Sequence[int], tokens: int, salt: str | None, receives: bool = False
    ) -> HeldBlocks | None:
        """Hold blocks for `tokens` tokens that begin with `token_ids`, or return None if too few are free.

        Blocks of a request that `receives` their content are shared when it has `arrived`.
        """
        hashes = block_hashes(token_ids, BLOCK, salt)
        cached = 0
        while cached < len(hashes) and (hashes[cached] in self._held or hashes[cached] in self._cached):
            cached += 1
        named = cached if receives else len(hashes)
        own = -(-tokens // BLOCK) - named
        if own + sum(name not in self._held for name in hashes[:named]) > self.free:
            return None
        # Reused blocks first: taking others may evict them.
        numbers = [self._share(name) for name in hashes[:cached]]
        numbers += [self._share(name) for name in hashes[cached:named]]
        numbers += [self._take() for _ in range(own)]
        return HeldBlocks(hashes, cached, named, numbers)

    def arrived(self, held: HeldBlocks) -> None:
        """The content of received blocks is there: share them."""
        for name, number in zip(held.hashes[held.named :], held.numbers[held.named :], strict=False):
            if name in self._held or name in self._cached:
                return  # another request has the same; those after it stay its own
            self._held[name] = (number, 1)
            held.named += 1

    def release(self, held: HeldBlocks) -> None:
        """Release what `allocate` returned; prompt blocks without another holder stay cached."""
        own = held.numbers[held.named :]
        self.used -= len(own)
        self._freed += own
        for name in reversed(held.hashes[: held.named]):  # a block is evicted after those that continue it
            number, holders = self._held[name]
            if holders > 1:
                self._held[name] = (number, holders - 1)
            else:
                del self._held[name]
                self._cached[name] = number
                self.used -= 1

    def _share(self, name: bytes) -> int:
        if name in self._held:
            number, holders = self._held[name]
            self._held[name] = (number, holders + 1)
            return number
        if (cached := self._cached.pop(name, None)) is not None:
            self.used += 1
            number = cached
        else:
            number = self._take()
        self._held[name] = (number, 1)
        return number

    def _take(self) -> int:
        self.used += 1
        if self._freed:
            return self._freed.pop()
        if self._first_unused < self.total:
            self._first_unused += 1
            return self._first_unused - 1
        name, number = self._cached.popitem(last=False)
        self.evicted.append(name)
        return number
