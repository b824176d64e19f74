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
        str, Meta(description="Comma-separated private networks to fetch from as well, such as 10.1.0.0/16.")
    ] = ""
    max_bytes: Annotated[int, Meta(ge=1, description="Maximum size of one media item, in bytes.")] = 50_000_000
    max_pixels: Annotated[int, Meta(ge=1, description="Maximum size of an image, in pixels.")] = 50_000_000
    max_items: Annotated[int, Meta(ge=0, description="Maximum number of media items in a request.")] = 32
    timeout_s: Annotated[
        float,
        Meta(
            gt=0,
            le=3600,
            description="Seconds that fetching one media item may take. Keep it below kv.claim_timeout_s.",
        ),
    ] = 8.0
