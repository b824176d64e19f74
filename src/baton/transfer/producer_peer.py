"""What a consumer knows of one producer process, and the channel to it that its handoffs share."""

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager

from baton.ports.transfer import Channel


class ProducerPeer:
    """One producer process: its bootstrap address, and the channel to its memory once one has been negotiated.

    A channel is shared by all handoffs from that process, and closed when none of them uses it any more.
    """

    def __init__(self) -> None:
        self.bootstrap_address: tuple[str, int] | None = None
        self.channel: Channel | None = None
        self.transport = ""
        self.negotiating = asyncio.Lock()
        self.users = 0
        self.used_at = 0.0
        self._dropped = False

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
