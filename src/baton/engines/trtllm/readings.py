"""Load and KV events of the engine: polled on threads, because the library's calls block, and kept until read."""

import asyncio
import logging
import threading
import time
from collections import deque
from collections.abc import AsyncGenerator, Callable
from contextlib import suppress

from baton.engines.trtllm.kv_events import KvEvents
from baton.protocol.events import KvEvent, LoadSnapshot, Reading

log = logging.getLogger(__name__)

LOAD_INTERVAL_S = 0.25
MAX_EVENTS = 200_000
FIRST_RETRY_S = 0.1
MAX_RETRY_S = 5.0

Item = dict[str, object]


class Readings:
    """Filled on the event loop, read by one reader.

    With more than `max_events` unread KV events all of them are dropped and every block is withdrawn, which bounds the
    memory of this process.
    """

    def __init__(self, block_size: int, total_blocks: int, ranks: int, max_events: int = MAX_EVENTS) -> None:
        self._kv_events = KvEvents(block_size)
        self._events: deque[KvEvent] = deque()
        self._max_events = max_events
        self._loads = {rank: LoadSnapshot(0, 0, 0, total_blocks, rank) for rank in range(ranks)}
        self._changed = asyncio.Event()
        self._closed = False
        self._warned = False
        self.steps = 0

    @property
    def running(self) -> int:
        """Requests in the engine's batch, by its last statistics."""
        return sum(load.running for load in self._loads.values())

    def add_stats(self, stats: list[Item]) -> None:
        """Add the statistics of iterations; the last one of each rank is its load."""
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
        self._changed.set()

    def add_events(self, events: list[Item]) -> None:
        """Add KV events, in the engine's order."""
        for event in events:
            try:
                self._events.extend(self._kv_events.translate(event))
            except (KeyError, TypeError, ValueError) as error:
                self._events.extend(self._kv_events.unreadable(event))
                if not self._warned:
                    self._warned = True
                    log.warning("KV events of unknown format withdraw the blocks of their rank: %r", error)
        if len(self._events) > self._max_events:
            log.warning("dropping %d unread KV events; every block is withdrawn", len(self._events))
            self._events.clear()
            self._events.extend(self._kv_events.unpublish())
        self._changed.set()

    def set_idle(self) -> None:
        """The engine has no request, so none holds a block. Without iterations it reports no statistics."""
        for rank, load in self._loads.items():
            self._loads[rank] = LoadSnapshot(0, 0, 0, load.total_blocks, rank)
        self._changed.set()

    def close(self) -> None:
        """End the iteration after the readings that are left."""
        self._closed = True
        self._changed.set()

    async def read(self) -> AsyncGenerator[Reading, None]:
        """See `Engine.readings`."""
        published: dict[int, LoadSnapshot] = {}
        while not self._closed or self._events:
            self._changed.clear()  # before reading: a change while the reader is busy must wake this loop again
            while self._events:
                yield self._events.popleft()
            for load in [load for rank, load in self._loads.items() if published.get(rank) != load]:
                published[load.dp_rank] = load
                yield load
            if not self._events and not self._closed:
                await self._changed.wait()
                if not self._events:
                    await asyncio.sleep(LOAD_INTERVAL_S)  # load alone is published at an interval


class Poll:
    """Calls `fetch` on a thread, from `start` to `stop`, and passes its items to `deliver` on the event loop.

    An error costs one poll: the next one is delayed, up to `MAX_RETRY_S`, and consecutive errors are logged once.
    """

    def __init__(
        self,
        name: str,
        fetch: Callable[[float], list[Item]],
        deliver: Callable[[list[Item]], None],
        interval_s: float,
    ) -> None:
        self._name = name
        self._fetch = fetch
        self._deliver = deliver
        self._interval_s = interval_s
        self._stopped = threading.Event()
        self._loop = asyncio.get_running_loop()
        # A daemon: a call that never returns must not keep the process from ending.
        self._thread = threading.Thread(target=self._run, name=f"trtllm-{name}", daemon=True)
        self.errors = 0

    def start(self) -> None:
        """Begin to poll."""
        self._thread.start()

    def stop(self) -> None:
        """Poll no more; the items of a call in progress are dropped."""
        self._stopped.set()

    def _run(self) -> None:
        failures = 0  # in a row
        while not self._stopped.is_set():
            began = time.monotonic()
            try:
                items = self._fetch(self._interval_s)
            except Exception as error:  # noqa: BLE001 - the next poll may succeed
                failures += 1
                self._failed(error, failures)
                continue
            if failures:
                log.info("polling %s succeeds again, after %d errors", self._name, failures)
                failures = 0
            if items and not self._stopped.is_set():
                with suppress(RuntimeError):  # the loop has closed
                    self._loop.call_soon_threadsafe(self._deliver, items)
            self._stopped.wait(max(0.0, self._interval_s - (time.monotonic() - began)))

    def _failed(self, error: Exception, failures: int) -> None:
        self.errors += 1
        if failures == 1:
            log.warning("polling %s failed: %r; retrying", self._name, error)
        self._stopped.wait(min(MAX_RETRY_S, FIRST_RETRY_S * 2 ** min(failures, 10)))


def kv_capacity(stats: list[Item]) -> tuple[int, int] | None:
    """Return the number of KV blocks and the tokens per block, if an iteration has reported them."""
    for stat in stats:
        cache = stat.get("kvCacheStats")
        if isinstance(cache, dict):
            blocks, size = _count(cache, "maxNumBlocks", 0), _count(cache, "tokensPerBlock", 0)
            if blocks and size:
                return blocks, size
    return None


def _count(fields: dict[str, object], name: str, default: int) -> int:
    value = fields.get(name)
    return value if isinstance(value, int) else default
