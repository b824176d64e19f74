"""Work on other threads, and results posted from them to the event loop."""

import asyncio
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import TypeVar

T = TypeVar("T")


async def run_in_thread(name: str, work: Callable[[], T]) -> T:
    """Run `work` on a thread of its own and return its result. The thread does not keep the process alive."""
    loop = asyncio.get_running_loop()
    done: asyncio.Future[T] = loop.create_future()

    def run() -> None:
        try:
            result = work()
        except Exception as error:  # noqa: BLE001 - raised in the caller
            post(loop, fail, done, error)
        else:
            post(loop, resolve, done, result)

    threading.Thread(target=run, name=name, daemon=True).start()
    return await done


def post(loop: asyncio.AbstractEventLoop, callback: Callable[..., None], *args: object) -> None:
    """Call `callback` on `loop`, from any thread; nothing happens if the loop has closed."""
    if not loop.is_closed():
        with suppress(RuntimeError):  # it has closed just now
            loop.call_soon_threadsafe(callback, *args)


def resolve(future: asyncio.Future[T], result: T) -> None:
    """Set the result, unless the future is done or cancelled."""
    if not future.done():
        future.set_result(result)


def fail(future: asyncio.Future[T], error: BaseException) -> None:
    """Set the error, unless the future is done or cancelled."""
    if not future.done():
        future.set_exception(error)
        future.exception()  # marks it as retrieved: the caller may be gone
