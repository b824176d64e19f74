"""Shared-memory segments of other processes."""

import mmap
import os
import stat
from pathlib import Path

from baton.errors import InvalidRequest

SHARED_MEMORY = Path("/dev/shm")


def map_segment(name: str) -> mmap.mmap:
    """Map a segment for reading; it is unmapped with its last view. The owner of the segment removes it.

    Raises InvalidRequest if it cannot be opened.
    """
    try:
        # Not `SharedMemory`, which would remove the segment when this process ends.
        descriptor = os.open(SHARED_MEMORY / name, os.O_RDONLY | os.O_NOFOLLOW)
        try:
            if not stat.S_ISREG(os.fstat(descriptor).st_mode):
                raise InvalidRequest(f"segment: {name} is not a segment of shared memory")
            return mmap.mmap(descriptor, 0, access=mmap.ACCESS_COPY)
        finally:
            os.close(descriptor)
    except (OSError, ValueError) as error:
        raise InvalidRequest(f"segment: {name} cannot be opened: {error}") from None
