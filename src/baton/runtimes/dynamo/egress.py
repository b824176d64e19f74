"""How answers leave: pushed from the event loop, as long as that cannot block.

The runtime queues what is pushed. Of a stream that nobody reads it holds some three hundred messages, and what the
sockets' buffers take on top; then `send` blocks the thread that called it. So what surely fits is pushed from the event
loop, which is cheap, and everything after it from a thread of the stream's own: a stalled reader then holds up that
thread alone, while its tokens merge in the engine's stream.
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


class Sender(Protocol):
    """The runtime's response sender."""

    def send(self, message: Wire) -> None:
        """Queue a message. Blocks when the queue is full; raises RuntimeError when the caller has left."""

    def close(self) -> None:
        """End the stream well."""


class Egress:
    """The way out of one stream. Used by one task."""

    __slots__ = ("_bytes", "_sender", "_sent", "_stall_s", "_thread")

    def __init__(self, sender: Sender, stall_s: float) -> None:
        self._sender = sender
        self._sent = 0
        self._bytes = 0
        self._stall_s = stall_s
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
        try:
            async with asyncio.timeout(self._stall_s):
                await self._thread.send(message)
        except TimeoutError:
            raise ReaderStalled(f"the client has not read for {self._stall_s:g} s") from None

    def _fits(self, message: Wire) -> bool:
        """Whether the runtime takes `message` without blocking even if nothing of this stream has been read."""
        if self._sent < INLINE_MESSAGES:
            self._sent += 1
            return True
        if self._bytes < INLINE_BYTES:
            self._bytes += len(msgspec.msgpack.encode(message))
        return self._bytes < INLINE_BYTES

    def close(self) -> None:
        """End the stream well."""
        self._sender.close()

    def release(self) -> None:
        """Let the thread go, if there is one. It ends when its last send returns."""
        if self._thread is not None:
            self._thread.release()


class _SenderThread:
    """A daemon thread that sends for one stream, so that nothing else waits for its reader."""

    def __init__(self, sender: Sender) -> None:
        self._sender = sender
        self._loop = asyncio.get_running_loop()
        self._inbox: queue.SimpleQueue[tuple[Wire, asyncio.Future[None]] | None] = queue.SimpleQueue()
        threading.Thread(target=self._run, name="baton-egress", daemon=True).start()

    async def send(self, message: Wire) -> None:
        done: asyncio.Future[None] = self._loop.create_future()
        self._inbox.put((message, done))
        await done

    def release(self) -> None:
        self._inbox.put(None)

    def _run(self) -> None:
        while (item := self._inbox.get()) is not None:
            message, done = item
            error: Exception | None = None
            try:
                self._sender.send(message)
            except RuntimeError:
                error = Cancelled("the client left")
            except Exception as raised:  # noqa: BLE001 - raised where the message was sent
                error = raised
            try:
                self._loop.call_soon_threadsafe(_settle, done, error)
            except RuntimeError:  # the loop has closed: nobody waits for the answer
                return


def _settle(done: asyncio.Future[None], error: Exception | None) -> None:
    if done.done():
        return
    if error is None:
        done.set_result(None)
    else:
        done.set_exception(error)
