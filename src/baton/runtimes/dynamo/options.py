"""Settings of the Dynamo runtime, and the environment variables that it reads them from."""

from pathlib import Path
from typing import Annotated, Literal

import msgspec
from msgspec import Meta


class RuntimeOptions(msgspec.Struct, frozen=True, kw_only=True):
    """Where processes find each other and how they talk."""

    discovery: Annotated[
        Literal["file", "etcd", "kubernetes"], Meta(description="how workers and frontends find each other")
    ] = "file"
    requests: Annotated[Literal["tcp", "nats"], Meta(description="how requests travel")] = "tcp"
    events: Annotated[Literal["zmq", "nats"], Meta(description="how KV events and load travel")] = "zmq"
    bind: Annotated[
        str,
        Meta(description="the IP that this process listens on for other workers; they must be able to reach it"),
    ] = "127.0.0.1"
    directory: Annotated[str, Meta(description="where file discovery keeps its records")] = ""
    etcd: Annotated[str, Meta(description="etcd addresses, separated by commas")] = "http://127.0.0.1:2379"
    nats: Annotated[str, Meta(description="NATS address")] = "nats://127.0.0.1:4222"
    log: Annotated[str, Meta(description="log filter of the Rust runtime")] = "error"


def environment(options: RuntimeOptions, tells_metrics: bool = False) -> dict[str, str]:
    """Return the variables that make the runtime do what `options` say. Everything is bound, nothing left to guess."""
    values = {
        "DYN_DISCOVERY_BACKEND": options.discovery,
        "DYN_REQUEST_PLANE": options.requests,
        "DYN_EVENT_PLANE": options.events,
        "DYN_TCP_RPC_HOST": options.bind,
        "DYN_TCP_RESPONSE_STREAM_HOST": options.bind,
        "DYN_EVENT_PLANE_HOST": options.bind,
        # Model files are read from a shared directory, and never fetched from a hub by the runtime.
        "DYN_SELF_HOST_METADATA": "0",
        "HF_HUB_OFFLINE": "1",
        # Trace ids exist only with structured logs.
        "DYN_LOGGING_JSONL": "1",
        "DYN_LOG": options.log,
        # Our canary knows the role and takes the worker out; the runtime's does neither.
        "DYN_HEALTH_CHECK_ENABLED": "false",
    }
    if tells_metrics:  # on a port that the kernel chooses and nobody outside this machine can reach
        values |= {"DYN_SYSTEM_HOST": "127.0.0.1", "DYN_SYSTEM_PORT": "0"}
    if options.discovery == "file":
        values["DYN_FILE_KV"] = str(discovery_directory(options))
    if options.discovery == "etcd":
        values["ETCD_ENDPOINTS"] = options.etcd
    if "nats" in (options.requests, options.events):
        values["NATS_SERVER"] = options.nats
    return values


def discovery_directory(options: RuntimeOptions) -> Path:
    """Return where file discovery keeps its records: the processes of one user share it unless told otherwise."""
    return Path(options.directory) if options.directory else Path.home() / ".cache" / "baton" / "discovery"
