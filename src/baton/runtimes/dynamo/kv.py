"""What an engine says of its blocks, in the words of the runtime's KV router."""

from dynamo import _core

from baton.protocol.events import KvCleared, KvEvent, KvRemoved, KvStored


class KvTeller:
    """Tells KV routers, through the runtime's publisher, which blocks one instance holds."""

    def __init__(self, endpoint: _core.Endpoint, block_size: int) -> None:
        # With an index of its own a worker can tell a frontend that has just started what it holds already.
        self._publisher = _core.KvEventPublisher(endpoint, kv_block_size=block_size, enable_local_indexer=True)
        self._told: set[int] = set()

    def tell(self, event: KvEvent) -> None:
        """See `Endpoint.tell`."""
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

    def close(self) -> None:
        """Stop telling."""
        self._publisher.shutdown()

    def _remove(self, hashes: tuple[int, ...]) -> None:
        self._told.difference_update(hashes)
        if hashes:
            self._publisher.publish_removed(list(hashes))
