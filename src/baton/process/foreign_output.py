"""Standard error of a process that runs by itself, as JSON: what the runtime and libraries write there is converted."""

import atexit
import os
import sys
import threading
from collections.abc import Callable
from contextlib import suppress

STDERR = 2
READ_BYTES = 64 << 10
MAX_LINE_BYTES = 1 << 20
JOIN_TIMEOUT_S = 1.0


def convert_standard_error(convert: Callable[[bytes], bytes]) -> None:
    """Pass what this process and those that it starts write to standard error through `convert`, whole lines at a time.

    Python's own `sys.stderr` is written directly. What is in the pipe when a process is killed is lost.
    """
    own = os.dup(STDERR)
    sys.stderr = os.fdopen(own, "w", buffering=1, errors="backslashreplace", closefd=False)
    reading, writing = os.pipe()
    os.dup2(writing, STDERR)
    os.close(writing)
    thread = threading.Thread(target=_copy, args=(reading, own, convert), name="baton-stderr", daemon=True)
    thread.start()
    atexit.register(_restore, own, thread)


def _restore(own: int, thread: threading.Thread) -> None:
    """Close the pipe, and wait a moment for what is in it; a process that was left behind may keep it open."""
    os.dup2(own, STDERR)
    thread.join(JOIN_TIMEOUT_S)


def _copy(reading: int, own: int, convert: Callable[[bytes], bytes]) -> None:
    rest = b""
    while data := os.read(reading, READ_BYTES):
        lines, newline, rest = (rest + data).rpartition(b"\n")
        if len(rest) > MAX_LINE_BYTES:
            lines, newline, rest = lines + newline + rest, b"\n", b""
        if newline:
            _write(own, convert(lines + newline))
    if rest:
        _write(own, convert(rest + b"\n"))


def _write(own: int, lines: bytes) -> None:
    with suppress(OSError):  # a full disk is no reason to stop serving
        while lines:
            lines = lines[os.write(own, lines) :]
