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


class MediaUrl(msgspec.Struct, frozen=True, kw_only=True, tag="url"):
    """Media that the engine fetches and encodes itself. The worker's access policy has allowed it."""

    modality: str
    url: str


class MediaEmbedding(msgspec.Struct, frozen=True, kw_only=True, tag="embedding"):
    """Media that has been encoded elsewhere: rows of an array, and how they lie in time, height and width."""

    modality: str
    data: bytes
    dtype: str
    shape: tuple[int, ...]
    grid: tuple[tuple[int, int, int], ...] = ()


Media = MediaUrl | MediaEmbedding
