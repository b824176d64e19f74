"""The watchdog: an engine that has work and does not move is stuck."""

import asyncio
from collections.abc import Callable

from baton.errors import EngineStalled
from baton.ports.engine import Engine, Progress


class StallClock:
    """Decides when no progress becomes a stall. Pure: it is told the time."""

    def __init__(self, stall_timeout_s: float) -> None:
        self._stall_s = stall_timeout_s
        self._steps = -1
        self._since = 0.0

    def stalled_for(self, progress: Progress, now: float) -> float | None:
        """Return how long the engine has been stuck if that is too long, else None."""
        busy = progress.running + progress.waiting > 0
        if not busy or progress.steps != self._steps:
            self._steps = progress.steps
            self._since = now
            return None
        stuck_s = now - self._since
        return stuck_s if stuck_s >= self._stall_s else None


async def watch(engine: Engine, stall_timeout_s: float, suspended: Callable[[], bool] = lambda: False) -> None:
    """Look at the engine's progress until it stalls. Raises EngineStalled; never returns.

    While it is excused, an engine need not move.
    """
    clock = StallClock(stall_timeout_s)
    loop = asyncio.get_running_loop()
    while True:
        await asyncio.sleep(min(1.0, stall_timeout_s / 4))
        progress = engine.progress()
        due = Progress(progress.steps, 0, 0) if suspended() else progress
        stuck_s = clock.stalled_for(due, loop.time())
        if stuck_s is not None:
            raise EngineStalled(
                f"no step for {stuck_s:.1f} s with {progress.running} running and {progress.waiting} waiting requests"
            )
