"""One connection between the two sides of a room: messages both ways, and heartbeats that detect a lost peer."""

import asyncio
from collections.abc import Callable
from typing import cast

from baton.errors import PeerLost
from baton.transfer.wire import (
    MAX_CLAIM_FRAME_BYTES,
    MAX_FRAME_BYTES,
    ROOM_PREAMBLE,
    Frames,
    Heartbeat,
    Message,
    encode,
)

MAX_UNSENT_BYTES = 8 << 20


class RoomConnection(asyncio.Protocol):
    """Calls `on_message` for each message but heartbeats, and `on_lost` once, unless `close` was called before."""

    def __init__(self, heartbeat_s: float, peer_timeout_s: float, max_frame_bytes: int, preamble: bytes = b"") -> None:
        self.on_message: Callable[[Message], None] = _ignore
        self.on_lost: Callable[[PeerLost], None] = _ignore
        self._heartbeat_s = heartbeat_s
        self._peer_timeout_s = peer_timeout_s
        self._preamble = preamble
        self._loop = asyncio.get_running_loop()
        self._frames = Frames(max_frame_bytes)
        self._transport: asyncio.Transport | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._received_at = self._loop.time()
        self._ended = False
        self._closed: asyncio.Future[None] = self._loop.create_future()

    async def wait_closed(self) -> None:
        """Wait until the established connection is closed on both sides."""
        await asyncio.shield(self._closed)

    def send(self, message: Message) -> None:
        """Send `message`, unless the connection has ended."""
        if self._transport is not None and not self._ended:
            self._transport.write(encode(message))
            if self._transport.get_write_buffer_size() > MAX_UNSENT_BYTES:
                self._lose(PeerLost("the other worker does not read from its connection"))

    def close(self) -> None:
        """Close the connection once the other side has read everything.

        An immediate close would make the other side's next write fail, and discard what it has not read yet. So this
        half-closes and waits until the other side closes too, or the peer timeout has passed.
        """
        self._end()
        if self._transport is None or self._transport.is_closing():
            return
        try:
            self._transport.write_eof()
        except (OSError, RuntimeError):  # a cancelled connect has closed it already
            self._transport.abort()
        else:
            self._timer = self._loop.call_later(self._peer_timeout_s, self._transport.abort)

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """See `asyncio.Protocol`."""
        self._transport = cast(asyncio.Transport, transport)
        if self._ended:
            self._transport.abort()
            return
        self._transport.write(self._preamble)
        self._received_at = self._loop.time()
        self._timer = self._loop.call_later(self._heartbeat_s, self._beat)

    def data_received(self, data: bytes) -> None:
        """See `asyncio.Protocol`."""
        if self._ended:
            return  # anybody may send this, and as much as fits the peer timeout: it must not be buffered
        self._received_at = self._loop.time()
        try:
            for message in self._frames.feed(data):
                if not self._ended and not isinstance(message, Heartbeat):
                    self.on_message(message)
        except PeerLost as error:
            self._lose(error)

    def connection_lost(self, exc: Exception | None) -> None:
        """See `asyncio.Protocol`."""
        self._transport = None
        self._lose(PeerLost("the other worker closed the connection" if exc is None else f"connection lost: {exc}"))
        self._end()
        self._closed.set_result(None)

    def _beat(self) -> None:
        silent_s = self._loop.time() - self._received_at
        if silent_s > self._peer_timeout_s:
            self._lose(PeerLost(f"the other worker has sent nothing for {silent_s:.1f} s"))
        else:
            self.send(Heartbeat())
            self._timer = self._loop.call_later(self._heartbeat_s, self._beat)

    def _lose(self, error: PeerLost) -> None:
        if not self._ended:
            self._end()
            if self._transport is not None:
                self._transport.abort()
            self.on_lost(error)

    def _end(self) -> None:
        self._ended = True
        if self._timer is not None:
            self._timer.cancel()


def outgoing_connection(heartbeat_s: float, peer_timeout_s: float) -> RoomConnection:
    """Return the connection of a consumer, which sends the preamble when it is established."""
    return RoomConnection(heartbeat_s, peer_timeout_s, MAX_FRAME_BYTES, ROOM_PREAMBLE)


def incoming_connection(heartbeat_s: float, peer_timeout_s: float) -> RoomConnection:
    """Return the connection of a producer, whose preamble has been read."""
    return RoomConnection(heartbeat_s, peer_timeout_s, MAX_CLAIM_FRAME_BYTES)


def _ignore(_: object) -> None:
    """The default callback."""
