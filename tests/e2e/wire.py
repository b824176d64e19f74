"""A client that sends bytes as they are given, for requests that no HTTP client would send."""

import http.client
import io
import socket
import struct
from contextlib import suppress
from typing import NamedTuple, cast

from tests.e2e.harness import System

ANSWER_S = 20.0


class Answer(NamedTuple):
    """One complete response; the names of its headers are in lower case."""

    status: int
    headers: dict[str, str]
    body: bytes

    @property
    def request_id(self) -> str:
        """The id of the request that it answers."""
        return self.headers.get("x-request-id", "")


class _SharedFile(io.BufferedIOBase):
    """The reading side of a connection, which stays open after each response."""

    def __init__(self, connection: socket.socket) -> None:
        self._file = connection.makefile("rb")

    def makefile(self, mode: str) -> "_SharedFile":
        """Stand in for a socket, as http.client takes it."""
        return self

    def read(self, size: int | None = -1) -> bytes:
        return self._file.read(-1 if size is None else size)

    def readinto(self, buffer: object) -> int:
        return cast(io.BufferedReader, self._file).readinto(buffer)  # type: ignore[arg-type]

    def readline(self, size: int | None = -1) -> bytes:
        return self._file.readline(-1 if size is None else size)

    def close(self) -> None:
        """Leave the connection open."""


class Wire:
    """One connection."""

    def __init__(self, system: System, timeout_s: float = ANSWER_S) -> None:
        self.socket = socket.create_connection(("127.0.0.1", system.port), timeout=timeout_s)
        self._file = _SharedFile(self.socket)

    def __enter__(self) -> "Wire":
        return self

    def __exit__(self, *_: object) -> None:
        self.socket.close()

    def send(self, data: bytes) -> None:
        """Send `data`, or as much of it as the server takes before it closes the connection."""
        with suppress(ConnectionError):
            self.socket.sendall(data)

    def answer(self, method: str = "POST") -> Answer | None:
        """Return the next response, None if the server has closed the connection instead. Raises TimeoutError."""
        response = http.client.HTTPResponse(cast(socket.socket, self._file), method=method)
        try:
            response.begin()
            body = response.read()
        except (ConnectionError, http.client.BadStatusLine) as error:
            if isinstance(error, http.client.BadStatusLine) and error.line not in ("", repr("")):
                raise AssertionError(f"not a response: {error.line!r}") from error
            return None
        return Answer(response.status, {name.lower(): value for name, value in response.getheaders()}, body)

    def is_closed(self) -> bool:
        """Wait until the server closes the connection; False if it sends something instead. Raises TimeoutError."""
        try:
            return self._file.read(1) == b""
        except ConnectionError:
            return True

    def finish_sending(self) -> None:
        """Close the sending side only."""
        with suppress(OSError):
            self.socket.shutdown(socket.SHUT_WR)

    def reset(self) -> None:
        """Close the connection with a reset instead of an end."""
        self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.socket.close()


def head(*lines: str, request: str = "POST /v1/chat/completions HTTP/1.1", request_id: str = "attack") -> bytes:
    """Return the head of a request with a Host, an id, and `lines`."""
    return "\r\n".join(
        [request, "Host: localhost", "Content-Type: application/json", f"X-Request-Id: {request_id}", *lines, "", ""]
    ).encode("latin-1")


def chunked(*parts: bytes) -> bytes:
    """Return `parts` as the chunks of a body."""
    return b"".join(b"%x\r\n%b\r\n" % (len(part), part) for part in parts) + b"0\r\n\r\n"
