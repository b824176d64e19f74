"""References to images, video and audio inside a request."""

import msgspec

from baton.protocol.extra import Extra, extra_field

# Before a URL that the frontend must not fetch: it reads the first bytes of images at URLs that it knows, by its own
# rules, which uses up a URL that works once.
UNFETCHED = "baton:"


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


class DecodeLimits(msgspec.Struct, frozen=True, kw_only=True):
    """What decoding a media file may take, whatever its header says.

    An image has at most `max_pixels`. A video has at most `max_frames` frames of at most `max_frame_pixels` each, and
    lasts at most `max_duration_s`; those of its frames that are taken have at most `max_video_pixels` together, and
    decoding them takes at most `timeout_s`.
    """

    max_pixels: int = 50_000_000
    max_frames: int = 108_000
    max_frame_pixels: int = 9_000_000
    max_duration_s: float = 3600.0
    max_video_pixels: int = 150_000_000
    timeout_s: float = 20.0


class MediaFile(msgspec.Struct, frozen=True, kw_only=True, tag="file", weakref=True):
    """A media file, fetched under the worker's access policy: PNG, MP4, or another format that the engine reads.

    `size` is the width and height in pixels that the header of an image or video names: of an image as it is shown, of
    a video before it is rotated. It is None where it has not been read. Whoever decodes the file keeps `limits`. Its
    bytes count against the limits of the loader as long as the file exists.
    """

    modality: str
    data: bytes
    place: str = "media"
    size: tuple[int, int] | None = None
    limits: DecodeLimits = DecodeLimits()


class EmbeddingFile(msgspec.Struct, frozen=True, kw_only=True, tag="embedding_file", weakref=True):
    """Rows that the client has computed for one piece of media, from a safetensors file that has been checked.

    `data` has `rows` rows of `size` finite numbers of type `dtype` (float32, float16 or bfloat16), contiguous. `grid`,
    `seconds_per_grid` and `timestamps` are as in `EncodedItem`; whether they and the shape fit the model is not checked
    here.
    """

    modality: str
    data: memoryview
    dtype: str
    rows: int
    size: int
    grid: tuple[tuple[int, int, int], ...] = ()
    seconds_per_grid: float | None = None
    timestamps: tuple[float, ...] = ()
    place: str = "media"


class EncodedItem(msgspec.Struct, frozen=True, kw_only=True):
    """One piece of media that has been encoded to rows, without the rows. It crosses the wire.

    `content_hash` identifies the rows: it covers the media, the preprocessing and the encoder. `expansion` is what
    replaces the item's placeholder in the prompt, as (token, count) runs; every `embed_token` in it is one row, so
    there are `rows` of them. `grid` is the size in time, height and width of each part, in patches, for encoders with
    3-D positions; `seconds_per_grid` and `timestamps` place the frames of a video in time.
    """

    modality: str
    content_hash: str
    expansion: tuple[tuple[int, int], ...]
    embed_token: int
    rows: int
    grid: tuple[tuple[int, int, int], ...] = ()
    seconds_per_grid: float | None = None
    timestamps: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        if sum(count for token, count in self.expansion if token == self.embed_token) != self.rows:
            raise ValueError(f"the expansion does not have {self.rows} places for rows")

    @property
    def prompt_tokens(self) -> int:
        """How many tokens of the prompt the item takes."""
        return sum(count for _, count in self.expansion)


class PlacedItem(msgspec.Struct, frozen=True, kw_only=True):
    """An encoded item and its placeholder: the index in the token ids of the request, before any expansion."""

    item: EncodedItem
    index: int


class HeldItem(msgspec.Struct, frozen=True, kw_only=True):
    """An encoded item whose rows another worker holds: `nbytes` of them, in `blocks` blocks of its memory."""

    item: EncodedItem
    nbytes: int
    blocks: int


class EncodedMedia(msgspec.Struct, frozen=True, kw_only=True):
    """The descriptor of rows that an encode worker holds for the worker that computes the prompt.

    Rows have `size` numbers of type `dtype`, of the encoder `model`. `owner` is the address of the worker that holds
    them until `expires_at` (seconds since 1970), unless they are claimed before. Its room offers the blocks of each
    different item once, in the order of `items`.
    """

    owner: str
    expires_at: float
    model: str
    dtype: str
    size: int
    items: tuple[HeldItem, ...]


class MediaEmbedding(msgspec.Struct, frozen=True, kw_only=True, tag="embedding"):
    """An encoded item at its place in the prompt: its expansion begins at token `position` of `Work.token_ids`.

    `data` has the rows, contiguous, of `size` numbers of type `dtype` each; it is valid until the work has ended. It is
    None where the KV of the prompt comes from another worker: the rows are in the KV, and the item still decides
    positions and block hashes. `routing_hash` is the number, in hexadecimal, by which the frontend's router knows the
    media; KV events name it.
    """

    item: EncodedItem
    position: int
    dtype: str
    size: int
    data: memoryview | None = None
    routing_hash: str | None = None

    @property
    def modality(self) -> str:
        """The modality of the item."""
        return self.item.modality


class MediaHandles(msgspec.Struct, frozen=True, kw_only=True, tag="handles"):
    """All media of a prompt, encoded and held by an encode worker. Only engines of the same kind can read them."""

    params: dict[str, object]


Media = MediaFile | MediaEmbedding | MediaHandles
LoadedMediaItem = MediaFile | EmbeddingFile
