"""The MediaLoader of a worker: fetches all media of a request under the policy, and checks images."""

import asyncio
from collections.abc import Sequence

from baton.config.media import MediaOptions
from baton.errors import InvalidRequest
from baton.media.fetch import Fetcher
from baton.media.images import check_image
from baton.media.policy import Policy
from baton.protocol.media import MediaFile, MediaUrl


class PolicyLoader:
    """A MediaLoader (see `ports/media.py`). Raises ConfigError for invalid options."""

    def __init__(self, options: MediaOptions, fetcher: Fetcher | None = None) -> None:
        self._options = options
        self._fetcher = fetcher or Fetcher(Policy(options))

    async def load(self, media: Sequence[MediaUrl]) -> tuple[MediaFile, ...]:
        """See `MediaLoader.load`."""
        if len(media) > self._options.max_items:
            raise InvalidRequest(
                f"multi_modal_data: {len(media)} items exceed the limit of {self._options.max_items} for a request"
            )
        try:
            async with asyncio.TaskGroup() as group:
                loading = [group.create_task(self._load(each)) for each in media]
        except ExceptionGroup as problems:
            raise problems.exceptions[0] from None
        return tuple(task.result() for task in loading)

    async def close(self) -> None:
        """See `MediaLoader.close`."""
        await self._fetcher.close()

    async def _load(self, media: MediaUrl) -> MediaFile:
        file = MediaFile(modality=media.modality, data=await self._fetcher.fetch(media), place=media.place)
        if file.modality == "image":
            await asyncio.to_thread(check_image, file, self._options.max_pixels)
        return file
