"""Pacing of a peer's tokens: a plain sleep before each, as in most example workers, or by the clock.

A sleep adds every delay to the length of the request. By the clock a late token shortens the next wait, as in
Baton's echo engine; it is the stricter comparison.
"""

import asyncio
from collections.abc import Awaitable, Callable
from functools import partial

Wait = Callable[[], Awaitable[None]]


def new_wait(pace_s: float, catch_up: bool) -> Wait:
    """Return the wait of one request, awaited before each of its tokens. Unpaced, it only yields to the event loop."""
    return by_clock(pace_s) if catch_up and pace_s else partial(asyncio.sleep, pace_s)


def by_clock(pace_s: float) -> Wait:
    loop = asyncio.get_running_loop()
    due = loop.time()

    async def wait() -> None:
        nonlocal due
        due += pace_s
        await asyncio.sleep(due - loop.time())

    return wait
