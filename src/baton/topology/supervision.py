"""Keeps a process running: waits for its exit, kills it when it hangs, and starts it again."""

import asyncio
import logging
import signal
from collections.abc import Coroutine
from typing import Any

from baton.errors import EngineDead
from baton.topology.process import Process

log = logging.getLogger(__name__)

FIRST_BACKOFF_S = 0.5
MAX_BACKOFF_S = 15.0
MEMORY_S = 300.0


class Keepers:
    """The tasks that keep processes running, of which there may be more or fewer while they run. One event loop."""

    def __init__(self) -> None:
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._failed: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._ended = False

    def add(self, name: str, work: Coroutine[Any, Any, None]) -> None:
        """Do `work`, which does not return, under a name that no other has. Does nothing once `run_until` ends."""
        if self._ended:
            work.close()
            return
        self._tasks[name] = task = asyncio.create_task(work, name=f"keep {name}")
        task.add_done_callback(self._on_done)

    async def remove(self, name: str) -> None:
        """Cancel the work of that name, and wait for its end. Does nothing if there is none."""
        if (task := self._tasks.pop(name, None)) is not None:
            task.cancel()
            await asyncio.wait([task])

    async def run_until(self, stop: asyncio.Event) -> None:
        """Wait until `stop` is set, then cancel all work. Raises EngineDead if some work ends before."""
        stopping = asyncio.create_task(stop.wait())
        try:
            ends: list[asyncio.Future[Any]] = [self._failed, stopping]
            await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
            if self._failed.done():
                self._failed.result()
        finally:
            self._ended = True  # a worker that becomes ready meanwhile is not to be started again
            stopping.cancel()
            await asyncio.wait([stopping])
            for name in list(self._tasks):
                await self.remove(name)

    def _on_done(self, task: asyncio.Task[None]) -> None:
        if not task.cancelled() and not self._failed.done():
            problem = f"the supervision of a process has ended: {task.exception()!r}"
            self._failed.set_exception(EngineDead(problem))
            self._failed.exception()  # marked as retrieved: nothing may wait for it


class RestartBackoff:
    """Decides how long to wait before a restart. Pure: the caller passes the time.

    The delay doubles with every exit within `MEMORY_S`, however long the process ran in between: one that crashes after
    a long start is in a crash loop too.
    """

    def __init__(self) -> None:
        self._exits: list[float] = []

    def next_delay_s(self, now: float) -> float:
        """Count an exit, or a failed start, at `now`; return how long to wait."""
        self._exits = [exited for exited in self._exits if now - exited < MEMORY_S] + [now]
        return float(min(FIRST_BACKOFF_S * 2 ** (len(self._exits) - 1), MAX_BACKOFF_S))


async def keep_running(process: Process, stall_timeout_s: float, start_timeout_s: float) -> None:
    """Start `process`, which runs, again whenever it exits or hangs. Never returns."""
    backoff = RestartBackoff()
    loop = asyncio.get_running_loop()
    while True:
        problem = f"{process.name} exited with code {await _wait_for_exit(process, stall_timeout_s, start_timeout_s)}"
        while problem:
            delay_s = backoff.next_delay_s(loop.time())
            log.warning("%s; starting it again in %.1f s", problem, delay_s)
            await asyncio.sleep(delay_s)
            problem = await _try_start(process, stall_timeout_s)


async def _try_start(process: Process, stall_timeout_s: float) -> str:
    """Start `process`; return what prevents it, "" if it was started."""
    try:
        await process.start(stall_timeout_s)
    except EngineDead as error:
        return error.message
    return ""


async def _wait_for_exit(process: Process, stall_timeout_s: float, start_timeout_s: float) -> int:
    """Wait for the exit and return its code. A process that sends no heartbeat in time is killed."""
    loop = asyncio.get_running_loop()
    ended = asyncio.ensure_future(process.wait())
    started = loop.time()
    try:
        while not ended.done():
            await asyncio.wait([ended], timeout=stall_timeout_s / 4)
            silent_s = loop.time() - max(process.last_heartbeat, started)
            limit_s = stall_timeout_s if process.ready.is_set() else start_timeout_s
            if silent_s > limit_s and not ended.done():
                log.error("%s has sent no heartbeat for %.0f s; killing it", process.name, silent_s)
                process.send_signal(signal.SIGKILL)
                await ended
        return ended.result()
    finally:
        ended.cancel()
