"""Logs as JSON: one object per line with time, level, logger, message and process, and the ids of a request."""

import logging
import re
from collections.abc import Mapping
from datetime import UTC, datetime

import msgspec

from baton.process.log_format import LEVELS, request_error, runtime_fields, time_of
from baton.request.log_ids import CURRENT

OURS = re.compile(rb'\{"time":"[^"]+","level":"[A-Z]+","logger":"')
_NOT_OURS = re.compile(rb'^(?!\{"time":"[^"]+","level":"[A-Z]+","logger":")', re.MULTILINE)
_RENAMED = frozenset({"time", "level", "target", "message", "file", "line", "request_id", "x_request_id", "trace_id"})


class JsonFormatter(logging.Formatter):
    """Formats the records of this process. Called by the task or thread that logs."""

    def __init__(self, process: str) -> None:
        super().__init__()
        self._process = process

    def format(self, record: logging.LogRecord) -> str:
        """See `logging.Formatter`."""
        fields: dict[str, object] = _ids(record)
        if record.exc_info:
            fields["exception"] = self.formatException(record.exc_info)
        at = datetime.fromtimestamp(record.created, UTC)
        return _line(at, record.levelname, record.name, record.getMessage(), self._process, fields).decode().rstrip()


def _ids(record: logging.LogRecord) -> dict[str, object]:
    """Return the ids that the record was given, or else those of the request that runs here."""
    if (given := getattr(record, "request_id", None)) is not None:
        return {"request_id": given, "trace_id": getattr(record, "trace_id", None)}
    ids = CURRENT.get()
    return {"request_id": ids.request_id, "trace_id": ids.trace_id} if ids is not None and ids.request_id else {}


def convert_to_json(lines: bytes, now: datetime, process: str) -> bytes:
    """Return complete `lines` as JSON; those of Python processes are already, and others get a time and a logger."""
    if not _NOT_OURS.search(lines, 0, len(lines) - 1):
        return lines
    return b"".join(
        line if OURS.match(line) else _converted(line, now, process) for line in lines.splitlines(keepends=True)
    )


def message_in(line: bytes) -> str:
    """Return the message of a JSON line; "" if it has none."""
    try:
        return str(msgspec.json.decode(line, type=dict[str, object]).get("message", ""))
    except msgspec.DecodeError:
        return ""


def _converted(line: bytes, now: datetime, process: str) -> bytes:
    text = line.decode(errors="replace").rstrip()
    if not text:
        return b""
    fields = runtime_fields(text)
    if fields is None:
        logger, message = request_error(text)
        return _line(now, "INFO", logger, message, process, {})
    level = str(fields["level"])
    return _line(
        time_of(fields, now),
        LEVELS.get(level, level),
        str(fields["target"]),
        str(fields.get("message", "")),
        process,
        {
            "request_id": fields.get("request_id") or fields.get("x_request_id"),
            "trace_id": fields.get("trace_id"),
            **{name: value for name, value in fields.items() if name not in _RENAMED},
        },
    )


def _line(at: datetime, level: str, logger: str, message: str, process: str, fields: Mapping[str, object]) -> bytes:
    time = at.astimezone(UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")
    line: dict[str, object] = {"time": time, "level": level, "logger": logger, "message": message, "process": process}
    line |= {name: value for name, value in fields.items() if value is not None}
    try:
        return msgspec.json.encode(line) + b"\n"
    except UnicodeEncodeError:  # half of a surrogate pair, as in the name of a file that is not UTF-8
        return msgspec.json.encode({name: _encodable(value) for name, value in line.items()}) + b"\n"


def _encodable(value: object) -> str:
    return str(value).encode(errors="backslashreplace").decode()
