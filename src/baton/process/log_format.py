"""One format for every line in the logs of `baton serve`: time, level, logger, message. `json_lines.py` has the other.

Python processes write it themselves (`process/logs.py`). The Rust runtime writes JSON, because it has trace ids only
with structured logs, and libraries write what they like: their lines are converted here.
"""

import json
import re
from collections.abc import Iterator
from datetime import datetime
from typing import cast

_PREFIX = re.compile(rb"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d,\d{3} [A-Z]+ \S+ ")
_FOREIGN = re.compile(rb"^(?!\d{4}-\d\d-\d\d \d\d:\d\d:\d\d,\d{3} )", re.MULTILINE)
# The runtime prints the error of a request that a worker has refused.
_REQUEST_ERROR = re.compile(r"(dynamo\._core)\.(\w+: .*)")
_TO_QUOTE = re.compile(r'[\s"]')
LEVELS = {"WARN": "WARNING", "TRACE": "DEBUG"}
_NOT_SHOWN = ("time", "level", "target", "message", "file", "line")

Fields = dict[str, object]


def convert(lines: bytes, now: datetime) -> bytes:
    """Return complete `lines` in the one format; `now` is the time of those that have none."""
    if not _FOREIGN.search(lines, 0, len(lines) - 1):
        return lines
    return b"".join(line if _PREFIX.match(line) else _converted(line, now) for line in lines.splitlines(keepends=True))


def message_of(line: bytes) -> str:
    """Return a line of the one format without time, level and logger."""
    return _PREFIX.sub(b"", line, count=1).decode(errors="replace").strip()


def _converted(line: bytes, now: datetime) -> bytes:
    text = line.decode(errors="replace").rstrip()
    if not text:
        return b""
    fields = runtime_fields(text)
    if fields is None:
        logger, message = request_error(text)
        return _formatted(now, "INFO", logger, message)
    level = str(fields["level"])
    message = " ".join([str(fields.get("message", "")), *_shown(fields)]).strip()
    return _formatted(time_of(fields, now), LEVELS.get(level, level), str(fields["target"]), message)


def request_error(text: str) -> tuple[str, str]:
    """Return the logger and the message of a line without a level."""
    error = _REQUEST_ERROR.match(text)
    return (error[1], error[2]) if error is not None else ("output", text)


def _formatted(time: datetime, level: str, logger: str, message: str) -> bytes:
    local = time.astimezone()
    line = f"{local:%Y-%m-%d %H:%M:%S},{local.microsecond // 1000:03d} {level} {logger} {message}\n"
    return line.encode(errors="backslashreplace")


def runtime_fields(text: str) -> Fields | None:
    """Return the fields of a line of the runtime, None for any other line."""
    if not text.startswith("{"):
        return None
    try:
        fields = json.loads(text)
    except (ValueError, RecursionError):
        return None
    return cast(Fields, fields) if isinstance(fields, dict) and {"level", "target"} <= fields.keys() else None


def time_of(fields: Fields, now: datetime) -> datetime:
    try:
        return datetime.fromisoformat(str(fields["time"])).astimezone()
    except (KeyError, ValueError, OverflowError):
        return now


def _shown(fields: Fields) -> Iterator[str]:
    for name, value in fields.items():
        if name not in _NOT_SHOWN:
            text = value if isinstance(value, str) else json.dumps(value)
            yield f"{name}={json.dumps(text) if _TO_QUOTE.search(text) else text}"
