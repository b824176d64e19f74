"""Shared-memory segments of other processes."""

import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from baton.engine_kit.file_reading import read_fully
from baton.errors import InvalidRequest

SHARED_MEMORY = Path("/dev/shm")


class Segment:
    """An open segment. Its owner may change or shorten it at any time, so its bytes are copied and never mapped."""

    def __init__(self, name: str, descriptor: int) -> None:
        self._name = name
        self._descriptor = descriptor
        self.nbytes = os.fstat(descriptor).st_size

    def read(self, offset: int, nbytes: int) -> bytearray:
        """Return a copy of `nbytes` bytes from `offset` on. Raises InvalidRequest if the segment has become shorter."""
        content = bytearray(nbytes)
        try:
            read_fully(self._descriptor, content, offset)
        except (EOFError, OSError) as error:
            raise InvalidRequest(f"segment: {self._name} cannot be read: {error}") from None
        return content


@contextmanager
def open_segment(name: str) -> Iterator[Segment]:
    """Open a segment for reading. The owner of the segment removes it. Raises InvalidRequest if it cannot be opened."""
    try:
        # Not `SharedMemory`, which would remove the segment when this process ends.
        descriptor = os.open(SHARED_MEMORY / name, os.O_RDONLY | os.O_NOFOLLOW)
    except (OSError, ValueError) as error:
        raise InvalidRequest(f"segment: {name} cannot be opened: {error}") from None
    try:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise InvalidRequest(f"segment: {name} is not a segment of shared memory")
        yield Segment(name, descriptor)
    finally:
        os.close(descriptor)
