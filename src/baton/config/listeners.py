"""Sockets that a process listens on, opened where a failure can still name the flag to change."""

import errno
import socket

from baton.errors import ConfigError


def open_listener(host: str, port: int, backlog: int, host_flag: str, port_flag: str) -> socket.socket:
    """Return a socket that listens on the first address of `host`. Raises ConfigError, naming the flag to change."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        listener = socket.socket(family, kind, protocol)
    except OSError as error:
        raise _unusable(host, port, error, host_flag, port_flag) from None
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        listener.listen(backlog)
        listener.setblocking(False)
    except OSError as error:
        listener.close()
        raise _unusable(host, port, error, host_flag, port_flag) from None
    return listener


def _unusable(host: str, port: int, error: OSError, host_flag: str, port_flag: str) -> ConfigError:
    flag = port_flag if error.errno in (errno.EADDRINUSE, errno.EACCES) else host_flag
    return ConfigError(f"cannot listen on {host}:{port} ({error.strerror}); choose another with {flag}")
