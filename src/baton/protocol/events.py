"""What an engine publishes while it runs: its load, and the KV blocks in its prefix cache."""

import msgspec


class LoadSnapshot(msgspec.Struct, frozen=True, gc=False, tag="load"):
    """The load of one data-parallel rank, in blocks and requests."""

    running: int
    waiting: int
    used_blocks: int
    total_blocks: int
    dp_rank: int = 0


class RoutedRows(msgspec.Struct, frozen=True, gc=False):
    """Tokens [start, stop) that are rows of media, which a router knows by this hash, a hexadecimal number."""

    start: int
    stop: int
    routing_hash: str


class KvStored(msgspec.Struct, frozen=True, tag="stored"):
    """Blocks that were added to the prefix cache. Hashes are content hashes, equal on every worker.

    `media` are the rows of media among `token_ids` that a router can tell apart.
    """

    block_hashes: tuple[int, ...]
    token_ids: tuple[int, ...]
    block_size: int
    parent_hash: int | None = None
    dp_rank: int = 0
    lora_name: str | None = None
    cache_salt: str | None = None
    media: tuple[RoutedRows, ...] = ()


class KvRemoved(msgspec.Struct, frozen=True, tag="removed"):
    """Blocks that were removed from the prefix cache."""

    block_hashes: tuple[int, ...]
    dp_rank: int = 0


class KvCleared(msgspec.Struct, frozen=True, tag="cleared"):
    """The prefix cache of this rank is empty."""

    dp_rank: int = 0


KvEvent = KvStored | KvRemoved | KvCleared
Reading = LoadSnapshot | KvStored | KvRemoved | KvCleared
