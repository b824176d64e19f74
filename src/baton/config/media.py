"""Settings of what a worker fetches for its clients."""

from typing import Annotated

import msgspec
from msgspec import Meta


class MediaOptions(msgspec.Struct, frozen=True, kw_only=True):
    """Where images, audio and video of a request may come from, and how much of them."""

    encoders: Annotated[
        bool, Meta(description="workers of the role encode do the images of this one, which is not served without them")
    ] = False
    domains: Annotated[
        str,
        Meta(description="hosts to fetch from, with commas; each covers its subdomains; empty is every public one"),
    ] = ""
    private: Annotated[
        str, Meta(description="networks to fetch from although they are not public, with commas; like 10.1.0.0/16")
    ] = ""
    max_bytes: Annotated[int, Meta(ge=1, description="largest size of one piece, in bytes")] = 50_000_000
    max_pixels: Annotated[int, Meta(ge=1, description="largest size of an image, in pixels")] = 50_000_000
    max_items: Annotated[int, Meta(ge=0, description="pieces that one request may have")] = 32
    timeout_s: Annotated[
        float, Meta(gt=0, le=3600, description="longest that one piece may take to fetch; less than kv.claim_timeout_s")
    ] = 8.0
