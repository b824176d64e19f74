"""References to images, video and audio inside a request."""

import msgspec

from baton.protocol.extra import Extra, extra_field


class MediaItem(msgspec.Struct, frozen=True, kw_only=True):
    """One piece of media: a URL that the worker fetches under its access policy, or a transfer descriptor
    of media that the frontend has already decoded. Exactly one of the two is set."""

    url: str | None = msgspec.field(default=None, name="Url")
    decoded: dict[str, object] | None = msgspec.field(default=None, name="Decoded")
    extra: Extra = extra_field()

    def __post_init__(self) -> None:
        if (self.url is None) == (self.decoded is None):
            raise ValueError("a media item has either `Url` or `Decoded`")


class MediaUrl(msgspec.Struct, frozen=True, kw_only=True):
    """Media that a request names by URL; `place` is the path in the request. The worker fetches them."""

    modality: str
    url: str
    place: str


class MediaFile(msgspec.Struct, frozen=True, kw_only=True, tag="file"):
    """A media file, fetched under the worker's access policy: PNG, MP4, or another format that the engine reads."""

    modality: str
    data: bytes
    place: str = "media"


class MediaEmbedding(msgspec.Struct, frozen=True, kw_only=True, tag="embedding"):
    """Media encoded elsewhere: rows of an array, and the grid of each item in time, height and width."""

    modality: str
    data: bytes
    dtype: str
    shape: tuple[int, ...]
    grid: tuple[tuple[int, int, int], ...] = ()


class MediaHandles(msgspec.Struct, frozen=True, kw_only=True, tag="handles"):
    """All media of a prompt, encoded and held by an encode worker. Only engines of the same kind can read them."""

    params: dict[str, object]


Media = MediaFile | MediaEmbedding | MediaHandles
