"""The environment variables that the Dynamo runtime reads its options from."""

from baton.config.directories import discovery_directory
from baton.config.runtime import RuntimeOptions


def environment(options: RuntimeOptions, publishes_metrics: bool = False) -> dict[str, str]:
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
    if publishes_metrics:  # on a port that the kernel chooses and nobody outside this machine can reach
        values |= {"DYN_SYSTEM_HOST": "127.0.0.1", "DYN_SYSTEM_PORT": "0"}
    if options.discovery == "file":
        values["DYN_FILE_KV"] = str(discovery_directory(options))
    if options.discovery == "etcd":
        values["ETCD_ENDPOINTS"] = options.etcd
    if "nats" in (options.requests, options.events):
        values["NATS_SERVER"] = options.nats
    return values
