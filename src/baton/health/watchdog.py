"""The watchdog: an engine that has work and completes no step is stalled."""

import asyncio
from collections.abc import Callable

from baton.errors import EngineStalled
from baton.ports.engine import Engine, Progress


class StallClock:
    """Decides when no progress becomes a stall. Pure: the caller passes the time."""

    def __init__(self, stall_timeout_s: float) -> None:
        self._stall_timeout_s = stall_timeout_s
        self._steps = -1
        self._since = 0.0

    def stalled_for(self, progress: Progress, now: float) -> float | None:
        """Return how long the engine has made no step if that is a stall, else None."""
        busy = progress.running + progress.waiting > 0
        if not busy or progress.steps != self._steps:
            self._steps = progress.steps
            self._since = now
            return None
        stalled_s = now - self._since
        return stalled_s if stalled_s >= self._stall_timeout_s else None


async def watch(engine: Engine, stall_timeout_s: float, suspended: Callable[[], bool] = lambda: False) -> None:
    """Poll the engine's progress until it stalls. Raises EngineStalled; never returns.

    While it is suspended, an engine need not make progress.
    """
    clock = StallClock(stall_timeout_s)
    loop = asyncio.get_running_loop()
    while True:
        await asyncio.sleep(min(1.0, stall_timeout_s / 4))
        progress = engine.progress()
        due = Progress(progress.steps, 0, 0) if suspended() else progress
        stalled_s = clock.stalled_for(due, loop.time())
        if stalled_s is not None:
            raise EngineStalled(
                f"no step for {stalled_s:.1f} s with {progress.running} running and {progress.waiting} waiting requests"
            )
