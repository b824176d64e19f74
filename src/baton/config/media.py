"""Settings for the media (images, audio, video) that a worker fetches."""

from typing import Annotated, Literal

import msgspec
from msgspec import Meta

_ROUTER_TOO = {"commands": ("serve", "worker", "router")}


class MediaOptions(msgspec.Struct, frozen=True, kw_only=True):
    """Allowed sources of media, and their limits."""

    encoders: Annotated[
        bool,
        Meta(
            description="Take encoded media from encode workers. `baton serve --encode` sets it for the workers that"
            " compute prompts, and for the global router.",
            extra=_ROUTER_TOO,
        ),
    ] = False
    local_encoding: Annotated[
        Literal["auto", "never"],
        Meta(
            description="auto: the worker encodes media itself if no encode worker has. never: only encode workers do;"
            " the worker need not load the encoder of the model, and with media.encoders the model is registered only"
            " while there is an encode worker.",
            extra=_ROUTER_TOO,
        ),
    ] = "auto"
    cache_bytes: Annotated[
        int,
        Meta(
            ge=1,
            description="Bytes of embeddings that a worker holds: those that requests use, and a cache of the others."
            " Requests whose media do not fit wait.",
        ),
    ] = 512 << 20
    domains: Annotated[
        str,
        Meta(description="Comma-separated hosts to fetch from, including subdomains. Empty: every public host."),
    ] = ""
    private: Annotated[
        str,
        Meta(
            description="Comma-separated private networks to fetch from as well, such as 10.1.0.0/16. A metadata"
            " service of a cloud is allowed only by its own address, such as 169.254.169.254/32."
        ),
    ] = ""
    local_dirs: Annotated[
        str,
        Meta(
            description="Comma-separated absolute directories whose files clients may name by file: URLs. Links are"
            " resolved first. Empty: file: URLs are refused."
        ),
    ] = ""
    max_bytes: Annotated[int, Meta(ge=1, description="Maximum size of one media item, in bytes.")] = 50_000_000
    max_request_bytes: Annotated[
        int, Meta(ge=1, description="Maximum size of all media items of a request together, in bytes.")
    ] = 200_000_000
    max_total_bytes: Annotated[
        int,
        Meta(
            ge=1,
            description="Maximum size of the media of all requests in progress, in bytes. Further requests with media"
            " wait for timeout_s, and get a 503 then. At least max_request_bytes.",
        ),
    ] = 1_000_000_000
    max_pixels: Annotated[int, Meta(ge=1, description="Maximum size of an image, in pixels.")] = 50_000_000
    max_items: Annotated[int, Meta(ge=0, description="Maximum number of media items in a request.")] = 32
    max_video_s: Annotated[float, Meta(gt=0, description="Maximum duration of a video, in seconds.")] = 3600.0
    max_video_frames: Annotated[
        int, Meta(ge=1, description="Maximum number of frames in a video file, whether they are used or not.")
    ] = 108_000
    max_frame_pixels: Annotated[
        int, Meta(ge=1, description="Maximum size of a frame of a video, in pixels. 9000000 is a little more than 4K.")
    ] = 9_000_000
    max_video_pixels: Annotated[
        int,
        Meta(
            ge=1,
            description="Maximum number of pixels of all frames of a video that the model gets, before they are scaled;"
            " each takes 3 bytes of memory.",
        ),
    ] = 150_000_000
    timeout_s: Annotated[
        float,
        Meta(
            gt=0,
            le=3600,
            description="Seconds that loading the media of a request may take, from waiting for max_total_bytes to the"
            " last byte. Keep it below kv.claim_timeout_s.",
        ),
    ] = 8.0
    decode_timeout_s: Annotated[
        float, Meta(gt=0, le=3600, description="Seconds that decoding the frames of one video may take.")
    ] = 20.0
