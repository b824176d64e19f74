"""Writes the responses of a stream to the runtime: from the event loop as long as that cannot block.

The runtime queues messages. Of a stream that is not read it holds about three hundred, plus what the socket buffers
take; then `send` blocks the calling thread. So the first messages, which always fit, are sent from the event loop,
which is cheap, and the rest from a thread of the stream's own: a stalled client blocks that thread alone, while its
tokens merge in the engine's stream. The thread may have a few messages pending, so that a client that keeps up causes
no wait.
"""

import asyncio
import queue
import threading
from collections.abc import Callable
from typing import Generic, Protocol

import msgspec

from baton.errors import Cancelled, ReaderStalled
from baton.ports.runtime import Rep, Wire

INLINE_MESSAGES = 256
INLINE_BYTES = 65_536
MAX_PENDING = 16


class Sender(Protocol):
    """The runtime's response sender."""

    def send(self, message: Wire) -> None:
        """Queue a message. Blocks when the queue is full; raises RuntimeError when the client has disconnected."""

    def close(self) -> None:
        """End the stream without an error."""


class ResponseWriter(Generic[Rep]):
    """Writes one stream. Used by one task."""

    __slots__ = ("_bytes", "_encode", "_sender", "_sent", "_stall_timeout_s", "_thread")

    def __init__(self, sender: Sender, encode: Callable[[Rep], Wire], stall_timeout_s: float) -> None:
        self._sender = sender
        self._encode = encode
        self._sent = 0
        self._bytes = 0
        self._stall_timeout_s = stall_timeout_s
        self._thread: _SenderThread | None = None

    def send_now(self, reply: Rep) -> bool:
        """Send `reply`, unless `MAX_PENDING` are pending. Raises Cancelled as `send` does."""
        message = self._encode(reply)
        if self._sent < INLINE_MESSAGES or self._is_small(message):
            self._sent += 1
            try:
                self._sender.send(message)
            except RuntimeError:
                raise Cancelled("the client disconnected") from None
            return True
        if self._thread is None:
            self._thread = _SenderThread(self._sender)
        if self._thread.pending >= MAX_PENDING:
            return False
        self._thread.put(message)
        return True

    async def send(self, reply: Rep) -> None:
        """Send `reply`. Raises Cancelled when the client has disconnected, ReaderStalled when it does not read."""
        if not self.send_now(reply):
            await self._wait_for_pending(MAX_PENDING - 1)
            self.send_now(reply)

    def _is_small(self, message: Wire) -> bool:
        """Whether the runtime takes `message` without blocking even if nothing of this stream has been read."""
        if self._bytes < INLINE_BYTES:
            self._bytes += len(msgspec.msgpack.encode(message))
        return self._bytes < INLINE_BYTES

    async def close(self) -> None:
        """End the stream once all of it has been sent. Raises as `send` does."""
        await self._wait_for_pending(0)
        self._sender.close()

    async def _wait_for_pending(self, count: int) -> None:
        """Wait until at most `count` messages are pending."""
        if self._thread is None or self._thread.pending <= count:
            return
        try:
            async with asyncio.timeout(self._stall_timeout_s):
                await self._thread.wait_for_pending(count)
        except TimeoutError:
            self.release()
            raise ReaderStalled(f"the client has not read for {self._stall_timeout_s:g} s") from None

    def release(self) -> None:
        """End the thread, if there is one, when its current send returns."""
        if self._thread is not None:
            self._thread.release()


class _SenderThread:
    """A daemon thread that sends for one stream, so that nothing else waits for its client.

    The loop counts the messages it adds and the thread those it has sent. A waiter first publishes its future and then
    reads the count; the thread first counts and then looks for a future. One of them always sees the other, without a
    lock.
    """

    def __init__(self, sender: Sender) -> None:
        self._sender = sender
        self._loop = asyncio.get_running_loop()
        self._inbox: queue.SimpleQueue[Wire | None] = queue.SimpleQueue()
        self._added = 0
        self._sent = 0
        self._error: Exception | None = None
        self._released = False
        self._waiting: asyncio.Future[None] | None = None
        threading.Thread(target=self._run, name="baton-responses", daemon=True).start()

    @property
    def pending(self) -> int:
        """How many messages have not been sent. Raises what one of them failed with."""
        if self._error is not None:
            raise self._error
        return self._added - self._sent

    def put(self, message: Wire) -> None:
        """Queue `message` to be sent. Raises what an earlier one failed with."""
        if self._error is not None:
            raise self._error
        self._added += 1
        self._inbox.put(message)

    async def wait_for_pending(self, count: int) -> None:
        """Wait until at most `count` messages are pending. Raises what one of them failed with."""
        try:
            while True:
                self._waiting = self._loop.create_future()
                if self.pending <= count:
                    return
                await self._waiting
        finally:
            self._waiting = None

    def release(self) -> None:
        """Send nothing more, and end the thread."""
        self._released = True
        self._inbox.put(None)

    def _run(self) -> None:
        while (message := self._inbox.get()) is not None and not self._released:
            try:
                self._sender.send(message)
            except RuntimeError:
                self._error = Cancelled("the client disconnected")
            except Exception as raised:  # noqa: BLE001 - raised when the next message is sent
                self._error = raised
            self._sent += 1
            if (waiting := self._waiting) is not None:
                try:
                    self._loop.call_soon_threadsafe(_settle, waiting)
                except RuntimeError:  # the loop has closed, with every waiter
                    return
            if self._error is not None:
                return


def _settle(waiting: asyncio.Future[None]) -> None:
    if not waiting.done():
        waiting.set_result(None)
