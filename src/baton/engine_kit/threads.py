"""From other threads to the event loop and back: work aside of it, and answers that reach it."""

import asyncio
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import TypeVar

T = TypeVar("T")


async def run_in_thread(name: str, work: Callable[[], T]) -> T:
    """Run `work` on a thread of its own and return its result; nobody waits for it when the process ends."""
    loop = asyncio.get_running_loop()
    answer: asyncio.Future[T] = loop.create_future()

    def run() -> None:
        try:
            result = work()
        except Exception as error:  # noqa: BLE001 - it goes to who asked
            post(loop, fail, answer, error)
        else:
            post(loop, resolve, answer, result)

    threading.Thread(target=run, name=name, daemon=True).start()
    return await answer


def post(loop: asyncio.AbstractEventLoop, callback: Callable[..., None], *args: object) -> None:
    """Have `loop` call `callback`, from any thread; a loop that has ended calls nothing."""
    if not loop.is_closed():
        with suppress(RuntimeError):  # it has ended just now
            loop.call_soon_threadsafe(callback, *args)


def resolve(future: asyncio.Future[T], result: T) -> None:
    """Give the answer, unless nobody waits any more."""
    if not future.done():
        future.set_result(result)


def fail(future: asyncio.Future[T], error: BaseException) -> None:
    """Give an error for an answer, unless nobody waits any more."""
    if not future.done():
        future.set_exception(error)
        future.exception()  # marked as read: who asked may have left
