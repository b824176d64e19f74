"""What a consumer knows of one producer process, and the channel to it that its handoffs share."""

import asyncio
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager

from baton.errors import PeerLost
from baton.ports.transfer import Channel


class ProducerPeer:
    """One producer process: its bootstrap address, and the channel to its memory once one has been negotiated.

    A channel is shared by all handoffs from that process, and closed when none of them uses it any more.
    """

    def __init__(self) -> None:
        self.bootstrap_address: tuple[str, int] | None = None
        self.channel: Channel | None = None
        self.transport = ""
        self.users = 0
        self.used_at = 0.0
        self._negotiating = asyncio.Lock()
        self._failure: PeerLost | None = None  # of the last negotiation that failed
        self._dropped = False

    async def negotiated(self, negotiate: Callable[[], Awaitable[tuple[Channel, str]]]) -> Channel:
        """Return the channel; the first call negotiates it.

        Raises PeerLost if that fails, also to the calls that wait for it: each would need as long to fail. A call that
        is cancelled leaves the negotiation to the next.
        """
        earlier = self._failure
        async with self._negotiating:
            if self.channel is not None:
                return self.channel
            if self._failure is not None and self._failure is not earlier:
                raise PeerLost(self._failure.message)
            try:
                self.channel, self.transport = await negotiate()
            except PeerLost as error:
                self._failure = PeerLost(error.message)  # without the frames of a traceback
                raise
            return self.channel

    def drop(self) -> None:
        """No further handoff will use this."""
        self._dropped = True
        self._close_if_unused()

    @contextmanager
    def in_use(self) -> Iterator[None]:
        """The channel stays open while the block runs."""
        self.users += 1
        try:
            yield
        finally:
            self.users -= 1
            self._close_if_unused()

    def _close_if_unused(self) -> None:
        if self._dropped and not self.users and self.channel is not None:
            self.channel.close()
            self.channel = None
