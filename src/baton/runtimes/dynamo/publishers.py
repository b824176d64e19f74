"""Publishes an engine's KV events and load to the runtime's routers."""

import asyncio
import contextlib
import logging
import threading
from collections import Counter

from dynamo import _core

from baton.protocol.events import KvCleared, KvEvent, KvRemoved, KvStored, LoadSnapshot

log = logging.getLogger(__name__)

CLOSE_TIMEOUT_S = 2.0
# How the frontend's router makes a token of the hash of an image.
_FIRST_IMAGE_TOKEN = 1_000_000
_IMAGE_TOKEN_BITS = (1 << 30) - 1


class LoadPublisher:
    """Publishes how many KV blocks of one instance are in use."""

    def __init__(self) -> None:
        self._publisher = _core.WorkerMetricsPublisher()

    async def open(self, endpoint: _core.Endpoint) -> None:
        """Open the publisher; loads that are published before are lost."""
        await self._publisher.create_endpoint(endpoint)

    def publish(self, load: LoadSnapshot) -> None:
        """See `Endpoint.publish`."""
        self._publisher.publish(load.dp_rank, None, load.used_blocks)


class KvEventPublisher:
    """Publishes which KV blocks one instance holds, for each data-parallel rank."""

    def __init__(self, endpoint: _core.Endpoint, block_size: int, dp_size: int) -> None:
        self._ranks = [_Rank(endpoint, block_size, rank) for rank in range(dp_size)]
        self._unknown_ranks: set[int] = set()

    def publish(self, event: KvEvent) -> None:
        """See `Endpoint.publish`."""
        if event.dp_rank < len(self._ranks):
            self._ranks[event.dp_rank].publish(event)
        elif event.dp_rank not in self._unknown_ranks:
            self._unknown_ranks.add(event.dp_rank)
            log.warning(
                "KV events of rank %d are dropped: the model was registered with %d ranks",
                event.dp_rank,
                len(self._ranks),
            )

    async def close(self) -> None:
        """Stop publishing, within `CLOSE_TIMEOUT_S`.

        The runtime's publishers may join threads of their own, so they shut down in a daemon thread.
        """
        loop, closed = asyncio.get_running_loop(), asyncio.Event()

        def shut_down() -> None:
            for rank in self._ranks:
                rank.shut_down()
            with contextlib.suppress(RuntimeError):  # the loop has closed, with every waiter
                loop.call_soon_threadsafe(closed.set)

        threading.Thread(target=shut_down, name="baton-kv-close", daemon=True).start()
        try:
            async with asyncio.timeout(CLOSE_TIMEOUT_S):
                await closed.wait()
        except TimeoutError:
            log.warning("the KV event publisher did not close within %g s", CLOSE_TIMEOUT_S)


def _routing_tokens(event: KvStored) -> list[int]:
    """Return the tokens of an event as the router sees those of a request.

    In the place of each row of an image, the router has one number that stands for the image. It gives the worker the
    hash that the number is made of (`extra_args.mm_hashes`). The runtime's `block_mm_infos` are hashed in another way.
    """
    tokens = list(event.token_ids)
    for rows in event.media:
        token = _FIRST_IMAGE_TOKEN + (int(rows.routing_hash, 16) & _IMAGE_TOKEN_BITS)
        tokens[rows.start : rows.stop] = [token] * (rows.stop - rows.start)
    return tokens


class _Rank:
    """The published blocks of one rank."""

    def __init__(self, endpoint: _core.Endpoint, block_size: int, dp_rank: int) -> None:
        # With a local index, a frontend that starts later gets the blocks that the worker holds already.
        self._publisher = _core.KvEventPublisher(
            endpoint, kv_block_size=block_size, dp_rank=dp_rank, enable_local_indexer=True
        )
        self._stores: Counter[int] = Counter()  # how often each block was published as stored

    def publish(self, event: KvEvent) -> None:
        match event:
            case KvStored():
                self._stores.update(event.block_hashes)
                self._publisher.publish_stored(
                    _routing_tokens(event),
                    [event.block_size] * len(event.block_hashes),
                    list(event.block_hashes),
                    event.parent_hash,
                    lora_name=event.lora_name,
                    cache_salt=event.cache_salt,
                )
            case KvRemoved():
                self._remove(event.block_hashes)
            case KvCleared():
                # The runtime's publisher has no such event.
                self._remove(tuple(self._stores))

    def shut_down(self) -> None:
        self._publisher.shutdown()

    def _remove(self, hashes: tuple[int, ...]) -> None:
        """Publish the removal of each block as often as it was stored: the runtime's publisher sends only the last."""
        stores = [(each, self._stores.pop(each, 1)) for each in hashes]
        for number in range(max((count for _, count in stores), default=0)):
            self._publisher.publish_removed([each for each, count in stores if count > number])
