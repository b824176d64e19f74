"""Keeps a process running: waits for its exit, kills it when it hangs, and starts it again."""

import asyncio
import logging
import signal
from collections.abc import Coroutine, Sequence
from typing import Any

from baton.errors import EngineDead
from baton.topology.process import Process

log = logging.getLogger(__name__)

FIRST_BACKOFF_S = 0.5
MAX_BACKOFF_S = 15.0


async def run_until(stop: asyncio.Event, work: Sequence[Coroutine[Any, Any, None]]) -> None:
    """Do all `work`, none of which returns, until `stop` is set. Raises EngineDead if one ends before."""
    tasks = [asyncio.create_task(each) for each in work]
    stopping = asyncio.create_task(stop.wait())
    try:
        await asyncio.wait([*tasks, stopping], return_when=asyncio.FIRST_COMPLETED)
        if ended := next((task for task in tasks if task.done()), None):
            raise EngineDead(f"the supervision of a process has ended: {ended.exception()!r}")
    finally:
        for task in (*tasks, stopping):
            task.cancel()
        await asyncio.wait([*tasks, stopping])


async def keep_running(process: Process, stall_timeout_s: float, start_timeout_s: float) -> None:
    """Start `process`, which runs, again whenever it exits or hangs. Never returns."""
    backoff_s = FIRST_BACKOFF_S
    loop = asyncio.get_running_loop()
    while True:
        started = loop.time()
        problem = f"{process.name} exited with code {await _wait_for_exit(process, stall_timeout_s, start_timeout_s)}"
        backoff_s = FIRST_BACKOFF_S if loop.time() - started > MAX_BACKOFF_S else min(2 * backoff_s, MAX_BACKOFF_S)
        while problem:
            log.warning("%s; starting it again in %.1f s", problem, backoff_s)
            await asyncio.sleep(backoff_s)
            problem = await _try_start(process, stall_timeout_s)
            backoff_s = min(2 * backoff_s, MAX_BACKOFF_S) if problem else backoff_s


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
