"""Options of each engine. Arguments of an engine's own parser follow `--` and are not listed here."""

from typing import Annotated, Literal

import msgspec
from msgspec import Meta

Ms = Annotated[float, Meta(ge=0)]

TRIVIAL_LAYOUT = "trivial"
DEFAULT_REBALANCE_INTERVAL = 1000


class TorchOptions(msgspec.Struct, frozen=True, kw_only=True):
    """Device, memory and batching of the built-in engine."""

    device: Annotated[
        str,
        Meta(
            pattern="^(auto|cpu|cuda(:[0-9]+)?)$", description="Device: cpu, cuda or cuda:N. auto: cuda if available."
        ),
    ] = "auto"
    dtype: Annotated[
        Literal["auto", "bfloat16", "float32"], Meta(description="Data type of weights and KV. auto: bfloat16.")
    ] = "auto"
    threads: Annotated[int, Meta(ge=0, description="Number of compute threads. 0: all cores of this process.")] = 0
    context: Annotated[int, Meta(ge=0, extra={"commands": ()})] = 0
    """Set from the setting `context_length` of every engine."""
    block_size: Annotated[int, Meta(ge=1, le=1024, description="Tokens per KV block.")] = 16
    blocks: Annotated[int, Meta(ge=0, description="Number of KV blocks. 0: sized by kv_memory_fraction.")] = 0
    kv_memory_fraction: Annotated[
        float,
        Meta(
            ge=0,
            le=0.95,
            description="Fraction of the memory that is free after the weights for KV blocks, if blocks is 0. Lower it"
            " where several workers share a device. 0: 0.3 on a CPU, 0.85 on a GPU.",
        ),
    ] = 0.0
    max_running: Annotated[
        int,
        Meta(
            ge=0,
            le=4096,
            description="Maximum number of sequences in a batch; others wait. 0: 64 on a CPU, 128 to 512 on a GPU, by"
            " its memory.",
        ),
    ] = 0
    batch_tokens: Annotated[
        int,
        Meta(
            ge=0,
            description="Maximum number of tokens in a step; longer prompts are prefilled in chunks. Lower it for"
            " shorter token gaps, raise it for prefill throughput. 0: 256 on a CPU, 2048 to 8192 on a GPU, by"
            " its memory.",
        ),
    ] = 0
    prefix_cache: Annotated[
        bool, Meta(description="Keep KV blocks of finished requests for prompts with the same prefix.")
    ] = True
    native: Annotated[
        bool, Meta(description="Use the compiled C++ step on a CPU, if a compiler is found. Disable it to profile.")
    ] = True
    spill_dir: Annotated[
        str,
        Meta(description="Directory for weights that memory/release moves out of memory. Empty: ~/.cache/baton/spill."),
    ] = ""


class SglangOptions(msgspec.Struct, frozen=True, kw_only=True):
    """Options of the SGLang adapter."""

    guided: Annotated[
        bool,
        Meta(
            description="Support guided decoding and min_tokens. Disable it to run SGLang without its tokenizer and"
            " save the CPU time of detokenization."
        ),
    ] = True
    metrics: Annotated[bool, Meta(description="Include SGLang's own metrics in /metrics.")] = True
    host: Annotated[
        str,
        Meta(
            description="Address at which SGLang engines of decode workers reach this one to fetch KV. Empty: that of"
            " --runtime-bind. With SGLang's --dist-init-addr it is the host of that address.",
        ),
    ] = ""
    group_backend: Annotated[
        Literal["auto", "nccl", "gloo"],
        Meta(
            description="Backend of the process groups that weights are broadcast in; the trainer's must be the same."
            " auto: nccl on a GPU, gloo on a CPU. NCCL does not connect two processes on one GPU; gloo does."
        ),
    ] = "auto"


class ExpertOptions(msgspec.Struct, frozen=True, kw_only=True):
    """Recording, placement and rebalancing of the experts of a mixture-of-experts model."""

    eplb: Annotated[bool, Meta(description="Rebalance experts between ranks while serving, by recorded counts.")] = (
        False
    )
    ranks: Annotated[
        int,
        Meta(
            ge=1,
            le=1024,
            description="Ranks that the experts are divided over: parts of one worker's memory, each computed by its"
            " own share of the threads. torch only; SGLang's --ep-size follows `--`.",
        ),
    ] = 1
    nodes: Annotated[
        int,
        Meta(
            ge=1,
            le=1024,
            description="Nodes that the ranks are divided over, for the hierarchical algorithm. torch only; SGLang's"
            " --nnodes follows `--`.",
        ),
    ] = 1
    redundant: Annotated[int, Meta(ge=0, le=65536, description="Number of redundant expert copies over all ranks.")] = 0
    recorder: Annotated[
        Literal["off", "stat", "stat_approx", "per_pass", "per_token"],
        Meta(
            description="What to record. stat: counts per expert. stat_approx: the same at lower cost (torch: of one"
            " pass in eight; sglang: with DeepEP in normal mode). per_pass, per_token: every pass, in memory. eplb and"
            " report imply stat."
        ),
    ] = "off"
    recorder_buffer: Annotated[
        int, Meta(ge=-1, description="Forward passes that the recorder keeps. 0: as many as interval. -1: all.")
    ] = 0
    layout: Annotated[
        str,
        Meta(min_length=1, description="Initial placement: trivial, or a .json or .pt file of `baton experts plan`."),
    ] = TRIVIAL_LAYOUT
    algorithm: Annotated[
        Literal[
            "auto",
            "global",
            "hierarchical",
            "deepseek",
            "deepseek_hierarchical",
            "deepseek_vec",
            "deepseek_vec_hierarchical",
            "elasticity_aware",
            "elasticity_aware_hierarchical",
        ],
        Meta(
            description="Algorithm that places experts by counts. hierarchical keeps a group of experts on one node."
            " torch: auto, global or hierarchical. sglang: auto, or one of the others."
        ),
    ] = "auto"
    interval: Annotated[int, Meta(ge=1, description="Forward passes between two rebalances, with eplb.")] = (
        DEFAULT_REBALANCE_INTERVAL
    )
    layers_per_chunk: Annotated[
        int,
        Meta(
            ge=0,
            description="Layers that a rebalance moves between two forward passes, with eplb. Lower it for shorter"
            " interruptions. 0: all at once.",
        ),
    ] = 0
    utilization_threshold: Annotated[
        float,
        Meta(
            gt=0,
            le=1,
            description="Rebalance only if the mean balancedness of the recorded passes is at most this, with eplb."
            " 1.0: always.",
        ),
    ] = 1.0
    dispatch: Annotated[
        Literal["auto", "static", "dynamic", "fake", "lp"],
        Meta(
            description="How one of several copies of an expert is chosen. static: the same copy for all tokens of a"
            " rank. dynamic: the copies in turn. lp: by solving a linear program, on GPUs. fake: random experts, for"
            " benchmarks only; the output is noise."
        ),
    ] = "auto"
    report: Annotated[
        Literal["off", "server_log", "prometheus", "both"],
        Meta(description="Where the engine reports balancedness (mean rank load / maximum rank load)."),
    ] = "off"


class TrtllmOptions(msgspec.Struct, frozen=True, kw_only=True):
    """Options of the TensorRT-LLM adapter."""

    backend: Annotated[
        Literal["pytorch", "_autodeploy"], Meta(description="TensorRT-LLM backend that runs the model.")
    ] = "pytorch"
    guided: Annotated[Literal["none", "xgrammar", "llguidance"], Meta(description="Library for guided decoding.")] = (
        "none"
    )
    kv_events: Annotated[
        int, Meta(ge=0, description="Size of the engine's KV event buffer, in events. 0: no KV events.")
    ] = 100_000
    poll_ms: Annotated[
        float, Meta(gt=0, le=10_000, description="Milliseconds between two polls of the engine's load.")
    ] = 100.0


class EchoOptions(msgspec.Struct, frozen=True, kw_only=True):
    """Speed, capacity and fault injection of the echo engine."""

    pace_ms: Annotated[Ms, Meta(description="Milliseconds between two tokens of a request. 0: no delay.")] = 0.0
    burst: Annotated[int, Meta(ge=1, description="Tokens per request and event-loop iteration, if pace_ms is 0.")] = 8
    prefill_ms: Annotated[Ms, Meta(description="Milliseconds before the first token of a request.")] = 0.0
    context: Annotated[int, Meta(ge=2, description="Context length in tokens.")] = 1_048_576
    blocks: Annotated[int, Meta(ge=1, description="Number of KV blocks, of 16 tokens each.")] = 131_072
    max_running: Annotated[int, Meta(ge=1, description="Maximum number of running requests; others wait.")] = 4096
    media: Annotated[
        bool,
        Meta(
            description="Accept images, encode them for this and other workers, and output their sizes and digests; for"
            " tests."
        ),
    ] = False
    encode_ms: Annotated[Ms, Meta(description="Milliseconds that encoding an image takes, with media.")] = 0.0
    script: Annotated[
        str,
        Meta(
            description="YAML file that maps texts to answers: a prompt that contains one of the texts gets its answer"
            " instead of an echo; for tests."
        ),
    ] = ""
    faults: Annotated[
        bool,
        Meta(
            description="Inject the faults that a prompt names: [[fail:N]], [[stall]], [[die]], [[refuse]]; for tests."
        ),
    ] = False
