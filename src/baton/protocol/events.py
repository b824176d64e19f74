"""What an engine tells about itself while it runs: load, and which KV blocks it holds."""

import msgspec


class LoadSnapshot(msgspec.Struct, frozen=True, gc=False, tag="load"):
    """How busy one data-parallel rank is, in blocks and requests."""

    running: int
    waiting: int
    used_blocks: int
    total_blocks: int
    dp_rank: int = 0


class KvStored(msgspec.Struct, frozen=True, tag="stored"):
    """Blocks that can now be reused. Hashes are content hashes, equal on every worker for equal content."""

    block_hashes: tuple[int, ...]
    token_ids: tuple[int, ...]
    block_size: int
    parent_hash: int | None = None
    dp_rank: int = 0
    lora_name: str | None = None
    cache_salt: str | None = None


class KvRemoved(msgspec.Struct, frozen=True, tag="removed"):
    """Blocks that can no longer be reused."""

    block_hashes: tuple[int, ...]
    dp_rank: int = 0


class KvCleared(msgspec.Struct, frozen=True, tag="cleared"):
    """Every block of this rank is gone."""

    dp_rank: int = 0


KvEvent = KvStored | KvRemoved | KvCleared
Reading = LoadSnapshot | KvStored | KvRemoved | KvCleared
