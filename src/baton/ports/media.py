"""How the media that a request names become bytes. Handlers ask; engines never fetch."""

from collections.abc import Sequence
from typing import Protocol

from baton.protocol.media import MediaFile, MediaUrl


class MediaLoader(Protocol):
    """Fetches media, under the access policy of this worker. Calls may run concurrently."""

    async def load(self, named: Sequence[MediaUrl]) -> tuple[MediaFile, ...]:
        """Return what `named` stands for, in its order; all of it or nothing.

        Raises InvalidRequest, which names the place in the request and says why: the policy forbids it, it is too
        large, it does not come in time, nobody is there, or it is not what it should be. Cancelling the call ends
        every fetch.
        """

    async def close(self) -> None:
        """Give up what is held open. Idempotent."""
