"""The cancel scope of a request: everything that can end it early, in one place.

Cancellation by the client, the deadline, worker shutdown, a stalled engine and a lost peer all `fire` the scope with an
error. The first error wins. Streams and waits of the request end through `on_fire`.
"""

import asyncio
from collections.abc import Awaitable, Callable
from typing import TypeVar

from baton.errors import BatonError

T = TypeVar("T")


class CancelScope:
    """Open before the work is submitted, closed when the request has ended. Event-loop thread only."""

    __slots__ = ("_callbacks", "_closed", "_timer", "error")

    def __init__(self) -> None:
        self.error: BatonError | None = None
        self._callbacks: list[Callable[[BatonError], None]] = []
        self._timer: asyncio.TimerHandle | None = None
        self._closed = False

    def fire(self, error: BatonError) -> None:
        """End the request early with `error`. Does nothing after the first call or after `close`."""
        if self.error is not None or self._closed:
            return
        self.error = error
        for callback in self._callbacks:
            callback(error)

    def fire_after(self, delay_s: float, error: BatonError) -> None:
        """Fire with `error` after `delay_s`."""
        self._timer = asyncio.get_running_loop().call_later(delay_s, self.fire, error)

    def on_fire(self, callback: Callable[[BatonError], None]) -> None:
        """Call `callback` when the scope fires; at once if it has fired."""
        if self.error is not None:
            callback(self.error)
        else:
            self._callbacks.append(callback)

    def check(self) -> None:
        """Raise the error that the scope fired with, if it has fired."""
        if self.error is not None:
            raise self.error

    async def wait(self, awaitable: Awaitable[T]) -> T:
        """Await `awaitable`; when the scope fires, cancel it and raise the error."""
        task = asyncio.ensure_future(awaitable)

        def cancel(_: BatonError) -> None:
            task.cancel()

        self.on_fire(cancel)
        try:
            return await task
        except asyncio.CancelledError:
            task.cancel()
            current = asyncio.current_task()
            if current is None or not current.cancelling():
                self.check()
            raise

    def close(self) -> None:
        """The request has ended; the scope cannot fire from now on."""
        self._closed = True
        self._callbacks.clear()
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
