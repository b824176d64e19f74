"""Limits of the edge: what a connection may send, and for how long."""

import resource

import msgspec

MIB = 1 << 20
RESERVED_FILES = 256
"""Descriptors for discovery, workers, logs and the model's files."""
FILES_PER_EXCHANGE = 2
"""Descriptors of a running exchange beside its client's: both ends of a connection to the frontend."""


class EdgeLimits(msgspec.Struct, frozen=True, kw_only=True):
    """Limits of each connection. Times in seconds."""

    body_bytes: int = 32 * MIB
    head_bytes: int = 64 * 1024
    headers: int = 128
    pipelined: int = 32
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


def connection_limit() -> int:
    """Raise the process's limit of open files as far as it may be, and return how many clients may connect."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    available = max(64, hard - RESERVED_FILES)
    # Half of the descriptors for clients, so that the exchanges of a third of them can run.
    return available // 2
