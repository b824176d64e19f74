"""Settings of the built-in engine."""

from typing import Annotated, Literal

import msgspec
from msgspec import Meta


class TorchOptions(msgspec.Struct, frozen=True, kw_only=True):
    """Where the built-in engine runs, how much it holds, and how it batches."""

    device: Annotated[
        str, Meta(pattern="^(auto|cpu|cuda(:[0-9]+)?)$", description="cpu, cuda, cuda:N; auto finds out")
    ] = "auto"
    dtype: Annotated[
        Literal["auto", "bfloat16", "float32"], Meta(description="type of weights and KV; auto is bfloat16")
    ] = "auto"
    threads: Annotated[int, Meta(ge=0, description="cores to compute with; 0 is all that this process may use")] = 0
    context: Annotated[int, Meta(ge=0, description="context length in tokens; 0 is the model's own")] = 0
    block: Annotated[int, Meta(ge=1, le=1024, description="tokens in a KV block")] = 16
    blocks: Annotated[int, Meta(ge=0, description="KV blocks; 0 takes kv_share of the free memory")] = 0
    kv_share: Annotated[float, Meta(gt=0, le=0.95, description="share of the free memory for KV when blocks is 0")] = (
        0.3
    )
    max_running: Annotated[int, Meta(ge=1, le=4096, description="choices that run at once; others wait")] = 64
    batch_tokens: Annotated[
        int,
        Meta(
            ge=0, description="most tokens in one step; longer prompts are cut into chunks; 0 is what suits the device"
        ),
    ] = 0
    prefix_reuse: Annotated[
        bool, Meta(description="keep the blocks of finished requests for prompts that begin alike")
    ] = True
    native: Annotated[
        bool, Meta(description="compute on a CPU with the compiled step, where a C++ compiler is found")
    ] = True
    spill_dir: Annotated[str, Meta(description="where released weights wait on disk")] = "~/.cache/baton/spill"


def step_tokens(options: TorchOptions, device: str) -> int:
    """Return the most tokens in one step.

    A long step holds up whatever decodes beside it. A CPU is as fast with short ones; a GPU is not.
    """
    return options.batch_tokens or (256 if device == "cpu" else 2048)
