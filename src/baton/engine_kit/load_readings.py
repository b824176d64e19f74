"""Readings of an engine that has no KV: its load, whenever that has changed."""

import asyncio
from collections.abc import AsyncGenerator, Callable

from baton.ports.engine import Progress
from baton.protocol.events import LoadSnapshot, Reading

LOAD_INTERVAL_S = 0.25


async def load_readings(progress: Callable[[], Progress], stopped: asyncio.Event) -> AsyncGenerator[Reading, None]:
    """Yield the load until `stopped` is set."""
    last: LoadSnapshot | None = None
    while not stopped.is_set():
        now = progress()
        if (load := LoadSnapshot(now.running, now.waiting, 0, 1)) != last:
            yield (last := load)
        try:
            async with asyncio.timeout(LOAD_INTERVAL_S):
                await stopped.wait()
        except TimeoutError:
            continue
