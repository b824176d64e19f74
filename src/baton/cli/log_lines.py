"""Lines of log files: the last of several in the order of time, and those that are added while we watch."""

import os
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, suppress
from heapq import merge
from pathlib import Path
from typing import BinaryIO, NamedTuple, TextIO

from baton.topology.log_file import rotated_log

POLL_INTERVAL_S = 0.1
TIME_LENGTH = len("2026-01-31 10:00:00,123")
JSON_BEGIN = '{"time":"'
"""What is before the time in a line of JSON. In other lines the time is at the beginning."""


class Line(NamedTuple):
    """A line of a log, without its end. Lines sort by time, and those without a time stay behind their predecessor."""

    time: str
    source: str
    text: str


def last_lines(logs: Mapping[str, Path], number: int) -> list[Line]:
    """Return the last `number` lines of `logs`, by the names of their processes, in the order of time."""
    tails = [_last(source, path, number) for source, path in logs.items()]
    return list(deque(merge(*tails, key=lambda line: line.time), maxlen=number))


class Follower:
    """Reads what is added to log files, also when a file is moved away and a new one begins, or one appears."""

    def __init__(self, logs: Mapping[str, Path]) -> None:
        self._files = {source: _Tail(source, path, at_end=True) for source, path in logs.items()}

    def update(self, logs: Mapping[str, Path]) -> None:
        """Follow new logs too, from their beginning."""
        for source, path in logs.items():
            if source not in self._files:
                self._files[source] = _Tail(source, path, at_end=False)

    def poll(self) -> list[Line]:
        """Return what has been added since the last call, in the order of time, after waiting for a moment."""
        time.sleep(POLL_INTERVAL_S)
        return sorted((line for tail in self._files.values() for line in tail.read()), key=lambda line: line.time)


class _Tail:
    def __init__(self, source: str, path: Path, at_end: bool) -> None:
        self._source = source
        self._path = path
        self._rest = b""
        self._file = self._open()
        if at_end and self._file is not None:
            self._file.seek(0, os.SEEK_END)

    def read(self) -> Sequence[Line]:
        """Return the complete lines that have been added."""
        self._file = self._file or self._open()
        data = self._file.read() if self._file is not None else b""
        if self._file is not None and self._is_moved():
            data += self._file.read()  # what was written between the read and the move
            self._file.close()
            self._file = self._open()
            data += self._file.read() if self._file is not None else b""
        complete, newline, self._rest = (self._rest + data).rpartition(b"\n")
        return list(_parsed(self._source, (complete + newline).decode(errors="replace").splitlines()))

    def _open(self) -> BinaryIO | None:
        with suppress(OSError):
            return self._path.open("rb")
        return None

    def _is_moved(self) -> bool:
        assert self._file is not None
        with suppress(OSError):
            now = self._path.stat()
            return now.st_ino != os.fstat(self._file.fileno()).st_ino
        return False


def _last(source: str, path: Path, number: int) -> deque[Line]:
    """Return the last lines of a log, also those from before its rotation if there are too few since."""
    with ExitStack() as opened:
        # The newer file first: one that is moved in between is found twice, and no line is missed.
        files = [opened.enter_context(file) for each in (path, rotated_log(path)) for file in _opened(each)]
        if len(files) > 1 and os.path.sameopenfile(files[0].fileno(), files[1].fileno()):
            del files[1]
        last = deque(_parsed(source, _texts(files[:1])), maxlen=number)
        return last if len(last) == number else deque(_parsed(source, _texts(files[::-1])), maxlen=number)


def _opened(path: Path) -> list[TextIO]:
    with suppress(OSError):
        return [path.open(errors="replace")]
    return []


def _texts(files: list[TextIO]) -> Iterator[str]:
    for file in files:
        file.seek(0)
        yield from (line.rstrip("\n") for line in file)


def _parsed(source: str, lines: Iterator[str] | Sequence[str]) -> Iterator[Line]:
    last = ""
    for text in lines:
        begin = len(JSON_BEGIN) if text.startswith(JSON_BEGIN) else 0
        head = text[begin : begin + TIME_LENGTH]
        last = head if head[:4].isdigit() else last
        yield Line(last, source, text)
