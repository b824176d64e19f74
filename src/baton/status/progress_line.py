"""One line that tells how far a long job is: on a terminal, or to the supervisor that has one; else nothing."""

import shutil
import sys
import time
from types import TracebackType

from baton.status.sd_notify import notify

REDRAW_S = 0.1
WIDTH = 24


class ProgressLine:
    """Rewrites one line of standard error until it is left, and then takes it away."""

    def __init__(self, label: str) -> None:
        self._label = label
        self._told_at = 0.0

    def __enter__(self) -> "ProgressLine":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._tell("")

    def report(self, done: int, total: int) -> None:
        """Show that `done` of `total` are done."""
        now = time.monotonic()
        if now - self._told_at >= REDRAW_S:
            self._told_at = now
            share = min(done / max(total, 1), 1.0)
            bar = "#" * round(share * WIDTH)
            self._tell(f"{self._label} [{bar:<{WIDTH}}] {share:4.0%}")

    @staticmethod
    def _tell(text: str) -> None:
        notify(f"STATUS={text}")
        rewrite_line(text)


def rewrite_line(text: str) -> None:
    """Put `text` in place of the line that the cursor is in, if standard error is a terminal."""
    if sys.stderr.isatty():
        sys.stderr.write(f"\r\033[K{text[: shutil.get_terminal_size().columns - 1]}")
        sys.stderr.flush()
