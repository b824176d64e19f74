"""The double's KV cache: blocks that are held or kept for reuse, and their events."""

import hashlib
from collections import OrderedDict, deque

Event = dict[str, object]


class Hold:
    """The blocks of one request."""

    def __init__(self, names: list[int], own: int, cached: int) -> None:
        self.names = names
        self.own = own
        self.cached = cached


class BlockCache:
    """Reserves the blocks of prompt and output at once, as a scheduler that never preempts does."""

    def __init__(self, total: int, size: int, windows: tuple[int, ...], buffer: int, new: bool) -> None:
        self.total = total
        self.size = size
        self._new = new
        self._held: dict[int, int] = {}
        self._kept: OrderedDict[int, None] = OrderedDict()
        self._own = 0
        self._windows = windows
        self._next_event = 0
        self.lost = 0
        self.events: deque[Event] = deque(maxlen=buffer) if buffer else deque(maxlen=0)
        for window in windows:
            self._emit({"type": "created", "num_blocks_per_cache_level": [total, 0]}, window)

    @property
    def used(self) -> int:
        """Blocks that requests hold."""
        return len(self._held) + self._own

    def take(self, tokens: list[int], total: int, salt: str | None) -> Hold | None:
        """Hold blocks for `total` tokens that begin with `tokens`; None if too few are free."""
        names = self._names(tokens, salt)
        needed = -(-total // self.size) - len(names)
        if needed + sum(name not in self._held for name in names) > self.total - self.used:
            return None
        cached = 0
        while cached < len(names) and (names[cached] in self._held or names[cached] in self._kept):
            cached += 1
        for name in names:
            self._held[name] = self._held.get(name, 0) + 1
            self._kept.pop(name, None)
        self._own += needed
        self._evict()
        self._emit_stored(names, tokens, cached, salt)
        return Hold(names, needed, cached * self.size)

    def free(self, hold: Hold) -> None:
        """Free the blocks of a request; full ones are kept for reuse while there is space."""
        self._own -= hold.own
        for name in reversed(hold.names):
            self._held[name] -= 1
            if not self._held[name]:
                del self._held[name]
                self._kept[name] = None
        self._evict()

    def _names(self, tokens: list[int], salt: str | None) -> list[int]:
        names: list[int] = []
        before = (salt or "").encode()
        for start in range(0, len(tokens) - self.size + 1, self.size):
            block = tokens[start : start + self.size]
            before = hashlib.sha256(before + repr(block).encode()).digest()
            names.append(int.from_bytes(before[:8], "little"))  # unsigned, as the library's are
        return names

    def _evict(self) -> None:
        evicted = []
        while self.used + len(self._kept) > self.total:
            evicted.append(self._kept.popitem(last=False)[0])
        if evicted:
            for window in self._windows:
                self._emit({"type": "removed", "block_hashes": evicted}, window)

    def _emit_stored(self, names: list[int], tokens: list[int], cached: int, salt: str | None) -> None:
        fresh = names[cached:]
        blocks = [self._block(name, tokens, cached + at, salt) for at, name in enumerate(fresh)]
        rest = tokens[len(names) * self.size :]
        if rest:  # a block that is not full is reported too, with a hash of its own
            blocks.append(self._block(hash((tuple(rest), *names[-1:])) & (2**64 - 1), tokens, len(names), salt))
        if blocks:
            parent = names[cached - 1] if cached else None
            for window in self._windows:
                self._emit({"type": "stored", "parent_hash": parent, "blocks": blocks}, window)

    def _block(self, name: int, tokens: list[int], at: int, salt: str | None) -> Event:
        content = tokens[at * self.size : (at + 1) * self.size]
        event: Event = {
            "type": "stored_block",
            "block_hash": name,
            "tokens": [{"type": "unique_token", "token_id": token, "token_extra_id": 0} for token in content],
            "cache_level": 0,
            "priority": 35,
            "mm_keys": [],
        }
        return event | {"cache_salt": salt} if self._new else event

    def _emit(self, data: Event, window: int) -> None:
        if self.events.maxlen:
            self.lost += len(self.events) == self.events.maxlen
            self.events.append({"event_id": self._next_event, "data": data, "window_size": window})
        self._next_event += 1
