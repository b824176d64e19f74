"""Logs to standard error, many lines in one write: a write per request costs more than formatting its line."""

import atexit
import logging
import sys
import threading
import time
from contextlib import suppress
from datetime import UTC, datetime

from baton.config.environment import supervisor_pid
from baton.process.foreign_output import convert_standard_error
from baton.process.json_lines import JsonFormatter, convert_to_json

FLUSH_INTERVAL_S = 0.1
WRITE_CHARS = 4000
"""Writes of up to 4096 bytes to a pipe are not mixed with those of other threads, as of the runtime."""
FORMAT = "%(asctime)s %(levelname)s %(name)s %(message)s"


class BatchedHandler(logging.Handler):
    """Buffers lines for at most `FLUSH_INTERVAL_S`; a warning or worse is written at once, after those before it.

    Lines that cannot be written, as to a full disk, are dropped: they are no reason to stop serving.
    """

    def __init__(self) -> None:
        super().__init__()
        self._lines: list[str] = []
        self._due = threading.Event()
        threading.Thread(target=self._flush_often, name="baton-logs", daemon=True).start()

    def emit(self, record: logging.LogRecord) -> None:
        """Buffer a record."""
        try:
            self._lines.append(self.format(record))
        except Exception:  # noqa: BLE001 - a call with wrong arguments, as in a library, must not fail its caller
            self.handleError(record)
            return
        if record.levelno >= logging.WARNING:
            self.flush()
        elif not self._due.is_set():
            self._due.set()

    def flush(self) -> None:
        """Write the buffered lines."""
        with self.lock or threading.RLock(), suppress(OSError):
            lines, self._lines = self._lines, []
            pending: list[str] = []
            size = 0
            for line in lines:
                if pending and size + len(line) >= WRITE_CHARS:
                    _write(pending)
                    pending, size = [], 0
                pending.append(line)
                size += len(line) + 1
            if pending:
                _write(pending)

    def _flush_often(self) -> None:
        while self._due.wait():
            time.sleep(FLUSH_INTERVAL_S)
            self._due.clear()
            self.flush()


def _write(lines: list[str]) -> None:
    sys.stderr.write("\n".join(lines) + "\n")
    sys.stderr.flush()


def start_logging(level: str, log_format: str = "text", process: str = "") -> None:
    """Send the logs of this process to standard error from now on. JSON lines name the `process`.

    The supervisor of a process converts what the runtime and libraries write; without one, the process does.
    """
    handler = BatchedHandler()
    handler.setFormatter(JsonFormatter(process) if log_format == "json" else logging.Formatter(FORMAT))
    if log_format == "json" and supervisor_pid() is None:
        convert_standard_error(lambda lines: convert_to_json(lines, datetime.now(UTC), process))
    logging.basicConfig(level=level.upper(), handlers=[handler])
    # Thread and process names and the place of a call cost time for every line, and no line has them.
    logging.logThreads = logging.logProcesses = logging.logMultiprocessing = False
    logging._srcfile = None  # as the documentation of logging says
    atexit.register(handler.flush)
