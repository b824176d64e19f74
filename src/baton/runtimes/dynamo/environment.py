"""The environment variables that the Dynamo runtime reads its options from."""

from pathlib import Path

from baton.config.directories import discovery_directory
from baton.config.peer_tls import is_encrypted, peer_tls, tls_file, uses_etcd_tls
from baton.config.runtime import RuntimeOptions
from baton.runtimes.dynamo.addresses import bind_address, is_loopback
from baton.runtimes.dynamo.event_sockets import event_sockets


def environment_defaults(options: RuntimeOptions) -> dict[str, str]:
    """Return variables that are set unless the user has set them."""
    # Where RUST_BACKTRACE is set, each error within the runtime would collect a stack trace, and most requests have
    # such errors; the first that is logged would load 38 MB of symbols. Panics have their traces all the same.
    values = {"RUST_LIB_BACKTRACE": "0"}
    # UCX (NIXL) listens on every network device that it may use.
    return values | ({"UCX_NET_DEVICES": "lo"} if is_loopback(options.bind or bind_address(options)) else {})


def environment(options: RuntimeOptions, publishes_metrics: bool = False) -> dict[str, str]:
    """Return the variables for `options`. Every address is explicit: the runtime guesses none. Raises ConfigError."""
    bind = options.bind or bind_address(options)
    values = {
        "DYN_DISCOVERY_BACKEND": options.discovery,
        "DYN_REQUEST_PLANE": options.requests,
        # Over QUIC a worker that leaves discovery to drain would lose its running responses.
        "DYN_RESPONSE_PLANE": "tcp",
        "DYN_EVENT_PLANE": options.events,
        "DYN_TCP_RPC_HOST": bind,
        "DYN_TCP_RESPONSE_STREAM_HOST": bind,
        "DYN_EVENT_PLANE_HOST": bind,
        # Model files are read from a shared directory; the runtime must not fetch them from a hub.
        "DYN_SELF_HOST_METADATA": "0",
        "HF_HUB_OFFLINE": "1",
        # Trace ids exist only with structured logs.
        "DYN_LOGGING_JSONL": "1",
        "DYN_LOG": options.log,
        # Our canary knows the role and deregisters the worker; the runtime's does neither.
        "DYN_HEALTH_CHECK_ENABLED": "false",
    }
    if publishes_metrics:  # on a loopback port that the kernel chooses
        values |= {"DYN_SYSTEM_HOST": "127.0.0.1", "DYN_SYSTEM_PORT": "0"}
    if options.discovery == "file":
        values["DYN_FILE_KV"] = str(discovery_directory(options))
    if (sockets := event_sockets(options)) is not None:
        values["DYN_ZMQ_BROKER_URL"] = sockets.broker_url
    if options.discovery == "etcd":
        values["ETCD_ENDPOINTS"] = options.etcd
    if "nats" in (options.requests, options.events):
        values["NATS_SERVER"] = options.nats
    return values | (_tls(options) if is_encrypted(options) else {})


def _tls(options: RuntimeOptions) -> dict[str, str]:
    """Return the variables for mutual TLS. Each process is a server and a client, with one certificate.

    Raises ConfigError for files that cannot be used: the runtime would only fail at its first connections.
    """
    peer_tls(options)
    authority, certificate, key = (
        str(tls_file(path)) for path in (options.tls_ca, options.tls_certificate, options.tls_key)
    )
    values = {
        "DYN_TCP_TLS_CERT_PATH": certificate,
        "DYN_TCP_TLS_KEY_PATH": key,
        "DYN_TCP_TLS_CA_CERT_PATH": authority,
        "DYN_TCP_TLS_CLIENT_CA_CERT_PATH": authority,
        "DYN_TCP_TLS_CLIENT_CERT_PATH": certificate,
        "DYN_TCP_TLS_CLIENT_KEY_PATH": key,
        "DYN_TCP_TLS_SERVER_NAME": options.tls_name,
        # A variable that this process inherits does not switch the verification off.
        "DYN_TCP_TLS_INSECURE": "false",
    }
    if uses_etcd_tls(options):  # contents, not paths
        files = {"ETCD_AUTH_CA": authority, "ETCD_AUTH_CLIENT_CERT": certificate, "ETCD_AUTH_CLIENT_KEY": key}
        values |= {name: Path(path).read_text() for name, path in files.items()}
    if options.nats.startswith("tls:"):
        values |= {"NATS_TLS_CA_CERT_PATH": authority, "NATS_TLS_INSECURE": "false"}
        values |= {"NATS_TLS_CLIENT_CERT_PATH": certificate, "NATS_TLS_CLIENT_KEY_PATH": key}
    return values
