"""One connection between the two sides of a room: messages both ways, and the certainty that the other side lives."""

import asyncio
from collections.abc import Callable
from typing import cast

from baton.errors import PeerLost
from baton.transfer.wire import LINE, Beat, Frames, Message, encode

MAX_UNSENT_BYTES = 8 << 20


class RoomConnection(asyncio.Protocol):
    """Calls `on_message` for each message but beats, and `on_lost` once, unless it is closed from here before."""

    def __init__(self, heartbeat_s: float, peer_timeout_s: float, preamble: bytes = b"") -> None:
        self.on_message: Callable[[Message], None] = _ignore
        self.on_lost: Callable[[PeerLost], None] = _ignore
        self._beat_s = heartbeat_s
        self._silence_s = peer_timeout_s
        self._preamble = preamble
        self._loop = asyncio.get_running_loop()
        self._frames = Frames()
        self._transport: asyncio.Transport | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._heard = self._loop.time()
        self._over = False

    def send(self, message: Message) -> None:
        """Say `message`, if there is still somebody to say it to."""
        if self._transport is not None and not self._over:
            self._transport.write(encode(message))
            if self._transport.get_write_buffer_size() > MAX_UNSENT_BYTES:
                self._lose(PeerLost("the other worker does not read"))

    def close(self) -> None:
        """Hang up, once what has been said is heard.

        Who closes at once makes the other side's next word fail, and with it what it has not read yet, so this waits
        until the other side hangs up too, or has been silent for too long.
        """
        self._end()
        if self._transport is None or self._transport.is_closing():
            return
        try:
            self._transport.write_eof()
        except (OSError, RuntimeError):  # whoever gave up connecting has closed it already
            self._transport.abort()
        else:
            self._timer = self._loop.call_later(self._silence_s, self._transport.abort)

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """See `asyncio.Protocol`."""
        self._transport = cast(asyncio.Transport, transport)
        if self._over:
            self._transport.abort()
            return
        self._transport.write(self._preamble)
        self._heard = self._loop.time()
        self._timer = self._loop.call_later(self._beat_s, self._beat)

    def data_received(self, data: bytes) -> None:
        """See `asyncio.Protocol`."""
        self._heard = self._loop.time()
        try:
            for message in self._frames.feed(data):
                if not self._over and not isinstance(message, Beat):
                    self.on_message(message)
        except PeerLost as error:
            self._lose(error)

    def connection_lost(self, exc: Exception | None) -> None:
        """See `asyncio.Protocol`."""
        self._transport = None
        self._lose(PeerLost("the other worker hung up" if exc is None else f"the other worker is gone: {exc}"))
        self._end()

    def _beat(self) -> None:
        silent_s = self._loop.time() - self._heard
        if silent_s > self._silence_s:
            self._lose(PeerLost(f"nothing was heard of the other worker for {silent_s:.1f} s"))
        else:
            self.send(Beat())
            self._timer = self._loop.call_later(self._beat_s, self._beat)

    def _lose(self, error: PeerLost) -> None:
        if not self._over:
            self._end()
            if self._transport is not None:
                self._transport.abort()
            self.on_lost(error)

    def _end(self) -> None:
        self._over = True
        if self._timer is not None:
            self._timer.cancel()


def outgoing_connection(heartbeat_s: float, peer_timeout_s: float) -> RoomConnection:
    """Return a line that says what it is when it is connected."""
    return RoomConnection(heartbeat_s, peer_timeout_s, LINE)


def _ignore(_: object) -> None:
    """Nobody listens yet."""
