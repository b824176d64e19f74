"""Reads ranges of files into memory of this process. A mapped file that another process shortens ends the reader by
SIGBUS; a read returns fewer bytes."""

import os


def read_fully(descriptor: int, buffer: bytearray | memoryview, offset: int) -> None:
    """Fill `buffer` with the bytes of the file from `offset` on. Raises EOFError if it ends before, and OSError."""
    view = memoryview(buffer).cast("B")
    while view:
        count = os.preadv(descriptor, [view], offset)
        if not count:
            raise EOFError(f"the file ends at byte {offset}, {len(view)} bytes too early")
        view, offset = view[count:], offset + count
