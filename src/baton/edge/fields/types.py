"""Types that fields of several routes share."""

from typing import Annotated, Literal

import msgspec
from msgspec import Meta

Text = Annotated[str, Meta(min_length=1)]
Positive = Annotated[int, Meta(ge=1)]
Count = Annotated[int, Meta(ge=0)]
Penalty = Annotated[float, Meta(ge=-2.0, le=2.0)]
Temperature = Annotated[float, Meta(ge=0.0, le=2.0)]
Share = Annotated[float, Meta(ge=0.0, le=1.0)]
Choices = Annotated[int, Meta(ge=1, le=128)]
Seed = Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)]
LogitBias = dict[str, Annotated[float, Meta(ge=-100.0, le=100.0)]]
TokenId = Annotated[int, Meta(ge=0, le=2**32 - 1)]
Stop = str | Annotated[list[str | TokenId], Meta(max_length=32)]
Prompt = str | Annotated[list[str | TokenId | list[TokenId]], Meta(min_length=1)]
Metadata = Annotated[dict[str, str], Meta(max_length=16)]
Retention = Literal["in_memory", "24h"]
Verbosity = Literal["low", "medium", "high"]
ReasoningEffort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]


class Diffusion(msgspec.Struct, forbid_unknown_fields=True):
    """How a diffusion language model decodes."""

    remasking: Literal["low_confidence_static", "low_confidence_dynamic"] | None = None
    block_length: Annotated[int, Meta(ge=1, le=1024)] | None = None
    steps: Annotated[int, Meta(ge=1, le=1024)] | None = None
    threshold: Share | None = None


class StreamOptions(msgspec.Struct, forbid_unknown_fields=True):
    """What a stream contains besides the answer."""

    include_usage: bool | None = None
    include_obfuscation: bool | None = None
    continuous_usage_stats: bool | None = None
