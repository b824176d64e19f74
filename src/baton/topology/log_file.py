"""The log of one process: readable by its user only, bounded in size, and in one format."""

import logging
import os
import re
import sys
import threading
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import BinaryIO, Protocol

from baton.config.private_files import PRIVATE_DIRECTORY, open_private
from baton.process.json_lines import convert_to_json, message_in
from baton.process.log_format import convert, message_of

log = logging.getLogger(__name__)

READ_BYTES = 64 << 10
MAX_LINE_BYTES = 1 << 20
LOG_NAME = re.compile(r"(?P<host>[A-Za-z0-9._]+)-(?P<port>\d+)-(?P<process>.+)\.log")
"""What `log_name` returns. There is no hyphen in the host, because what follows would be taken for the port."""


def log_name(host: str, port: int, process: str) -> str:
    """Return the file name of the log of `process`. Instances with one port and different hosts have different logs."""
    return f"{log_prefix(host, port)}{process}.log"


def log_prefix(host: str, port: int) -> str:
    """Return what the names of all logs of one instance begin with."""
    return f"{re.sub('[^A-Za-z0-9.]', '_', host)}-{port}-"


def rotated_log(path: Path) -> Path:
    """Return where a log is moved when it is full: the lines before those in `path`."""
    return path.with_name(f"{path.name}.1")


class LogSink(Protocol):
    """Where the lines of a process go."""

    def write(self, lines: bytes) -> None:
        """Append `lines`. Raises OSError."""

    def close(self) -> None:
        """Close what `write` has opened. Idempotent."""


class LogFile:
    """A file of at most `max_bytes`; the lines before are in `rotated`. Only one thread writes at a time."""

    def __init__(self, path: Path, max_bytes: int) -> None:
        self._path = path
        self._max_bytes = max_bytes
        self._file: BinaryIO | None = None
        self.rotated = rotated_log(path)

    def begin(self) -> None:
        """Open the file; what is in it stays. Raises OSError, also for a link."""
        self.close()
        self._path.parent.mkdir(parents=True, exist_ok=True, mode=PRIVATE_DIRECTORY)
        self._file = open_private(self._path, os.O_APPEND)

    def write(self, lines: bytes) -> None:
        """See `LogSink.write`. A full file becomes `rotated`. Only a line that is longer than a file exceeds it."""
        while lines:
            if self._file is None:
                self.begin()
            fitting = self._fitting(lines)
            if not fitting:
                self._rotate()
                fitting = self._fitting(lines) or lines.find(b"\n") + 1 or len(lines)
            assert self._file is not None
            self._file.write(lines[:fitting])
            self._file.flush()
            lines = lines[fitting:]

    def _rotate(self) -> None:
        self.close()
        self._path.replace(self.rotated)
        self.begin()

    def _fitting(self, lines: bytes) -> int:
        """Return how many bytes of whole lines the file has room for."""
        assert self._file is not None
        room = self._max_bytes - self._file.tell()
        return len(lines) if len(lines) <= room else lines.rfind(b"\n", 0, max(0, room)) + 1

    def close(self) -> None:
        """Close the file. Idempotent."""
        file, self._file = self._file, None
        if file is not None:
            with suppress(OSError):  # what it has buffered, on a full disk
                file.close()


class StandardError:
    """The standard error of this process."""

    def write(self, lines: bytes) -> None:
        """See `LogSink.write`."""
        sys.stderr.buffer.write(lines)
        sys.stderr.buffer.flush()

    def close(self) -> None:
        """See `LogSink.close`: others write there too."""


class ProcessOutput:
    """Everything that one process writes, through a pipe into its log. A thread reads, so that no process waits.

    A log that cannot be written, as on a full disk, is no reason to stop serving: its lines are dropped and counted.
    """

    def __init__(self, name: str, file: LogSink, log_format: str = "text") -> None:
        self._name = name
        self._file = file
        self._is_json = log_format == "json"
        self._thread: threading.Thread | None = None
        self._dropped = 0
        self._last = b""
        self._lock = threading.Lock()

    def open(self) -> int:
        """Return a descriptor for a process to write to; the caller closes its own copy. Raises OSError."""
        reading, writing = os.pipe()
        self._thread = threading.Thread(target=self._copy, args=(reading,), name=f"log-{self._name}", daemon=True)
        self._thread.start()
        return writing

    def join(self, timeout_s: float) -> None:
        """Wait until what an exited process has written is in the log. Blocks."""
        if self._thread is not None:
            self._thread.join(timeout_s)

    def close(self) -> None:
        """Close the log, after the process has exited. Idempotent."""
        with self._lock:
            self._file.close()

    def last_line(self) -> str:
        """Return the last line without its time, level and logger; "" if there is none."""
        return message_in(self._last) if self._is_json else message_of(self._last)

    def _copy(self, reading: int) -> None:
        rest = b""
        try:
            while data := os.read(reading, READ_BYTES):
                lines, newline, rest = (rest + data).rpartition(b"\n")
                if len(rest) > MAX_LINE_BYTES:
                    lines, newline, rest = lines + newline + rest, b"\n", b""
                if newline:
                    self._write(lines + newline)
            if rest:
                self._write(rest + b"\n")
        finally:
            os.close(reading)

    def _write(self, lines: bytes) -> None:
        converted = self._convert(lines)
        if not converted:
            return
        with self._lock:  # the threads of a process and of its successor may overlap
            self._last = converted[converted.rfind(b"\n", 0, -1) + 1 :]
            try:
                self._file.write(self._about_dropped() + converted)
            except OSError as error:
                if not self._dropped:
                    log.error("cannot write the log of %s (%s); its lines are dropped", self._name, error.strerror)
                self._dropped += converted.count(b"\n")
            else:
                self._dropped = 0

    def _about_dropped(self) -> bytes:
        if not self._dropped:
            return b""
        return self._convert(b"%d lines could not be written here\n" % self._dropped)

    def _convert(self, lines: bytes) -> bytes:
        now = datetime.now(UTC)
        return convert_to_json(lines, now, self._name) if self._is_json else convert(lines, now)
