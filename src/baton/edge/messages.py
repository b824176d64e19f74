"""Requests and answers as the edge holds them, and their heads as bytes."""

from http import HTTPStatus
from typing import TYPE_CHECKING

import msgspec

if TYPE_CHECKING:
    from baton.edge.access import Client
    from baton.edge.errors import Problem
    from baton.edge.routes import Route
    from baton.timelines.trace_context import TraceContext

Headers = list[tuple[bytes, bytes]]

HOP_BY_HOP = frozenset(
    (
        b"connection",
        b"keep-alive",
        b"proxy-authenticate",
        b"proxy-authorization",
        b"proxy-connection",
        b"te",
        b"trailer",
        b"transfer-encoding",
        b"upgrade",
        b"content-length",
    )
)
JSON = b"application/json"

_REASONS = {status.value: status.phrase.encode() for status in HTTPStatus} | {529: b"Overloaded"}


class Request:
    """One request of a client: its head, and its body once that has arrived. Header names are in lower case."""

    __slots__ = (
        "body",
        "client",
        "headers",
        "http11",
        "keep_alive",
        "method",
        "path",
        "problem",
        "query",
        "request_id",
        "route",
        "trace",
    )

    def __init__(self) -> None:
        self.method = ""
        self.path = ""
        self.query = b""
        self.headers: Headers = []
        self.body: bytes = b""
        self.http11 = True
        self.keep_alive = True
        self.request_id = ""
        self.route: Route | None = None
        self.client: Client | None = None
        self.problem: Problem | None = None
        self.trace: TraceContext | None = None

    def header(self, name: bytes) -> bytes | None:
        """Return the first value of a header, None without it."""
        for each, value in self.headers:
            if each == name:
                return value
        return None


class Answer(msgspec.Struct, frozen=True, kw_only=True):
    """A complete answer."""

    status: int = 200
    body: bytes = b""
    content_type: bytes = JSON
    headers: tuple[tuple[bytes, bytes], ...] = ()


def answer_head(status: int, headers: Headers) -> bytes:
    """Return the head of an answer."""
    reason = _REASONS.get(status, b"Unknown")
    return b"HTTP/1.1 %d %b\r\n%b\r\n" % (status, reason, _lines(headers))


def request_head(method: bytes, target: bytes, headers: Headers, version: bytes = b"1.1") -> bytes:
    """Return the head of a request."""
    return b"%b %b HTTP/%b\r\n%b\r\n" % (method, target, version, _lines(headers))


def _lines(headers: Headers) -> bytes:
    return b"".join([b"%b: %b\r\n" % header for header in headers])


def end_to_end(headers: Headers, dropped: frozenset[bytes]) -> Headers:
    """Return the headers that a proxy passes on: all but `dropped` (with HOP_BY_HOP) and what Connection names."""
    for name, value in headers:
        if name == b"connection" and (named := _connection_options(value)):
            dropped = dropped | named
    return [header for header in headers if header[0] not in dropped]


def _connection_options(value: bytes) -> frozenset[bytes]:
    options = frozenset(option.strip() for option in value.lower().split(b","))
    return options - {b"keep-alive", b"close", b""}
