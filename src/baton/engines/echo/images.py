"""Images in the echo engine: rows that say the size of the image and a digest of its pixels, and how they are echoed.

A prompt has `<|image|>` for an image. It becomes `[`, one `<|image_row|>` for each row, and `]`; the echo of a row is
what the row says. So a row that is missing, or is another image's, shows in the answer.
"""

import hashlib
from array import array
from collections.abc import Iterable

from baton.engine_kit.content_hash import rows_hash
from baton.errors import InvalidRequest
from baton.ports.engine import EncodedRows, MediaInfo, Placeholder, Work
from baton.ports.transfer import EmbeddingShape
from baton.protocol.media import EncodedItem, MediaEmbedding, MediaFile

PLACEHOLDER, PLACEHOLDER_TEXT = 258, "<|image|>"
ROW = 259
ROW_SIZE = 4
SHAPE = EmbeddingShape(model="echo-images-1", dtype="float32", size=ROW_SIZE)
MEDIA = MediaInfo(
    shape=SHAPE,
    placeholders={
        "image": Placeholder(token=PLACEHOLDER, text=PLACEHOLDER_TEXT, as_text=tuple(PLACEHOLDER_TEXT.encode()))
    },
)
_IS_ROW = 1 << 40


def encode_image(file: MediaFile) -> EncodedRows:
    """Return the rows of an image. Raises InvalidRequest. Slow: call it off the event loop."""
    from baton.media.images import decode_image

    image = decode_image(file)
    digest = hashlib.blake2b(image.tobytes(), digest_size=4).hexdigest()
    says = f"{image.width}x{image.height} {digest}".encode()
    rows = -(-len(says) // ROW_SIZE)
    item = EncodedItem(
        modality="image",
        content_hash=rows_hash(SHAPE.model, file.data, file.modality),
        expansion=((ord("["), 1), (ROW, rows), (ord("]"), 1)),
        embed_token=ROW,
        rows=rows,
    )
    numbers = array("f", list(says.ljust(rows * ROW_SIZE, b"\0")))
    return EncodedRows(item=item, dtype=SHAPE.dtype, size=ROW_SIZE, data=memoryview(numbers))


def kv_numbers(work: Work) -> list[int]:
    """Return the number of every token of the prompt: the token, or what the row says. Raises InvalidRequest."""
    numbers = list(work.token_ids)
    for item in _embeddings(work):
        if item.data is None:
            continue  # in the KV of another worker
        said = array("f", item.data.tobytes())
        rows = (said[start : start + ROW_SIZE] for start in range(0, len(said), ROW_SIZE))
        for index, row in zip(_row_indexes(work, item), rows, strict=True):
            numbers[index] = _IS_ROW | int.from_bytes(bytes(int(number) & 0xFF for number in row), "little")
    return numbers


def hashed_tokens(work: Work) -> tuple[int, ...]:
    """Return the prompt as its blocks are hashed: a row counts as its image, so that no two images share a block."""
    if not work.media:
        return work.token_ids
    tokens = list(work.token_ids)
    for item in _embeddings(work):
        for index in _row_indexes(work, item):
            tokens[index] = int(item.item.content_hash[:8], 16)
    return tuple(tokens)


def echo_of(numbers: Iterable[int]) -> tuple[int, ...]:
    """Return the tokens that say `numbers`."""
    tokens: list[int] = []
    for number in numbers:
        if number & _IS_ROW:
            tokens += (byte for byte in (number & 0xFFFFFFFF).to_bytes(ROW_SIZE, "little") if byte)
        else:
            tokens.append(number)
    return tuple(tokens)


def _embeddings(work: Work) -> list[MediaEmbedding]:
    found = [item for item in work.media if isinstance(item, MediaEmbedding)]
    if len(found) < len(work.media):
        raise InvalidRequest("media: the echo engine takes embeddings only")
    return found


def _row_indexes(work: Work, item: MediaEmbedding) -> list[int]:
    end = item.position + item.item.prompt_tokens
    return [index for index in range(item.position, end) if work.token_ids[index] == item.item.embed_token]
