"""Options of each engine. Arguments that belong to an engine's own parser follow `--` and are not listed here."""

from typing import Annotated, Literal

import msgspec
from msgspec import Meta

Ms = Annotated[float, Meta(ge=0)]

TRIVIAL_LAYOUT = "trivial"
DEFAULT_REBALANCE_INTERVAL = 1000


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
    block_size: Annotated[int, Meta(ge=1, le=1024, description="tokens in a KV block")] = 16
    blocks: Annotated[int, Meta(ge=0, description="KV blocks; 0 takes kv_share of the free memory")] = 0
    kv_memory_fraction: Annotated[
        float, Meta(gt=0, le=0.95, description="share of the free memory for KV when blocks is 0")
    ] = 0.3
    max_running: Annotated[int, Meta(ge=1, le=4096, description="choices that run at once; others wait")] = 64
    batch_tokens: Annotated[
        int,
        Meta(
            ge=0, description="most tokens in one step; longer prompts are cut into chunks; 0 is what suits the device"
        ),
    ] = 0
    prefix_cache: Annotated[
        bool, Meta(description="keep the blocks of finished requests for prompts that begin alike")
    ] = True
    native: Annotated[
        bool, Meta(description="compute on a CPU with the compiled step, where a C++ compiler is found")
    ] = True
    spill_dir: Annotated[
        str, Meta(description="directory that released weights are written to; empty is ~/.cache/baton/spill")
    ] = ""


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


class ExpertOptions(msgspec.Struct, frozen=True, kw_only=True):
    """How the experts of a mixture model are spread over ranks, measured and moved."""

    eplb: Annotated[bool, Meta(description="move experts between ranks while serving, by what was recorded")] = False
    redundant: Annotated[
        int, Meta(ge=0, le=65536, description="extra copies of experts, over all ranks; busy experts get them")
    ] = 0
    recorder: Annotated[
        Literal["off", "stat", "stat_approx", "per_pass", "per_token"],
        Meta(
            description="what is recorded of experts: stat counts, stat_approx does so cheaply with DeepEP in normal"
            " mode, per_pass and per_token keep every pass in memory; eplb and report turn on stat"
        ),
    ] = "off"
    recorder_buffer: Annotated[
        int, Meta(ge=-1, description="forward passes that the recorder keeps; 0 is the engine's own, -1 is all")
    ] = 0
    layout: Annotated[
        str,
        Meta(min_length=1, description="where experts start: trivial, or a .json or .pt file of `baton experts plan`"),
    ] = TRIVIAL_LAYOUT
    algorithm: Annotated[
        Literal[
            "auto",
            "deepseek",
            "deepseek_hierarchical",
            "deepseek_vec",
            "deepseek_vec_hierarchical",
            "elasticity_aware",
            "elasticity_aware_hierarchical",
        ],
        Meta(description="how the engine places experts by counts; hierarchical keeps groups of experts on a node"),
    ] = "auto"
    interval: Annotated[int, Meta(ge=1, description="forward passes between two rebalances, with eplb")] = (
        DEFAULT_REBALANCE_INTERVAL
    )
    report: Annotated[
        Literal["off", "server_log", "prometheus", "both"],
        Meta(description="where the engine reports how evenly load is spread: mean rank by busiest rank"),
    ] = "off"


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
