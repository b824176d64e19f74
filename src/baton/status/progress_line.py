"""A progress bar in one line, on the terminal or as the status that the supervisor shows."""

import shutil
import sys
import time
from types import TracebackType

from baton.status.sd_notify import notify

REDRAW_INTERVAL_S = 0.1
BAR_WIDTH = 24


class ProgressLine:
    """Rewrites one line of standard error, and clears it on exit."""

    def __init__(self, label: str) -> None:
        self._label = label
        self._shown_at = 0.0

    def __enter__(self) -> "ProgressLine":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        show_status("")

    def report(self, done: int, total: int) -> None:
        """Show the share of `total` that is done. Redraws at most every `REDRAW_INTERVAL_S`."""
        now = time.monotonic()
        if now - self._shown_at >= REDRAW_INTERVAL_S:
            self._shown_at = now
            share = min(done / max(total, 1), 1.0)
            bar = "#" * round(share * BAR_WIDTH)
            show_status(f"{self._label} [{bar:<{BAR_WIDTH}}] {share:4.0%}")


def show_status(text: str) -> None:
    """Show what this process does, on the terminal or by the supervisor, until the next call; "" ends it."""
    notify(f"STATUS={text}")
    rewrite_line(text)


def rewrite_line(text: str) -> None:
    """Replace the current line with `text` if standard error is a terminal."""
    if sys.stderr.isatty():
        sys.stderr.write(f"\r\033[K{text[: shutil.get_terminal_size().columns - 1]}")
        sys.stderr.flush()
