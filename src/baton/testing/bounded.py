"""Runs asynchronous tests with a time limit that holds even when the event loop is blocked."""

import asyncio
import sys
import threading
import traceback
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

T = TypeVar("T")

BLOCKED_S = 5.0


def run_bounded(main: Coroutine[Any, Any, T], limit_s: float = 20.0) -> T:
    """Run `main` in an event loop of its own and return its result. Raises AssertionError after `limit_s`.

    The loop has a thread of its own: when it is blocked, the test still ends, with the stack of that thread.
    """
    results: list[T] = []
    errors: list[BaseException] = []

    def run() -> None:
        try:
            results.append(asyncio.run(_limited(main, limit_s)))
        except BaseException as error:  # noqa: BLE001 - raised again in the caller's thread
            errors.append(error)

    thread = threading.Thread(target=run, name="bounded", daemon=True)
    thread.start()
    thread.join(limit_s + BLOCKED_S)
    if thread.is_alive():
        raise _blocked(thread, limit_s)
    if errors:
        raise errors[0]
    return results[0]


class BoundedLoop:
    """An event loop in a thread of its own, for what outlives one test. Its runs are bounded as in `run_bounded`."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="bounded", daemon=True)
        self._thread.start()

    def run(self, main: Coroutine[Any, Any, T], limit_s: float = 20.0) -> T:
        """Run `main` in the loop and return its result. Raises AssertionError after `limit_s`."""
        future = asyncio.run_coroutine_threadsafe(_limited(main, limit_s), self._loop)
        try:
            return future.result(limit_s + BLOCKED_S)
        except TimeoutError:
            if future.done():
                raise
            raise _blocked(self._thread, limit_s) from None

    def close(self) -> None:
        """End the loop. Everything that ran in it has ended before."""
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(BLOCKED_S)
        self._loop.close()


async def eventually(holds: Callable[[], bool], limit_s: float = 10.0, every_s: float = 0.002) -> None:
    """Wait until `holds()`. Raises AssertionError after `limit_s`."""
    loop = asyncio.get_running_loop()
    deadline = loop.time() + limit_s
    while not holds():
        assert loop.time() < deadline, f"still not true after {limit_s:g} s"
        await asyncio.sleep(every_s)


async def measure_lag() -> float:
    """Return the longest delay of the event loop in seconds, measured until this task is cancelled."""
    loop = asyncio.get_running_loop()
    longest = 0.0
    try:
        while True:
            before = loop.time()
            await asyncio.sleep(0.01)
            longest = max(longest, loop.time() - before - 0.01)
    except asyncio.CancelledError:
        return longest


def _blocked(thread: threading.Thread, limit_s: float) -> AssertionError:
    stack = traceback.format_stack(sys._current_frames()[thread.ident or 0])
    return AssertionError(f"the event loop is blocked, after {limit_s:g} s, in:\n{''.join(stack)}")


async def _limited(main: Coroutine[Any, Any, T], limit_s: float) -> T:
    try:
        async with asyncio.timeout(limit_s) as limit:
            return await main
    except TimeoutError as error:
        if limit.expired():
            raise AssertionError(f"not finished after {limit_s:g} s") from error
        raise
