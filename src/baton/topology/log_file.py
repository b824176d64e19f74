"""The log of one process: readable by its user only, bounded in size, and read from its end."""

import os
import re
import shutil
from pathlib import Path
from typing import BinaryIO

from baton.config.private_files import PRIVATE_DIRECTORY, open_private

TAIL_BYTES = 4000


def log_name(host: str, port: int, process: str) -> str:
    """Return the file name of the log of `process`. Instances with one port and different hosts have different logs."""
    return f"{re.sub('[^A-Za-z0-9.-]', '_', host)}-{port}-{process}.log"


class LogFile:
    """A file that a process appends to through its standard output and error.

    The process keeps the file open, so a file that is too long is copied to `previous` and emptied. What is written
    between the two is lost.
    """

    def __init__(self, path: Path, max_bytes: int) -> None:
        self._path = path
        self._max_bytes = max_bytes
        self.previous = path.with_name(f"{path.name}.1")

    def begin(self) -> None:
        """Begin an empty file; the log of the last run becomes `previous`. Raises OSError."""
        if self._path.exists():
            self._path.replace(self.previous)
        self.open().close()

    def open(self) -> BinaryIO:
        """Open the file for a process to append to. Raises OSError, also for a file of another user or a link."""
        self._path.parent.mkdir(parents=True, exist_ok=True, mode=PRIVATE_DIRECTORY)
        return open_private(self._path, os.O_APPEND)

    def rotate(self) -> None:
        """Empty a file that is too long, after copying it to `previous`. Blocks. Raises OSError."""
        if not self._path.exists() or self._path.stat().st_size <= self._max_bytes:
            return
        with self._path.open("rb") as source, open_private(self.previous, os.O_TRUNC) as target:
            shutil.copyfileobj(source, target)
            os.truncate(self._path, 0)

    def last_line(self) -> str:
        """Return the last line, "" if there is none."""
        try:
            with self._path.open("rb") as file:
                file.seek(max(0, file.seek(0, os.SEEK_END) - TAIL_BYTES))
                lines = file.read(TAIL_BYTES).decode(errors="replace").strip().splitlines()
        except OSError:
            return ""
        return lines[-1] if lines else ""
