"""Limits of the edge: what a connection may send, and for how long."""

import resource

import msgspec

MIB = 1 << 20
RESERVED_FILES = 256
"""Descriptors for discovery, workers, logs and the model's files."""
MOST_FILES = 1 << 20
FILES_PER_CLIENT = 2
FILES_PER_EXCHANGE = 4
"""Descriptors of an exchange: its client's, both ends of a connection to the frontend, and one of the runtime."""


class EdgeLimits(msgspec.Struct, frozen=True, kw_only=True):
    """Limits of each connection. Times in seconds."""

    body_bytes: int = 32 * MIB
    head_bytes: int = 64 * 1024
    headers: int = 128
    pipelined: int = 32
    handshake_timeout_s: float = 10.0
    head_timeout_s: float = 20.0
    body_timeout_s: float = 30.0
    body_bytes_per_s: int = MIB // 16
    """A body gets `body_timeout_s`, and a second more for each so many bytes of it."""
    idle_timeout_s: float = 75.0
    stall_timeout_s: float = 120.0
    """How long a client may not read an answer that waits for it."""
    linger_timeout_s: float = 2.0
    """How long a refused client may go on sending before its connection is closed."""
    max_connections: int = 1000
    """With TLS handshakes: the oldest of them ends where a further connection would be one too many."""
    max_exchanges: int = 500


def edge_limits(body_bytes: int) -> EdgeLimits:
    """Raise the process's limit of open files as far as it may be, and return the limits that it allows.

    Half of the files are for clients. A quarter of that many exchanges can run; further requests get a 503.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    files = MOST_FILES if hard == resource.RLIM_INFINITY else min(hard, MOST_FILES)
    if soft != resource.RLIM_INFINITY and soft < files:
        resource.setrlimit(resource.RLIMIT_NOFILE, (files, hard))
    available = max(64, files - RESERVED_FILES)
    return EdgeLimits(
        body_bytes=body_bytes,
        max_connections=available // FILES_PER_CLIENT,
        max_exchanges=available // FILES_PER_EXCHANGE // 2,
    )
