"""One line on a terminal that tells how far a long job is; nothing where nobody looks."""

import sys
import time
from types import TracebackType

REDRAW_S = 0.1
WIDTH = 24


class ProgressLine:
    """Rewrites one line of standard error until it is left, and then takes it away."""

    def __init__(self, label: str) -> None:
        self._label = label
        self._shows = sys.stderr.isatty()
        self._drawn_at = 0.0

    def __enter__(self) -> "ProgressLine":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._shows:
            self._write("")

    def report(self, done: int, total: int) -> None:
        """Show that `done` of `total` are done."""
        now = time.monotonic()
        if self._shows and now - self._drawn_at >= REDRAW_S:
            self._drawn_at = now
            share = min(done / max(total, 1), 1.0)
            bar = "#" * round(share * WIDTH)
            self._write(f"{self._label} [{bar:<{WIDTH}}] {share:4.0%}")

    @staticmethod
    def _write(text: str) -> None:
        sys.stderr.write(f"\r\033[K{text}")
        sys.stderr.flush()
