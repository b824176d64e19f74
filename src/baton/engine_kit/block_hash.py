"""Hashes of KV blocks: of a block's tokens and of everything before them, equal on every worker.

A block is found by its whole hash and by nothing else, so the hash is long enough that nobody can find two prompts with
the same one, and salts are hashed apart from blocks, so that no salt can be chosen that stands for a block. KV events
carry 64 bits of it: two blocks that are equal there mislead a router, and share no KV.
"""

import hashlib
import struct
from array import array
from collections.abc import Sequence
from typing import NamedTuple

HASH_BYTES = 32
_EVENT_BYTES = 8


class MediaSpan(NamedTuple):
    """Tokens [start, stop) of a prompt that are the expansion of an encoded item with this content hash."""

    start: int
    stop: int
    content_hash: str


def root_hash(salt: str | None, variant: str = "") -> bytes:
    """Return the parent of the first block: empty, or a hash of what separates blocks of equal tokens.

    That is the cache salt of a tenant, and the `variant` of the computation.
    """
    root = hashlib.blake2b(salt.encode(), digest_size=HASH_BYTES, person=b"salt").digest() if salt else b""
    if not variant:
        return root
    return hashlib.blake2b(root + variant.encode(), digest_size=HASH_BYTES, person=b"variant").digest()


def block_hash(parent: bytes, token_ids: Sequence[int], media: Sequence[tuple[int, str]] = ()) -> bytes:
    """Return the hash of a full block after the block `parent`.

    `media` are the items that the block overlaps: the offset of each one's first token in the block, which is negative
    if it began before it, and its content hash.
    """
    content = parent + array("I", token_ids).tobytes()
    if not media:
        return hashlib.blake2b(content, digest_size=HASH_BYTES, person=b"block").digest()
    for offset, content_hash in media:
        name = content_hash.encode()
        content += struct.pack("<qI", offset, len(name)) + name
    return hashlib.blake2b(content, digest_size=HASH_BYTES, person=b"media block").digest()


def media_in(spans: Sequence[MediaSpan], start: int, stop: int) -> list[tuple[int, str]]:
    """Return the offset and the content hash of each item that the block [start, stop) overlaps."""
    return [(span.start - start, span.content_hash) for span in spans if span.start < stop and span.stop > start]


def block_hashes(
    token_ids: Sequence[int], size: int, salt: str | None = None, media: Sequence[MediaSpan] = ()
) -> list[bytes]:
    """Return the hashes of the full blocks of `token_ids`."""
    hashes: list[bytes] = []
    parent = root_hash(salt)
    for start in range(0, len(token_ids) - size + 1, size):
        parent = block_hash(parent, token_ids[start : start + size], media_in(media, start, start + size))
        hashes.append(parent)
    return hashes


def event_hash(name: bytes) -> int:
    """Return a block hash in the form in which KV events carry it: a signed 64-bit number."""
    return int.from_bytes(name[:_EVENT_BYTES], "little", signed=True)


def signed_hash(name: int) -> int:
    """Return an engine's own block hash as a signed 64-bit number, the form in which KV events carry it."""
    return (name + 2**63) % 2**64 - 2**63
