"""Settings of the TensorRT-LLM engine that are Baton's. Everything else goes to the library itself, after `--`."""

from typing import Annotated, Literal

import msgspec
from msgspec import Meta


class TrtllmOptions(msgspec.Struct, frozen=True, kw_only=True):
    """Which of the library's engines runs, and how closely it is watched."""

    backend: Annotated[
        Literal["pytorch", "_autodeploy"], Meta(description="which of TensorRT-LLM's engines runs the model")
    ] = "pytorch"
    guided: Annotated[
        Literal["none", "xgrammar", "llguidance"], Meta(description="what keeps output inside a grammar")
    ] = "none"
    kv_events: Annotated[
        int, Meta(ge=0, description="KV events that the engine keeps until they are read; 0 tells none")
    ] = 100_000
    poll_ms: Annotated[float, Meta(gt=0, le=10_000, description="time between two looks at the engine's load")] = 100.0
