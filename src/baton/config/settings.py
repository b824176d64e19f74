"""The settings of every process, as one frozen value.

The structs are the only table of settings: flags, environment variables, file keys and `docs/configuration.md` are
generated from their fields.
"""

import ipaddress
from collections.abc import Mapping
from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from baton.config.engines import EchoOptions, ExpertOptions, SglangOptions, TorchOptions, TrtllmOptions
from baton.config.media import MediaOptions
from baton.config.runtime import RuntimeOptions
from baton.config.transfer import KvTransferOptions

MAX_PORT = 65535

Seconds = Annotated[float, Meta(gt=0)]
Port = Annotated[int, Meta(ge=0, le=MAX_PORT)]

_SERVE = {"commands": ("serve",)}
_FRONT = {"commands": ("serve", "frontend")}
_WORK = {"commands": ("serve", "worker")}
_ROUTE = {"commands": ("serve", "router")}
_WORK_ROUTE = {"commands": ("serve", "worker", "router")}


def _about(text: str, extra: Mapping[str, object]) -> Meta:
    return Meta(description=text, extra=dict(extra))


class Settings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Everything that can be set."""

    engine: Annotated[str, _about("which engine runs the model: torch, sglang, trtllm or echo", _WORK)] = "torch"
    engine_args: Annotated[
        tuple[str, ...],
        _about(
            "what the engine itself is told, in its own words (`--help-engine` shows them); a list or mapping", _WORK
        ),
    ] = ()
    model: Annotated[
        str,
        _about("model directory, Hugging Face id, or smollm2 or minilm; empty is the engine's own", _WORK_ROUTE),
    ] = ""
    name: Annotated[str, _about("name the model is served under; empty is the model's own", _WORK_ROUTE)] = ""
    role: Annotated[
        Literal["auto", "aggregated", "prefill", "decode", "embed", "encode"],
        _about("what a worker does; auto is what its model is for", _WORK),
    ] = "auto"
    model_input: Annotated[
        Literal["tokens", "text"],
        _about("whether the frontend or the worker owns tokenizer and template", _WORK),
    ] = "tokens"
    workers: Annotated[int, Meta(ge=1, le=256), _about("worker processes to start", _SERVE)] = 1
    prefill: Annotated[
        int, Meta(ge=0, le=256), _about("prefill workers to start; with --decode, instead of --workers", _SERVE)
    ] = 0
    decode: Annotated[
        int, Meta(ge=0, le=256), _about("decode workers to start; with --prefill, instead of --workers", _SERVE)
    ] = 0
    encode: Annotated[
        int, Meta(ge=0, le=256), _about("encode workers to start beside the others, for images in prompts", _SERVE)
    ] = 0
    topology: Annotated[
        str, _about("file with pools of workers and which requests go to which; a global router goes by it", _ROUTE)
    ] = ""
    host: Annotated[str, _about("address of the OpenAI endpoint", _FRONT)] = "127.0.0.1"
    port: Annotated[Port, _about("port of the OpenAI endpoint", _FRONT)] = 8000
    router: Annotated[
        Literal["round-robin", "random", "kv"],
        _about("how requests are spread over workers; kv sends a prompt where its beginning is cached", _FRONT),
    ] = "round-robin"
    busy_threshold: Annotated[
        float,
        Meta(ge=0, le=1),
        _about(
            "share of a worker's KV in use from which it gets no new requests; 529 if all have it; 0 is never", _FRONT
        ),
    ] = 0.0
    migrations: Annotated[
        int,
        Meta(ge=0, le=100),
        _about("times a request may move to another worker when its own fails", _FRONT),
    ] = 3
    namespace: Annotated[str, Meta(pattern="^[a-z0-9_-]+$", description="group that finds each other")] = "baton"
    system_host: Annotated[str, _about("address of a worker's /health and /metrics", _WORK_ROUTE)] = "127.0.0.1"
    system_port: Annotated[
        Port, _about("port of /health and /metrics; with several workers counted up; 0 is any free one", _WORK_ROUTE)
    ] = 0
    control: Annotated[
        Literal["auto", "on", "off"],
        _about("take operators' orders on the system port; auto does on a loopback address, or with a token", _WORK),
    ] = "auto"
    control_token: Annotated[str, _about("token that operators' orders must bring; empty is none", _WORK)] = ""
    control_token_file: Annotated[str, _about("file with that token", _WORK)] = ""
    command_timeout_s: Annotated[
        Seconds, _about("longest an operator's order may take; then the engine is stuck", _WORK)
    ] = 600.0
    max_in_flight: Annotated[int, Meta(ge=1), _about("requests a worker accepts at once", _WORK)] = 1024
    request_timeout_s: Annotated[Seconds, Meta(description="longest a request may take")] = 600.0
    drain_timeout_s: Annotated[Seconds, Meta(description="time that running requests get at shutdown")] = 30.0
    start_timeout_s: Annotated[Seconds, Meta(description="longest a start may take")] = 600.0
    abort_timeout_s: Annotated[Seconds, _about("longest to wait for an engine to confirm an abort", _WORK)] = 10.0
    flush_interval_ms: Annotated[
        float,
        Meta(ge=0, le=1000),
        _about("shortest time between two chunks of a stream; tokens merge", _WORK),
    ] = 2.0
    reader_stall_timeout_s: Annotated[Seconds, _about("longest a full stream waits for its reader", _WORK_ROUTE)] = 60.0
    canary_interval_s: Annotated[Seconds, _about("how often an idle worker is probed", _WORK)] = 10.0
    canary_timeout_s: Annotated[Seconds, _about("longest a probe may take", _WORK)] = 10.0
    stall_timeout_s: Annotated[
        Seconds, _about("longest an engine with work, or a worker process, may show no progress", _WORK)
    ] = 30.0
    log_level: Annotated[Literal["debug", "info", "warning", "error"], Meta(description="what Baton logs")] = "info"
    log_dir: Annotated[
        str,
        _about(
            "log directory of processes started by `serve`; '-' is standard error; empty is ~/.cache/baton/logs",
            _SERVE,
        ),
    ] = ""
    cache_dir: Annotated[
        str, _about("where fetched models are kept; empty is $XDG_CACHE_HOME/baton or ~/.cache/baton", _WORK_ROUTE)
    ] = ""
    profile_dir: Annotated[str, _about("write a cProfile of the event loop here at exit", _WORK_ROUTE)] = ""
    runtime: RuntimeOptions = RuntimeOptions()
    kv: KvTransferOptions = KvTransferOptions()
    media: MediaOptions = MediaOptions()
    torch: TorchOptions = TorchOptions()
    sglang: SglangOptions = SglangOptions()
    experts: ExpertOptions = ExpertOptions()
    trtllm: TrtllmOptions = TrtllmOptions()
    echo: EchoOptions = EchoOptions()

    @property
    def accepts_commands(self) -> bool:
        """Whether a worker has control routes. Without a token anyone who reaches the system port can use them."""
        guarded = bool(self.control_token or self.control_token_file)
        return self.control == "on" or (self.control == "auto" and (guarded or _is_loopback(self.system_host)))


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
