"""The MediaLoader of a worker: fetches all media of a request under the policy, and checks what it got."""

import asyncio
from collections.abc import Sequence

import msgspec

from baton.config.media import MediaOptions
from baton.errors import ConfigError, InvalidRequest
from baton.media.byte_budget import ByteBudget, RequestBytes
from baton.media.data_urls import estimated_size, is_data_url
from baton.media.embedding_file import names_embeddings, read_embeddings, refuse_pickle
from baton.media.fetch import Fetcher
from baton.media.images import image_size
from baton.media.policy import Policy
from baton.media.threads import ThreadPool
from baton.media.video import video_size
from baton.protocol.media import DecodeLimits, LoadedMediaItem, MediaFile, MediaUrl

# Threads that read headers. Not those that decode: a header must not wait for a video.
CHECKS = 4


class PolicyLoader:
    """A MediaLoader (see `ports/media.py`). Raises ConfigError for invalid options."""

    def __init__(self, options: MediaOptions, fetcher: Fetcher | None = None) -> None:
        if options.max_total_bytes < options.max_request_bytes:
            raise ConfigError("--media-max-total-bytes is less than --media-max-request-bytes")
        self._options = options
        self._limits = DecodeLimits(
            max_pixels=options.max_pixels,
            max_frames=options.max_video_frames,
            max_frame_pixels=options.max_frame_pixels,
            max_duration_s=options.max_video_s,
            max_video_pixels=options.max_video_pixels,
            timeout_s=options.decode_timeout_s,
        )
        self._fetcher = fetcher or Fetcher(Policy(options))
        self._checks = ThreadPool("media-checks", CHECKS)
        self._bytes = ByteBudget(options.max_total_bytes, options.max_request_bytes)

    @property
    def held_bytes(self) -> int:
        """How many bytes of media there are: loaded and not dropped yet, or being fetched."""
        return self._bytes.held

    async def load(self, named: Sequence[MediaUrl]) -> tuple[LoadedMediaItem, ...]:
        """See `MediaLoader.load`."""
        if len(named) > self._options.max_items:
            raise InvalidRequest(
                f"multi_modal_data: {len(named)} items exceed the limit of {self._options.max_items} for a request"
            )
        kinds = [names_embeddings(each) for each in named]
        known = sum(estimated_size(each.url) for each in named if is_data_url(each.url))
        deadline = asyncio.get_running_loop().time() + self._options.timeout_s
        share = await self._bytes.open(known, self._options.timeout_s)
        try:
            async with asyncio.TaskGroup() as group:
                loading = [
                    group.create_task(self._load_in_time(each, kind, share, deadline))
                    for each, kind in zip(named, kinds, strict=True)
                ]
            items = tuple(task.result() for task in loading)
            share.keep(items)
        except ExceptionGroup as problems:
            raise problems.exceptions[0] from None
        finally:
            share.close()
        return items

    def release(self, loaded: Sequence[LoadedMediaItem]) -> None:
        """See `MediaLoader.release`."""
        for item in loaded:
            self._bytes.release(item)

    async def close(self) -> None:
        """See `MediaLoader.close`."""
        self._checks.close()
        await self._fetcher.close()

    async def _load_in_time(
        self, media: MediaUrl, is_embeddings: bool, share: RequestBytes, deadline: float
    ) -> LoadedMediaItem:
        try:
            async with asyncio.timeout_at(deadline):
                return await self._load(media, is_embeddings, share)
        except TimeoutError:
            raise InvalidRequest(f"{media.place}: fetching it took longer than {self._options.timeout_s:g} s") from None

    async def _load(self, media: MediaUrl, is_embeddings: bool, share: RequestBytes) -> LoadedMediaItem:
        data = await self._fetcher.fetch(media, share)
        if is_embeddings:
            return await self._checks.run(read_embeddings, media, data)
        file = MediaFile(modality=media.modality, data=data, place=media.place, limits=self._limits)
        size = await self._checks.run(_checked_size, file)
        return msgspec.structs.replace(file, size=size)


def _checked_size(file: MediaFile) -> tuple[int, int] | None:
    """Return the size in the header, for modalities that have one. Raises InvalidRequest."""
    refuse_pickle(file.data, file.place)
    match file.modality:
        case "image":
            return image_size(file)
        case "video":
            return video_size(file)
    return None
