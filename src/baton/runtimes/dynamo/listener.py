"""TCP_NODELAY for the frontend's listener: without it the first token of a keep-alive connection waits for 40 ms.

The runtime does not set the option and does not give out its socket; accepted connections inherit it from the listener
on Linux, so it is enough to find the listening descriptor of this process by its port.
"""

import os
import socket
from pathlib import Path


def set_nodelay(port: int) -> bool:
    """Set TCP_NODELAY on this process's listener at `port`; return whether there was one."""
    found = False
    for entry in Path("/proc/self/fd").iterdir():
        try:
            sock = socket.socket(fileno=os.dup(int(entry.name)))
        except OSError:
            continue
        with sock:
            if _listens_at(sock, port):
                sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                found = True
    return found


def _listens_at(sock: socket.socket, port: int) -> bool:
    try:
        listening = sock.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN)
        return bool(listening) and sock.family in (socket.AF_INET, socket.AF_INET6) and sock.getsockname()[1] == port
    except OSError:
        return False
