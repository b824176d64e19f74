"""Threads for blocking work of one kind, so that it delays neither the event loop nor work of another kind."""

import asyncio
import queue
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import Any, TypeVar

T = TypeVar("T")


class ThreadPool:
    """At most `threads` threads, started when needed; further work waits in order.

    They are daemons: work that never returns does not keep the process from exiting. Work that is cancelled before it
    begins is not done; work that has begun runs to its end, and its result is dropped.
    """

    def __init__(self, name: str, threads: int) -> None:
        self._name = name
        self._threads = threads
        self._jobs: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        self._idle = threading.Semaphore(0)
        self._started: list[threading.Thread] = []
        self._closed = False

    def submit(self, work: Callable[..., T], *args: Any) -> asyncio.Future[T]:
        """Queue `work`; the future gets its result on the event loop of the caller. Raises RuntimeError if closed."""
        if self._closed:
            raise RuntimeError(f"the threads {self._name} have been ended")
        future: asyncio.Future[T] = asyncio.get_running_loop().create_future()
        self._jobs.put(_Job(future, work, args))
        if not self._idle.acquire(blocking=False) and len(self._started) < self._threads:
            thread = threading.Thread(target=self._run, name=f"{self._name}-{len(self._started)}", daemon=True)
            self._started.append(thread)
            thread.start()
        return future

    async def run(self, work: Callable[..., T], *args: Any) -> T:
        """Do `work` on one of the threads and return its result."""
        return await self.submit(work, *args)

    def close(self) -> None:
        """End the threads, when all work that was queued is done. Idempotent."""
        self._closed = True
        for _ in self._started:
            self._jobs.put(None)
        self._started.clear()

    def _run(self) -> None:
        while (job := self._jobs.get()) is not None:
            job.do()
            del job  # not held while idle: it may have the last reference to a large file
            self._idle.release()


class _Job:
    def __init__(self, future: "asyncio.Future[Any]", work: Callable[..., Any], args: tuple[Any, ...]) -> None:
        self._future = future
        self._work = work
        self._args = args

    def do(self) -> None:
        if self._future.cancelled():
            return
        try:
            result = self._work(*self._args)
        except BaseException as error:  # noqa: BLE001 - raised in the caller
            self._settle(self._future.set_exception, error)
        else:
            self._settle(self._future.set_result, result)

    def _settle(self, settle: Callable[[Any], None], value: object) -> None:
        def on_loop() -> None:
            if not self._future.done():
                settle(value)

        with suppress(RuntimeError):  # the loop has closed
            self._future.get_loop().call_soon_threadsafe(on_loop)
