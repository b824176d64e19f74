"""The media loader: fetches the media that a request names. Handlers use it; engines never fetch."""

from collections.abc import Sequence
from typing import Protocol

from baton.protocol.media import LoadedMediaItem, MediaUrl


class MediaLoader(Protocol):
    """Fetches media, under the access policy of this worker. Calls may run concurrently."""

    async def load(self, named: Sequence[MediaUrl]) -> tuple[LoadedMediaItem, ...]:
        """Return what `named` names, in its order; all or none. Each item is fetched once.

        A URL of an embedding file becomes an EmbeddingFile, every other one a MediaFile, whose header has been checked
        if it is an image or a video; nothing has been decoded. Their bytes count against the limit of all requests
        until the last reference to them is dropped.

        Raises InvalidRequest with the place in the request and the reason: forbidden by the policy, larger than an item
        or a request may be, timeout, host not reachable, or not of the expected format. Raises Overloaded when other
        requests hold so many bytes of media that these do not fit within the time limit of a fetch. Cancelling the
        call ends every fetch.
        """

    def release(self, loaded: Sequence[LoadedMediaItem]) -> None:
        """Stop counting the bytes of items that are not used any more, even if something refers to them. Idempotent.

        The traceback of an error does, and until it is collected.
        """

    async def close(self) -> None:
        """Close connections. Idempotent."""
