"""The media loader: fetches the media that a request names. Handlers use it; engines never fetch."""

from collections.abc import Sequence
from typing import Protocol

from baton.protocol.media import MediaFile, MediaUrl


class MediaLoader(Protocol):
    """Fetches media, under the access policy of this worker. Calls may run concurrently."""

    async def load(self, named: Sequence[MediaUrl]) -> tuple[MediaFile, ...]:
        """Return the files of `named`, in its order; all or none.

        Raises InvalidRequest with the place in the request and the reason: forbidden by the policy, too large, timeout,
        host not reachable, or not of the expected format. Cancelling the call ends every fetch.
        """

    async def close(self) -> None:
        """Close connections. Idempotent."""
