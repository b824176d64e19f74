"""Addresses that the runtime listens on: whether they can be used, and TCP_NODELAY for the frontend's.

Without that option the first token of a keep-alive connection is delayed by 40 ms. The runtime does not set it and does
not expose its socket. On Linux accepted connections inherit it from the listener, so it is enough to find the listening
descriptor of this process by its port.
"""

import os
import socket
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from baton.config.listeners import unusable_address


def refuse_unusable_address(host: str, port: int, host_flag: str, port_flag: str) -> None:
    """Raise ConfigError, naming the flag to change, if `host`:`port` cannot be listened on."""
    try:
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
        with socket.socket(family, socket.SOCK_STREAM) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind((host, port))
    except OSError as error:
        raise unusable_address(host, port, error, host_flag, port_flag) from None


@contextmanager
def reserved_port(host: str) -> Iterator[int]:
    """Yield a free port that no other process can take within the block, while the runtime can listen on it.

    Two sockets may be bound to one port as long as both allow it (SO_REUSEADDR) and neither listens.
    """
    family, kind, protocol, _, address = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)[0]
    with socket.socket(family, kind, protocol) as reserved:
        reserved.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        reserved.bind(address)
        yield int(reserved.getsockname()[1])


def set_nodelay(port: int) -> bool:
    """Set TCP_NODELAY on this process's listener at `port`; return whether there was one."""
    found = False
    for listener in find_listeners(port):
        with listener:
            listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            found = True
    return found


def find_listeners(port: int) -> Iterator[socket.socket]:
    """Yield this process's listeners at `port`, as sockets that the caller closes."""
    for entry in list(Path("/proc/self/fd").iterdir()):
        sock = _duplicate(int(entry.name))
        if sock is None:
            continue
        if _listens_at(sock, port):
            yield sock
        else:
            sock.close()


def _duplicate(descriptor: int) -> socket.socket | None:
    """Return the socket at `descriptor` under a descriptor of its own, None if it is no socket or has been closed."""
    try:
        if not stat.S_ISSOCK(os.fstat(descriptor).st_mode):
            return None
        copy = os.dup(descriptor)
    except OSError:
        return None
    try:
        return socket.socket(fileno=copy)
    except OSError:
        os.close(copy)
        return None


def _listens_at(sock: socket.socket, port: int) -> bool:
    try:
        listening = sock.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN)
        return bool(listening) and sock.family in (socket.AF_INET, socket.AF_INET6) and sock.getsockname()[1] == port
    except OSError:
        return False
