"""The client of the control socket of a running `baton serve`. Blocks."""

import socket
from collections.abc import Iterator
from contextlib import closing

import msgspec

from baton.topology.control_messages import Failed, OperationError, Reply, Request, Status, StatusRequest

TIMEOUT_S = 3700.0
"""Longer than any change may take."""
STATUS_TIMEOUT_S = 5.0


def read_status(url: str) -> Status:
    """Return the status of the `baton serve` with that control socket. Raises OperationError."""
    for reply in send(url, StatusRequest(), STATUS_TIMEOUT_S):
        if isinstance(reply, Status):
            return reply
    raise OperationError("not_serving", "`baton serve` has sent no status")


def send(url: str, request: Request, timeout_s: float = TIMEOUT_S) -> Iterator[Reply]:
    """Send `request` and yield the replies; each may take `timeout_s`. Raises OperationError."""
    try:
        with closing(socket.socket(socket.AF_UNIX)) as connection:
            connection.settimeout(timeout_s)
            connection.connect(url.removeprefix("unix:"))
            connection.sendall(msgspec.json.encode(request) + b"\n")
            for line in connection.makefile("rb"):
                reply: Reply = msgspec.json.decode(line, type=Reply)
                if isinstance(reply, Failed):
                    raise OperationError(reply.code, reply.message)
                yield reply
    except (OSError, msgspec.DecodeError) as error:
        raise OperationError("not_serving", f"cannot reach `baton serve` at {url}: {error}") from None
