"""The settings of every process, as one frozen value.

Flags, environment variables, YAML keys and `docs/configuration.md` are generated from the fields of these structs.
"""

import ipaddress
from collections.abc import Mapping
from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from baton.config.engines import EchoOptions, ExpertOptions, SglangOptions, TorchOptions, TrtllmOptions
from baton.config.media import MediaOptions
from baton.config.parsers import ReasoningParser, ToolCallParser
from baton.config.routing import RoleRouterName, RouterName
from baton.config.runtime import RuntimeOptions
from baton.config.transfer import KvTransferOptions

MAX_PORT = 65535

YEAR_S = 31_536_000
Seconds = Annotated[float, Meta(gt=0, le=YEAR_S)]
Port = Annotated[int, Meta(ge=0, le=MAX_PORT)]

_SERVE = {"commands": ("serve",)}
_WORK_FRONT = {"commands": ("serve", "worker", "frontend")}
_FRONT = {"commands": ("serve", "frontend")}
_WORK = {"commands": ("serve", "worker")}
_ROUTE = {"commands": ("serve", "router")}
_ALL = {"commands": ("serve", "worker", "frontend", "router")}
_WORK_ROUTE = {"commands": ("serve", "worker", "router")}


def _about(text: str, extra: Mapping[str, object], *aliases: str) -> Meta:
    """Return what `load.py` reads of a setting; `aliases` are flags that users of vLLM and SGLang type for it."""
    return Meta(description=text, extra={**extra, "aliases": aliases})


class Settings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """All settings of all commands."""

    engine: Annotated[str, _about("Engine that runs the model: torch, sglang, trtllm or echo.", _WORK)] = "torch"
    engine_args: Annotated[
        tuple[str, ...],
        _about(
            "Arguments passed to the engine's own parser (`--help-engine` lists them); a list or a mapping in YAML.",
            _WORK,
        ),
    ] = ()
    model: Annotated[
        str,
        _about(
            "Model directory, Hugging Face id, or a demo model (smollm2, smolsee, smoldiff, minilm). Empty: the"
            " engine's default model.",
            _WORK_ROUTE,
            "--model-path",
        ),
    ] = ""
    name: Annotated[
        str,
        _about(
            "Model name that clients use in requests; several names are separated by commas, and the flag can be"
            " repeated. Empty: the name of the model.",
            {**_WORK_ROUTE, "repeated": True},
            "--served-name",
            "--served-model-name",
        ),
    ] = ""
    context_length: Annotated[
        int,
        Meta(ge=0),
        _about(
            "Context length in tokens: the limit of prompt and response together. 0: that of the model.",
            _WORK,
            "--max-model-len",
        ),
    ] = 0
    role: Annotated[
        Literal["auto", "aggregated", "prefill", "decode", "embed", "encode", "process"],
        _about(
            "Role of the worker. auto: aggregated, or embed for an embedding model. process: tokenizer and chat"
            " template in front of workers of the other roles.",
            _WORK,
        ),
    ] = "auto"
    model_input: Annotated[
        Literal["tokens", "text"],
        _about(
            "Input that the worker receives. tokens: the frontend applies the chat template and tokenizes. text: the"
            " worker does.",
            _WORK,
        ),
    ] = "tokens"
    tool_call_parser: Annotated[
        ToolCallParser,
        _about(
            "Format of the model's tool calls, which the frontend parses. auto: by model family. none: requests with"
            " tools are refused.",
            _WORK_ROUTE,
        ),
    ] = "auto"
    reasoning_parser: Annotated[
        ReasoningParser,
        _about(
            "Format of the model's reasoning, which the frontend returns as reasoning_content. auto: by model family."
            " none: reasoning stays in the content.",
            _WORK_ROUTE,
        ),
    ] = "auto"
    chat_template: Annotated[
        str,
        _about(
            "Jinja file with a chat template to use instead of the model's. Frontends read it at the same path.",
            _WORK_ROUTE,
        ),
    ] = ""
    workers: Annotated[
        int, Meta(ge=1, le=256), _about("Number of worker processes to start, each for prefill and decode.", _SERVE)
    ] = 1
    prefill: Annotated[
        int,
        Meta(ge=0, le=256),
        _about("Number of prefill workers to start. Requires --decode; replaces --workers.", _SERVE),
    ] = 0
    decode: Annotated[
        int,
        Meta(ge=0, le=256),
        _about("Number of decode workers to start. Requires --prefill; replaces --workers.", _SERVE),
    ] = 0
    encode: Annotated[
        int,
        Meta(ge=0, le=256),
        _about("Number of encode workers to start in addition, for images in prompts.", _SERVE),
    ] = 0
    process: Annotated[
        int,
        Meta(ge=0, le=256),
        _about(
            "Number of process workers to start in addition. They apply the chat template and tokenize instead of the"
            " frontend, and send tokens to the other workers. For models whose template the frontend cannot apply.",
            _SERVE,
        ),
    ] = 0
    language_namespace: Annotated[
        str,
        Meta(pattern="^[a-z0-9_-]*$"),
        _about(
            "Discovery namespace of the workers behind process workers. Empty: --namespace with -language added.",
            _WORK,
        ),
    ] = ""
    topology: Annotated[
        str, _about("File that lists worker pools and the rules by which the global router selects one.", _ROUTE)
    ] = ""
    default_ttft_ms: Annotated[
        float,
        Meta(ge=-1),
        _about(
            "Target for the time to first token of requests that set none, for the global router. -1: that of the"
            " topology file.",
            _ROUTE,
        ),
    ] = -1.0
    default_itl_ms: Annotated[
        float,
        Meta(ge=-1),
        _about(
            "Target for the inter-token latency of requests that set none, for the global router. -1: that of the"
            " topology file.",
            _ROUTE,
        ),
    ] = -1.0
    pool_endpoint: Annotated[
        str,
        Meta(pattern="^([a-z0-9_-]+\\.[a-z0-9_-]+)?$"),
        _about(
            "Component and endpoint of pools for which the topology file names none: router.generate for pools with a"
            " local router of Dynamo. Empty: those of Baton's workers.",
            _ROUTE,
        ),
    ] = ""
    host: Annotated[str, _about("Address that the OpenAI endpoint listens on.", _FRONT)] = "127.0.0.1"
    port: Annotated[Port, _about("Port of the OpenAI endpoint. 0: any free port, which is printed.", _FRONT)] = 8000
    api_key: Annotated[
        str,
        _about(
            "Comma-separated API keys, one of which requests must carry (Authorization: Bearer, or x-api-key). Empty,"
            " and no --api-key-file: none is needed. Visible in process lists; prefer --api-key-file.",
            _FRONT,
        ),
    ] = ""
    api_key_file: Annotated[
        str,
        _about("File with an API key per line; lines with # are comments. Read again when it changes.", _FRONT),
    ] = ""
    key_requests_per_minute: Annotated[
        int,
        Meta(ge=0),
        _about("Requests that each API key may send per minute; further ones get 429. 0: any number.", _FRONT),
    ] = 0
    key_max_concurrency: Annotated[
        int,
        Meta(ge=0),
        _about("Requests that each API key may have in progress; further ones get 429. 0: any number.", _FRONT),
    ] = 0
    tls_certificate: Annotated[
        str, _about("PEM file with the certificate chain of the OpenAI endpoint. Empty: no TLS.", _FRONT)
    ] = ""
    tls_key: Annotated[str, _about("PEM file with the private key of --tls-certificate.", _FRONT)] = ""
    cors_origins: Annotated[
        str,
        _about(
            "Comma-separated origins of web pages that may call the OpenAI endpoint, such as https://chat.example.com;"
            " * for all. Empty: none.",
            _FRONT,
        ),
    ] = ""
    body_limit_mb: Annotated[
        int,
        Meta(ge=1, le=1024),
        _about(
            "MiB that the body of a request may have; larger ones get 413. Raise it for several large images in one"
            " request.",
            _FRONT,
        ),
    ] = 32
    router: Annotated[
        RouterName,
        _about(
            "How the frontend selects a worker. power-of-two: the less busy one of two random workers. least-loaded:"
            " the one with the fewest requests. direct: the one that the request names. kv: prefers the one whose"
            " prefix cache holds most of the prompt.",
            _WORK_FRONT,
        ),
    ] = "round-robin"
    router_prefill: Annotated[
        RoleRouterName, _about("How frontends select a prefill worker. auto: as their --router.", _WORK)
    ] = "auto"
    router_decode: Annotated[
        RoleRouterName, _about("How frontends select a decode worker. auto: as their --router.", _WORK)
    ] = "auto"
    router_policy: Annotated[
        str,
        _about(
            "YAML file of the runtime's KV router with classes of requests, their queues, and how workers are selected."
            " Requires --router kv.",
            _WORK_FRONT,
        ),
    ] = ""
    session_affinity: Annotated[
        Literal["off", "soft", "hard"],
        _about(
            "Whether requests with the same x-dynamo-session-id header go to the same worker. hard: as long as it"
            " serves. soft: unless it is above --busy-threshold or lacks a taint that the request requires.",
            _FRONT,
        ),
    ] = "off"
    session_ttl_s: Annotated[
        int,
        Meta(ge=1, le=YEAR_S),
        _about("Seconds without a request after which the frontend forgets the worker of a session.", _FRONT),
    ] = 600
    busy_threshold: Annotated[
        float,
        Meta(ge=0, le=1),
        _about(
            "Fraction of KV blocks in use above which a worker receives no new requests; clients get 529 when all"
            " workers are above it. 0: off, requests queue in the workers.",
            _WORK_FRONT,
        ),
    ] = 0.0
    migrations: Annotated[
        int,
        Meta(ge=0, le=100),
        _about("Number of times a request may move to another worker after its worker failed.", _WORK_FRONT),
    ] = 3
    namespace: Annotated[
        str,
        Meta(
            pattern="^[a-z0-9_-]+$",
            description="Discovery namespace. Processes find each other only within one namespace.",
        ),
    ] = "baton"
    view: Annotated[bool, _about("Whether `serve` starts the web view of its processes.", _SERVE)] = True
    view_host: Annotated[
        str,
        _about(
            "Address that the web view listens on. Other addresses than loopback need a token, which is in the URL that"
            " is printed.",
            _SERVE,
        ),
    ] = "127.0.0.1"
    view_port: Annotated[Port, _about("Port of the web view. 0: any free port, which is printed.", _SERVE)] = 0
    view_token: Annotated[
        str,
        _about(
            "Token that the web view asks for. Empty: none on a loopback address, elsewhere a generated one. Visible in"
            " process lists; prefer BATON_VIEW_TOKEN.",
            _SERVE,
        ),
    ] = ""
    system_host: Annotated[
        str,
        _about(
            "Address of the system server (/live, /health, /metrics, /control). 0.0.0.0 for probes and scrapes from"
            " other hosts.",
            _WORK_ROUTE,
        ),
    ] = "127.0.0.1"
    system_port: Annotated[
        Port,
        _about(
            "Port of the system server. 0: any free port. With several workers, each takes the next port.",
            _WORK_ROUTE,
        ),
    ] = 0
    control: Annotated[
        Literal["auto", "on", "off"],
        _about(
            "Whether the system server offers the control API. auto: on a loopback address, or with a given token.",
            _WORK_ROUTE,
        ),
    ] = "auto"
    control_token: Annotated[
        str,
        _about(
            "Bearer token that requests to the control API, and to the admin routes of the frontend, must carry. Empty:"
            " generated, and found by `baton ctl` of the same user on this machine. Visible in process lists; prefer"
            " --control-token-file.",
            _ALL,
        ),
    ] = ""
    control_token_file: Annotated[str, _about("File that contains the control API token.", _ALL)] = ""
    command_timeout_s: Annotated[
        Seconds,
        _about(
            "Seconds a control command may take before the worker treats the engine as stuck and restarts. Raise it"
            " for slow weight updates.",
            _WORK,
        ),
    ] = 600.0
    taints: Annotated[
        str,
        _about(
            "Comma-separated names that requests can require or prefer of a worker, with nvext.routing_constraints and"
            " --router kv.",
            _WORK,
        ),
    ] = ""
    max_in_flight: Annotated[
        int,
        Meta(ge=1),
        _about(
            "Maximum number of concurrent requests of a worker. Further requests get a retryable error and move on.",
            _WORK,
        ),
    ] = 1024
    request_timeout_s: Annotated[
        Seconds, Meta(description="Seconds a request may take from admission to its last token.")
    ] = 600.0
    drain_timeout_s: Annotated[
        Seconds, Meta(description="Seconds that running requests get to finish at shutdown.")
    ] = 30.0
    start_timeout_s: Annotated[
        Seconds,
        Meta(description="Seconds that loading the model and starting may take. Raise it for large models."),
    ] = 600.0
    abort_timeout_s: Annotated[Seconds, _about("Seconds to wait for the engine to confirm an abort.", _WORK)] = 10.0
    flush_interval_ms: Annotated[
        float,
        Meta(ge=0, le=1000),
        _about(
            "Minimum milliseconds between two chunks of a stream; tokens in between are merged into one chunk. Lower"
            " it for finer chunks, raise it for less CPU per token.",
            _WORK,
        ),
    ] = 2.0
    reader_stall_timeout_s: Annotated[
        Seconds,
        _about(
            "Seconds a stream with full buffers waits for a client that does not read, before it fails.", _WORK_ROUTE
        ),
    ] = 60.0
    canary_interval_s: Annotated[Seconds, _about("Seconds between two probes of an idle worker.", _WORK)] = 10.0
    canary_timeout_s: Annotated[Seconds, _about("Seconds a probe may take before the worker is unhealthy.", _WORK)] = (
        10.0
    )
    stall_timeout_s: Annotated[
        Seconds,
        _about(
            "Seconds an engine with work, or a worker process, may make no progress before it is restarted. Raise it"
            " if single steps take that long.",
            _WORK,
        ),
    ] = 30.0
    timeline_requests: Annotated[
        int,
        Meta(ge=0, le=100_000),
        Meta(
            description="Finished requests whose timelines a process keeps in memory, for the web view, `baton top` and"
            " OpenTelemetry. 0: nothing is recorded or exported; traces are passed on."
        ),
    ] = 1000
    log_level: Annotated[
        Literal["debug", "info", "warning", "error"], Meta(description="Minimum level of Baton's own log messages.")
    ] = "info"
    log_format: Annotated[
        Literal["text", "json"],
        Meta(
            description="Format of log lines. text: time, level, logger, message. json: one object per line with time,"
            " level, logger, message, process, and request_id and trace_id in lines about a request."
        ),
    ] = "text"
    log_dir: Annotated[
        str,
        _about(
            "Log directory of the processes that `serve` starts. '-': standard error. Empty: ~/.cache/baton/logs.",
            _SERVE,
        ),
    ] = ""
    log_max_bytes: Annotated[
        int,
        Meta(ge=4096),
        _about(
            "Size above which a log of a process that `serve` starts is moved to a file that ends in .1, of which there"
            " is one.",
            _SERVE,
        ),
    ] = 64 << 20
    cache_dir: Annotated[
        str,
        _about("Directory for downloaded models. Empty: $XDG_CACHE_HOME/baton or ~/.cache/baton.", _WORK_ROUTE),
    ] = ""
    profile_dir: Annotated[
        str, _about("Directory for a cProfile of the event loop, written at exit. Empty: no profile.", _WORK_ROUTE)
    ] = ""
    runtime: RuntimeOptions = RuntimeOptions()
    kv: KvTransferOptions = KvTransferOptions()
    media: MediaOptions = MediaOptions()
    torch: TorchOptions = TorchOptions()
    sglang: SglangOptions = SglangOptions()
    experts: ExpertOptions = ExpertOptions()
    trtllm: TrtllmOptions = TrtllmOptions()
    echo: EchoOptions = EchoOptions()

    @property
    def served_names(self) -> tuple[str, ...]:
        """The names that clients use, without repetitions."""
        return tuple(dict.fromkeys(filter(None, map(str.strip, self.name.split(",")))))

    @property
    def first_name(self) -> str:
        """The name that the engine has for its model; "" before the model is prepared."""
        return next(iter(self.served_names), "")

    @property
    def language_worker_namespace(self) -> str:
        """The namespace of the workers behind process workers. No frontend looks there."""
        return self.language_namespace or f"{self.namespace}-language"

    @property
    def accepts_commands(self) -> bool:
        """Whether a worker or router offers the control API."""
        guarded = bool(self.control_token or self.control_token_file)
        return self.control == "on" or (self.control == "auto" and (guarded or is_loopback(self.system_host)))


def endpoint_url(settings: Settings) -> str:
    """Return the URL of the OpenAI endpoint."""
    host = f"[{settings.host}]" if ":" in settings.host else settings.host
    return f"{'https' if settings.tls_certificate else 'http'}://{host}:{settings.port}"


def open_endpoint_warning(settings: Settings) -> str | None:
    """Return a warning if other hosts can use the models without a key, else None."""
    if is_loopback(settings.host) or settings.api_key or settings.api_key_file:
        return None
    return (
        f"everybody who reaches {settings.host} port {settings.port} can use the models: set --api-key-file, or"
        " --host 127.0.0.1"
    )


def is_loopback(host: str) -> bool:
    """Whether only this machine reaches `host`."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
