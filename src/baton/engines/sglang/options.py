"""Settings of the SGLang engine that are Baton's own; everything else is SGLang's, written after `--`."""

from typing import Annotated

import msgspec
from msgspec import Meta


class SglangOptions(msgspec.Struct, frozen=True, kw_only=True):
    """What Baton decides for SGLang, and what it leaves to its own arguments."""

    guided: Annotated[
        bool,
        Meta(
            description="guided decoding and min_tokens; without, the engine has no tokenizer and does not turn every"
            " answer into text that nobody reads"
        ),
    ] = True
    metrics: Annotated[bool, Meta(description="publish SGLang's own metrics beside Baton's")] = True
    host: Annotated[
        str,
        Meta(
            min_length=1,
            description="the address that engines of other workers reach this one at, to fetch KV; with the engine's"
            " --dist-init-addr it is the host of that",
        ),
    ] = "127.0.0.1"
    start_s: Annotated[float, Meta(gt=0, description="the longest that loading and starting may take")] = 1800.0
