"""Names of KV blocks: the hash of a block's tokens and of everything before them, equal on every worker."""

import hashlib
from array import array
from collections.abc import Sequence


def root_hash(salt: str | None) -> int | None:
    """Return what stands before the first block: nothing, or the cache salt that keeps tenants apart."""
    if not salt:
        return None
    return _signed(hashlib.blake2b(salt.encode(), digest_size=8).digest())


def block_hash(parent: int | None, token_ids: Sequence[int]) -> int:
    """Return the name of a full block after the one named `parent`, as a signed 64-bit number."""
    before = b"" if parent is None else parent.to_bytes(8, "little", signed=True)
    return _signed(hashlib.blake2b(before + array("I", token_ids).tobytes(), digest_size=8).digest())


def block_hashes(token_ids: Sequence[int], size: int, salt: str | None = None) -> list[int]:
    """Return the names of the full blocks of `token_ids`."""
    hashes: list[int] = []
    parent = root_hash(salt)
    for start in range(0, len(token_ids) - size + 1, size):
        parent = block_hash(parent, token_ids[start : start + size])
        hashes.append(parent)
    return hashes


def signed_hash(name: int) -> int:
    """Return an engine's own block hash as a signed 64-bit number, the form in which KV events carry it."""
    return (name + 2**63) % 2**64 - 2**63


def _signed(digest: bytes) -> int:
    return int.from_bytes(digest, "little", signed=True)
