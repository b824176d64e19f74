"""Sockets that a process listens on, opened where a failure can still name the flag to change."""

import errno
import socket
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from baton.errors import ConfigError


def open_listener(host: str, port: int, backlog: int, host_flag: str, port_flag: str) -> socket.socket:
    """Return a socket that listens on the first address of `host`. Raises ConfigError, naming the flag to change."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        listener = socket.socket(family, kind, protocol)
    except OSError as error:
        raise unusable_address(host, port, error, host_flag, port_flag) from None
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        listener.listen(backlog)
        listener.setblocking(False)
    except OSError as error:
        listener.close()
        raise unusable_address(host, port, error, host_flag, port_flag) from None
    return listener


def unusable_address(host: str, port: int, error: OSError, host_flag: str, port_flag: str) -> ConfigError:
    """Return the error for an address that cannot be listened on, with who listens there and the flag to change."""
    flag = port_flag if error.errno in (errno.EADDRINUSE, errno.EACCES) else host_flag
    who = f" by {found}" if error.errno == errno.EADDRINUSE and (found := find_listener(port)) else ""
    return ConfigError(f"cannot listen on {host}:{port} ({error.strerror}{who}); choose another with {flag}")


def find_listener(port: int) -> str:
    """Return the name and id of the process that listens on `port`; "" if it is not found, as one of another user."""
    inodes = {f"socket:[{inode}]" for inode in _listening_inodes(port)}
    for process in Path("/proc").glob("[0-9]*") if inodes else ():
        with suppress(OSError):  # it has ended, or belongs to another user
            if any(str(link.readlink()) in inodes for link in (process / "fd").iterdir()):
                return f"{(process / 'comm').read_text().strip()}, pid {process.name}"
    return ""


def _listening_inodes(port: int) -> Iterator[str]:
    listening = "0A"
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        with suppress(OSError):
            for line in Path(table).read_text().splitlines()[1:]:
                fields = line.split()
                if fields[3] == listening and int(fields[1].rpartition(":")[2], 16) == port:
                    yield fields[9]
