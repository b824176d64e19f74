"""The log of the runtime in this process, read for the reasons of failed requests.

The frontend answers most failures with a fixed text and writes the reason to its log only. Standard error of this
process becomes a pipe whose lines are passed on, except those with reasons that nobody has asked to see. They are
written before the answer is sent, so the reason of an answer that has arrived is in the pipe. What the runtime writes
in the last moment before a crash can be lost.
"""

import asyncio
import contextlib
import fcntl
import json
import os
import re
import sys
from typing import TextIO

INTERVAL_S = 0.02
PIPE_BYTES = 1 << 20
MAX_REASONS = 1024
STDERR = 2
_TARGETS = tuple(f"dynamo_llm::http::service::{name}" for name in ("openai", "anthropic", "disconnect"))
_MARKS = (b'"diagnostic":"Some(', b"backend asserted status", b"Internal server error: ")
_LEVELS = ("TRACE", "DEBUG", "INFO", "WARN", "ERROR", "OFF")
_ASSERTED = re.compile(r"(?:backend asserted status \d+|Internal server error): (?!backend asserted)(.*)", re.DOTALL)
# Of an error that a prefill worker gave before its decode worker did.
_PREFILL = re.compile(r"Prefill execution failed: Prefill router returned error in output stream: \w+: ")
_ESCAPE = re.compile(r"\\u\{([0-9a-f]+)\}|\\(.)")
_SHORT = {"n": "\n", "r": "\r", "t": "\t", "0": "\0"}


def reason_filter(log: str) -> str:
    """Return the log filter `log` of the runtime with those levels that reasons need."""
    return ",".join([log, *(f"{target}=debug" for target in _TARGETS)])


def _hidden_lines(log: str) -> re.Pattern[bytes]:
    """Return a pattern of the lines that `reason_filter` adds to those that the filter `log` asks for."""
    bare = next((part.strip().upper() for part in log.split(",") if "=" not in part), "ERROR")
    hidden = _LEVELS[: _LEVELS.index(bare)] if bare in _LEVELS else ("DEBUG",)
    return re.compile(f'"level":"({"|".join(hidden) or "-"})".*"target":"({"|".join(_TARGETS)})"'.encode())


class FrontendLog:
    """Reads the log from `open` to `close`, in the event loop. `log` is the filter that the user has set."""

    def __init__(self, log: str) -> None:
        self._hidden = _hidden_lines(log)
        self._reader = -1
        self._stderr: TextIO | None = None
        self._own_stderr: TextIO | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._rest = b""
        self._reasons: dict[str, str] = {}

    def open(self) -> None:
        """Take over standard error. Python's own output goes to it directly, and never waits for the pipe."""
        self._stderr = sys.stderr
        self._own_stderr = os.fdopen(os.dup(STDERR), "w", buffering=1, errors="backslashreplace")
        sys.stderr = self._own_stderr
        self._reader, writer = os.pipe()
        os.set_blocking(self._reader, False)
        with contextlib.suppress(OSError):
            fcntl.fcntl(writer, fcntl.F_SETPIPE_SZ, PIPE_BYTES)
        os.dup2(writer, STDERR)
        os.close(writer)
        self._read_again()

    def close(self) -> None:
        """Give standard error back. Idempotent, and valid before `open`."""
        if self._own_stderr is None or self._stderr is None:
            return
        if self._timer is not None:
            self._timer.cancel()
        os.dup2(self._own_stderr.fileno(), STDERR)
        self._read()
        if self._rest:
            self._pass_on([self._rest])
        os.close(self._reader)
        sys.stderr, self._stderr = self._stderr, None

    def take_reason(self, request_id: str) -> str | None:
        """Return why the request with this `x-request-id` has failed, None if that is not known. Forgets it."""
        self._read()
        return self._reasons.pop(request_id, None)

    def _read_again(self) -> None:
        self._read()
        self._timer = asyncio.get_running_loop().call_later(INTERVAL_S, self._read_again)

    def _read(self) -> None:
        while self._stderr is not None:
            try:
                data = os.read(self._reader, PIPE_BYTES)
            except BlockingIOError:
                return
            if not data:
                return
            *lines, self._rest = (self._rest + data).split(b"\n")
            self._pass_on(lines)

    def _pass_on(self, lines: list[bytes]) -> None:
        shown = []
        for line in lines:
            if any(mark in line for mark in _MARKS):
                self._note(line)
            if not self._hidden.search(line):
                shown.append(line)
        if shown and self._own_stderr is not None:
            data = b"\n".join(shown) + b"\n"
            with contextlib.suppress(OSError):
                os.write(self._own_stderr.fileno(), data)

    def _note(self, line: bytes) -> None:
        with contextlib.suppress(ValueError):
            entry = json.loads(line)
            request_id = entry.get("x_request_id")
            if isinstance(request_id, str) and (reason := _reason(entry)):
                self._reasons[request_id] = reason
                if len(self._reasons) > MAX_REASONS:
                    del self._reasons[next(iter(self._reasons))]


def _reason(entry: dict[str, object]) -> str | None:
    if (diagnostic := entry.get("diagnostic")) is not None:
        text = _unescape(str(diagnostic).removeprefix('Some("').removesuffix('")'))
        return _message_in(text)
    asserted = _ASSERTED.search(str(entry.get("message", "")))
    return asserted[1] if asserted is not None else None


def _message_in(text: str) -> str:
    """Return the message of an error that the worker gave with a status, and other texts unchanged."""
    text = _PREFILL.sub("", text, count=1)
    if text.startswith("{"):
        with contextlib.suppress(ValueError):
            content = json.loads(text)
            return str(content.get("message", text)) if isinstance(content, dict) else text
    return text


def _unescape(text: str) -> str:
    """Return a string that Rust has formatted for debugging."""
    return _ESCAPE.sub(lambda found: chr(int(found[1], 16)) if found[1] else _SHORT.get(found[2], found[2]), text)
