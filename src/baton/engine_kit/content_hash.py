"""The content hash of encoded media: the name of rows, equal on every worker."""

import hashlib

HASH_BYTES = 16


def rows_hash(model: str, data: bytes, *options: str) -> str:
    """Return the name of the rows that the encoder `model` makes of `data`, with these options.

    `model` is `EmbeddingShape.model`. The name has 32 hexadecimal characters.
    """
    digest = hashlib.blake2b(digest_size=HASH_BYTES, person=b"rows")
    for text in (model, *options):
        encoded = text.encode()
        digest.update(len(encoded).to_bytes(8, "little") + encoded)
    digest.update(b"\xff" * 8)  # no option is that long: the file begins here
    digest.update(data)
    return digest.hexdigest()
