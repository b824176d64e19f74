"""What an engine says of its blocks and its load, in the words of the runtime's routers."""

import asyncio
import contextlib
import logging
import threading

from dynamo import _core

from baton.protocol.events import KvCleared, KvEvent, KvRemoved, KvStored, LoadSnapshot

log = logging.getLogger(__name__)

CLOSE_S = 2.0


class LoadPublisher:
    """Tells frontends how many blocks of one instance are in use. What has not changed is not told again."""

    def __init__(self) -> None:
        self._publisher = _core.WorkerMetricsPublisher()

    async def open(self, endpoint: _core.Endpoint) -> None:
        """Begin; what is told before is lost."""
        await self._publisher.create_endpoint(endpoint)

    def publish(self, load: LoadSnapshot) -> None:
        """See `Endpoint.tell`."""
        self._publisher.publish(load.dp_rank, None, load.used_blocks)


class KvEventPublisher:
    """Tells KV routers which blocks one instance holds: each data-parallel rank has its own."""

    def __init__(self, endpoint: _core.Endpoint, block_size: int, dp_size: int) -> None:
        self._ranks = [_Rank(endpoint, block_size, rank) for rank in range(dp_size)]
        self._strangers: set[int] = set()

    def publish(self, event: KvEvent) -> None:
        """See `Endpoint.tell`."""
        if event.dp_rank < len(self._ranks):
            self._ranks[event.dp_rank].publish(event)
        elif event.dp_rank not in self._strangers:
            self._strangers.add(event.dp_rank)
            log.warning("events of rank %d go nowhere: %d ranks were announced", event.dp_rank, len(self._ranks))

    async def close(self) -> None:
        """Stop telling, within `CLOSE_S`.

        The publishers may wait for threads of their own: that is left to a thread that nobody has to wait for.
        """
        loop, closed = asyncio.get_running_loop(), asyncio.Event()

        def shut_down() -> None:
            for rank in self._ranks:
                rank.shut_down()
            with contextlib.suppress(RuntimeError):  # the loop has closed: nobody waits
                loop.call_soon_threadsafe(closed.set)

        threading.Thread(target=shut_down, name="baton-kv-close", daemon=True).start()
        try:
            await asyncio.wait_for(closed.wait(), CLOSE_S)
        except TimeoutError:
            log.warning("the publisher of KV events did not end within %g s", CLOSE_S)


class _Rank:
    """The blocks of one rank, through the runtime's publisher."""

    def __init__(self, endpoint: _core.Endpoint, block_size: int, dp_rank: int) -> None:
        # With an index of its own a worker can tell a frontend that has just started what it holds already.
        self._publisher = _core.KvEventPublisher(
            endpoint, kv_block_size=block_size, dp_rank=dp_rank, enable_local_indexer=True
        )
        self._told: set[int] = set()

    def publish(self, event: KvEvent) -> None:
        match event:
            case KvStored():
                self._told.update(event.block_hashes)
                self._publisher.publish_stored(
                    list(event.token_ids),
                    [event.block_size] * len(event.block_hashes),
                    list(event.block_hashes),
                    event.parent_hash,
                    lora_name=event.lora_name,
                    cache_salt=event.cache_salt,
                )
            case KvRemoved():
                self._remove(event.block_hashes)
            case KvCleared():
                # The publisher has no word for it.
                self._remove(tuple(self._told))

    def shut_down(self) -> None:
        self._publisher.shutdown()

    def _remove(self, hashes: tuple[int, ...]) -> None:
        self._told.difference_update(hashes)
        if hashes:
            self._publisher.publish_removed(list(hashes))
