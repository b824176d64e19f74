"""Counts in the boxes of an MP4 or QuickTime file, checked before FFmpeg reads it. Pure.

FFmpeg allocates an index entry for each sample that a header names. With samples of a constant size the header has no
table that would have to be as long, so a few bytes can ask for gigabytes.
"""

from collections.abc import Iterator

MAX_TOP_LEVEL_BOXES = 100_000
# From the type of a box to its number of samples, and to their constant size if it has one.
_COUNTS = {b"stsz": (12, 8), b"stz2": (12, None), b"trun": (8, None)}


def damage(data: bytes) -> str | None:
    """Return why the file must not be read, or None."""
    for number, (kind, box) in enumerate(_top_level(data)):
        if number >= MAX_TOP_LEVEL_BOXES:
            return f"it has more than {MAX_TOP_LEVEL_BOXES} boxes"
        if kind == b"mdat":
            continue
        if b"cmov" in box:
            return "compressed headers are not supported"
        if any(_samples(box, tag) > len(data) for tag in _COUNTS):
            return "its header names more samples than the file has room for"
    return None


def _top_level(data: bytes) -> Iterator[tuple[bytes, bytes]]:
    start = 0
    while start + 8 <= len(data):
        size = int.from_bytes(data[start : start + 4], "big")
        kind = data[start + 4 : start + 8]
        if size == 1:
            size = int.from_bytes(data[start + 8 : start + 16], "big")
        end = start + size if size >= 8 else len(data)
        yield kind, b"" if kind == b"mdat" else data[start:end]
        start = end


def _samples(box: bytes, tag: bytes) -> int:
    """Return how many bytes, at one or the constant size for each, the samples of all boxes `tag` inside `box` take."""
    count_at, size_at = _COUNTS[tag]
    total = 0
    at = box.find(tag)
    while at >= 0:
        size = int.from_bytes(box[at + size_at : at + size_at + 4], "big") if size_at is not None else 1
        total += int.from_bytes(box[at + count_at : at + count_at + 4], "big") * max(size, 1)
        at = box.find(tag, at + 4)
    return total
