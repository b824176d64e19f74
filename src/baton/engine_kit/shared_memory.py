"""Segments of shared memory that belong to others."""

import mmap
import os
import stat
from pathlib import Path

from baton.errors import InvalidRequest

SHARED_MEMORY = Path("/dev/shm")


def map_segment(name: str) -> mmap.mmap:
    """Return the segment for reading; it goes when the last view of it does. Its owner keeps it, and removes it.

    Raises InvalidRequest if it cannot be opened.
    """
    try:
        # Not `SharedMemory`, which would have the segment removed when this process ends.
        descriptor = os.open(SHARED_MEMORY / name, os.O_RDONLY | os.O_NOFOLLOW)
        try:
            if not stat.S_ISREG(os.fstat(descriptor).st_mode):
                raise InvalidRequest(f"segment: {name} is not a segment of shared memory")
            return mmap.mmap(descriptor, 0, access=mmap.ACCESS_COPY)
        finally:
            os.close(descriptor)
    except (OSError, ValueError) as error:
        raise InvalidRequest(f"segment: {name} cannot be opened: {error}") from None
