"""How answers leave: pushed from the event loop, as long as that cannot block.

The runtime queues what is pushed. Of a stream that nobody reads it holds some three hundred messages, and what the
sockets' buffers take on top; then `send` blocks the thread that called it. So what surely fits is pushed from the event
loop, which is cheap, and everything after it from a thread of the stream's own: a stalled reader then holds up that
thread alone, while its tokens merge in the engine's stream. The thread gets a few messages ahead, so that a reader who
keeps up costs nobody a wait.
"""

import asyncio
import queue
import threading
from typing import Protocol

import msgspec

from baton.errors import Cancelled, ReaderStalled
from baton.ports.runtime import Wire

INLINE_MESSAGES = 256
INLINE_BYTES = 65_536
AHEAD = 16


class Sender(Protocol):
    """The runtime's response sender."""

    def send(self, message: Wire) -> None:
        """Queue a message. Blocks when the queue is full; raises RuntimeError when the caller has left."""

    def close(self) -> None:
        """End the stream well."""


class Egress:
    """The way out of one stream. Used by one task."""

    __slots__ = ("_bytes", "_sender", "_sent", "_stall_s", "_thread")

    def __init__(self, sender: Sender, stall_timeout_s: float) -> None:
        self._sender = sender
        self._sent = 0
        self._bytes = 0
        self._stall_s = stall_timeout_s
        self._thread: _SenderThread | None = None

    async def send(self, message: Wire) -> None:
        """Send `message`. Raises Cancelled when the caller has left, ReaderStalled when it does not read."""
        if self._fits(message):
            try:
                self._sender.send(message)
            except RuntimeError:
                raise Cancelled("the client left") from None
            return
        if self._thread is None:
            self._thread = _SenderThread(self._sender)
        self._thread.put(message)
        await self._until_left(AHEAD)

    def _fits(self, message: Wire) -> bool:
        """Whether the runtime takes `message` without blocking even if nothing of this stream has been read."""
        if self._sent < INLINE_MESSAGES:
            self._sent += 1
            return True
        if self._bytes < INLINE_BYTES:
            self._bytes += len(msgspec.msgpack.encode(message))
        return self._bytes < INLINE_BYTES

    async def close(self) -> None:
        """End the stream well, once all of it has been sent. Raises as `send` does."""
        await self._until_left(0)
        self._sender.close()

    async def _until_left(self, count: int) -> None:
        """Wait until no more than `count` messages are left to send."""
        if self._thread is None or self._thread.left <= count:
            return
        try:
            async with asyncio.timeout(self._stall_s):
                await self._thread.until_left(count)
        except TimeoutError:
            self.release()
            raise ReaderStalled(f"the client has not read for {self._stall_s:g} s") from None

    def release(self) -> None:
        """Let the thread go, if there is one. It ends when its last send returns."""
        if self._thread is not None:
            self._thread.release()


class _SenderThread:
    """A daemon thread that sends for one stream, so that nothing else waits for its reader.

    The loop counts what it puts in and the thread what it has sent. Whoever waits says so first and looks again then;
    the thread counts first and looks for who waits then: one of them sees the other, with no lock between them.
    """

    def __init__(self, sender: Sender) -> None:
        self._sender = sender
        self._loop = asyncio.get_running_loop()
        self._inbox: queue.SimpleQueue[Wire | None] = queue.SimpleQueue()
        self._put = 0
        self._sent = 0
        self._error: Exception | None = None
        self._released = False
        self._waiting: asyncio.Future[None] | None = None
        threading.Thread(target=self._run, name="baton-egress", daemon=True).start()

    @property
    def left(self) -> int:
        """How many messages have not been sent. Raises what one of them failed with."""
        if self._error is not None:
            raise self._error
        return self._put - self._sent

    def put(self, message: Wire) -> None:
        """Take `message` to be sent after those before it. Raises what one of those failed with."""
        if self._error is not None:
            raise self._error
        self._put += 1
        self._inbox.put(message)

    async def until_left(self, count: int) -> None:
        """Wait until no more than `count` messages are left. Raises what one of them failed with."""
        try:
            while True:
                self._waiting = self._loop.create_future()
                if self.left <= count:
                    return
                await self._waiting
        finally:
            self._waiting = None

    def release(self) -> None:
        """Send nothing more, and end."""
        self._released = True
        self._inbox.put(None)

    def _run(self) -> None:
        while (message := self._inbox.get()) is not None and not self._released:
            try:
                self._sender.send(message)
            except RuntimeError:
                self._error = Cancelled("the client left")
            except Exception as raised:  # noqa: BLE001 - raised where the next message is sent
                self._error = raised
            self._sent += 1
            if (waiting := self._waiting) is not None:
                try:
                    self._loop.call_soon_threadsafe(_settle, waiting)
                except RuntimeError:  # the loop has closed: nobody waits
                    return
            if self._error is not None:
                return


def _settle(waiting: asyncio.Future[None]) -> None:
    if not waiting.done():
        waiting.set_result(None)
