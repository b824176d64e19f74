"""TCP ports for SGLang to listen on or to connect to. Imports no SGLang."""

import random
import socket
from pathlib import Path

from baton.errors import ConfigError

MAX_TRIES = 200
LOWEST = 20000
EPHEMERAL = 32768


def free_port(host: str) -> int:
    """Return a free port of `host`, below the ephemeral range, so that no outgoing connection takes it meanwhile."""
    highest = _ephemeral_from() - 1
    for _ in range(MAX_TRIES):
        port = random.randint(LOWEST, max(LOWEST, highest))
        if is_free(host, port):
            return port
    raise ConfigError(f"no free port was found at {host} between {LOWEST} and {highest}")


def is_free(host: str, port: int) -> bool:
    """Whether this process could listen at `host` and `port` now."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError:
            return False
    return True


def bootstrap_host(host: str, dist_init_addr: str | None) -> str:
    """Return the host that peers connect to: that of `dist_init_addr`, if it is given, else `host`."""
    address = _resolved(_host_of(dist_init_addr)) if dist_init_addr else host
    return f"[{address}]" if ":" in address else address


def _resolved(name: str) -> str:
    try:
        return str(socket.getaddrinfo(name, None)[0][4][0])
    except OSError:
        return name


def _host_of(address: str) -> str:
    if address.startswith("["):
        return address[1:].split("]", 1)[0]
    host, _, port = address.rpartition(":")
    return host if host and ":" not in host and port.isdigit() else address


def _ephemeral_from() -> int:
    try:
        return int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    except (OSError, ValueError, IndexError):
        return EPHEMERAL
