"""Pacing of a peer's tokens: a plain sleep before each, as in most example workers, by the clock, or in steps.

A sleep adds every delay to the length of the request. By the clock a late token shortens the next wait. In steps, all
requests get their next token at once, as from an engine that computes them as one batch, and as from Baton's echo
engine: then everything on the way to the clients has to send a token of each request at the same time.
"""

import asyncio
from collections.abc import Awaitable, Callable
from functools import partial

Wait = Callable[[], Awaitable[None]]


def sleeping(pace_s: float) -> Wait:
    """Return the wait of one request, awaited before each of its tokens. Unpaced, it only yields to the event loop."""
    return partial(asyncio.sleep, pace_s)


def by_clock(pace_s: float) -> Wait:
    """Return a wait that keeps to the clock. Unpaced, it only yields to the event loop."""
    loop = asyncio.get_running_loop()
    due = loop.time()

    async def wait() -> None:
        nonlocal due
        due += pace_s
        await asyncio.sleep(due - loop.time())

    return wait


class Steps:
    """One clock for all requests of a process."""

    def __init__(self, pace_s: float) -> None:
        self._pace_s = pace_s
        self._waiting: list[asyncio.Future[None]] = []
        self._ticking = False

    async def wait(self) -> None:
        """Wait for the next step."""
        loop = asyncio.get_running_loop()
        step = loop.create_future()
        self._waiting.append(step)
        if not self._ticking:
            self._ticking = True
            self._tick_at(loop.time() + self._pace_s)
        await step

    def _tick_at(self, due: float) -> None:
        asyncio.get_running_loop().call_at(due, self._tick, due)

    def _tick(self, due: float) -> None:
        waiting, self._waiting = self._waiting, []
        for step in waiting:
            if not step.done():
                step.set_result(None)
        self._ticking = bool(waiting)
        if waiting:
            self._tick_at(due + self._pace_s)
