"""What the engine tells of itself, kept until it is read: its load by rank, and which blocks it holds."""

import asyncio
import logging
from collections import deque
from collections.abc import AsyncGenerator

from baton.engines.trtllm.kv_events import KvView
from baton.engines.trtllm.polls import Item
from baton.protocol.events import KvEvent, LoadSnapshot, Reading

log = logging.getLogger(__name__)

LOAD_INTERVAL_S = 0.25
# More events than this nobody has read for long: the router starts anew rather than this process grows.
MAX_EVENTS = 200_000


class Readings:
    """Filled on the event loop, read by one reader."""

    def __init__(self, block_size: int, total_blocks: int, ranks: int) -> None:
        self._view = KvView(block_size)
        self._events: deque[KvEvent] = deque()
        self._loads = {rank: LoadSnapshot(0, 0, 0, total_blocks, rank) for rank in range(ranks)}
        self._news = asyncio.Event()
        self._over = False
        self._misshapen = 0
        self.steps = 0

    @property
    def running(self) -> int:
        """Requests that the engine has in its batch, as far as it has told."""
        return sum(load.running for load in self._loads.values())

    def take_stats(self, stats: list[Item]) -> None:
        """Take what iterations tell; only the last of each rank counts."""
        self.steps += len(stats)
        for stat in stats:
            cache = stat.get("kvCacheStats")
            rank = _count(stat, "attentionDpRank", 0)
            before = self._loads.get(rank)
            if before is None:
                continue
            known = cache if isinstance(cache, dict) else {}
            self._loads[rank] = LoadSnapshot(
                running=_count(stat, "numActiveRequests", before.running),
                waiting=_count(stat, "numQueuedRequests", before.waiting),
                used_blocks=_count(known, "usedNumBlocks", before.used_blocks),
                total_blocks=_count(known, "maxNumBlocks", 0) or before.total_blocks,
                dp_rank=rank,
            )
        self._news.set()

    def take_events(self, events: list[Item]) -> None:
        """Take KV events, in the engine's order."""
        for event in events:
            try:
                self._events += self._view.take(event)
            except (KeyError, TypeError, ValueError) as error:
                self._misshapen += 1
                if self._misshapen == 1:
                    log.warning("a KV event has no shape that is known: %r; it is left out", error)
        if len(self._events) > MAX_EVENTS:
            log.warning("%d KV events have not been read; the router starts anew", len(self._events))
            self._events.clear()
            self._events += self._view.forget()
        self._news.set()

    def idle(self) -> None:
        """The engine has no request, so none holds a block. It tells nothing itself while it does not iterate."""
        for rank, load in self._loads.items():
            self._loads[rank] = LoadSnapshot(0, 0, 0, load.total_blocks, rank)
        self._news.set()

    def close(self) -> None:
        """End the reading, after what is there."""
        self._over = True
        self._news.set()

    async def read(self) -> AsyncGenerator[Reading, None]:
        """See `Engine.readings`."""
        told: dict[int, LoadSnapshot] = {}
        while not self._over or self._events:
            self._news.clear()  # before looking: what comes while the reader is busy counts as news
            while self._events:
                yield self._events.popleft()
            fresh = [load for rank, load in self._loads.items() if told.get(rank) != load]
            for load in fresh:
                told[load.dp_rank] = load
                yield load
            if not self._events and not self._over:
                await self._news.wait()
                if not self._events:
                    await asyncio.sleep(LOAD_INTERVAL_S)  # load alone is told now and then, not at every iteration


def kv_capacity(stats: list[Item]) -> tuple[int, int] | None:
    """Return how many blocks the cache has and how many tokens a block, if an iteration has told."""
    for stat in stats:
        cache = stat.get("kvCacheStats")
        if isinstance(cache, dict):
            blocks, size = _count(cache, "maxNumBlocks", 0), _count(cache, "tokensPerBlock", 0)
            if blocks and size:
                return blocks, size
    return None


def _count(told: dict[str, object], name: str, default: int) -> int:
    value = told.get(name)
    return value if isinstance(value, int) else default
