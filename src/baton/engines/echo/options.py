"""Settings of the echo engine."""

from typing import Annotated

import msgspec
from msgspec import Meta

Ms = Annotated[float, Meta(ge=0)]


class EchoOptions(msgspec.Struct, frozen=True, kw_only=True):
    """How fast the echo engine is, how much it holds, and whether prompts may make it fail."""

    pace_ms: Annotated[Ms, Meta(description="time between two tokens of a request; 0 is flat out")] = 0.0
    burst: Annotated[
        int, Meta(ge=1, description="tokens of a request between two turns of the event loop when flat out")
    ] = 8
    prefill_ms: Annotated[Ms, Meta(description="time before the first token of a request")] = 0.0
    context: Annotated[int, Meta(ge=2, description="context length in tokens")] = 1_048_576
    blocks: Annotated[int, Meta(ge=1, description="KV blocks, of 16 tokens each")] = 131_072
    max_running: Annotated[int, Meta(ge=1, description="requests that run at once; others wait")] = 4096
    media: Annotated[
        bool, Meta(description="take images, encode them for others, and say how large they are; for tests")
    ] = False
    faults: Annotated[
        bool, Meta(description="obey [[fail:N]], [[stall]], [[die]] and [[refuse]] in a prompt; for tests")
    ] = False
