"""Hashes of KV blocks: of a block's tokens and of everything before them, equal on every worker.

A block is found by its whole hash and by nothing else, so the hash is long enough that nobody can find two prompts with
the same one, and salts are hashed apart from blocks, so that no salt can be chosen that stands for a block. KV events
carry 64 bits of it: two blocks that are equal there mislead a router, and share no KV.
"""

import hashlib
from array import array
from collections.abc import Sequence

HASH_BYTES = 32
_EVENT_BYTES = 8


def root_hash(salt: str | None) -> bytes:
    """Return the parent of the first block: empty, or the hash of the cache salt that separates tenants."""
    if not salt:
        return b""
    return hashlib.blake2b(salt.encode(), digest_size=HASH_BYTES, person=b"salt").digest()


def block_hash(parent: bytes, token_ids: Sequence[int]) -> bytes:
    """Return the hash of a full block after the block `parent`."""
    content = parent + array("I", token_ids).tobytes()
    return hashlib.blake2b(content, digest_size=HASH_BYTES, person=b"block").digest()


def block_hashes(token_ids: Sequence[int], size: int, salt: str | None = None) -> list[bytes]:
    """Return the hashes of the full blocks of `token_ids`."""
    hashes: list[bytes] = []
    parent = root_hash(salt)
    for start in range(0, len(token_ids) - size + 1, size):
        parent = block_hash(parent, token_ids[start : start + size])
        hashes.append(parent)
    return hashes


def event_hash(name: bytes) -> int:
    """Return a block hash in the form in which KV events carry it: a signed 64-bit number."""
    return int.from_bytes(name[:_EVENT_BYTES], "little", signed=True)


def signed_hash(name: int) -> int:
    """Return an engine's own block hash as a signed 64-bit number, the form in which KV events carry it."""
    return (name + 2**63) % 2**64 - 2**63
