"""What the head of a request decides: its id, route and client, and whether it is refused before its body is read."""

import os
import re

import httptools

from baton.edge.access import Access
from baton.edge.errors import Problem
from baton.edge.limits import MIB
from baton.edge.messages import Answer, Headers, Request
from baton.edge.routes import Route, RouteTable

_SAFE_ID = re.compile(rb"[A-Za-z0-9._:/+=@-]{1,128}")
_VERSIONS = ("1.0", "1.1")
_JSON_TYPE = re.compile(rb"application/(json|[^;]*\+json)[ \t]*(;.*)?", re.IGNORECASE | re.DOTALL)
"""What the frontend accepts."""
_BATCH = 256


class HeadCheck:
    """Checks heads against the routes, the access rules and the body limit."""

    def __init__(self, routes: RouteTable, access: Access, body_bytes: int) -> None:
        self._routes = routes
        self._access = access
        self._body_bytes = body_bytes

    def check(self, request: Request, url: bytes, version: str) -> int | None:
        """Set path, id, route and client of `request`, and its problem if it is refused.

        Returns the length of its body, None if that is not known before its end.
        """
        request.http11 = version == "1.1"
        assign_id(request)
        length = _body_length(request.headers)
        request.problem = _check_http(request.headers, version) or _split(request, url)
        if request.problem is not None:
            request.keep_alive = False
            return length
        request.problem = self._check_route(request)
        if request.problem is None and (length or 0) > self._body_bytes:
            request.problem = self.too_large()
        return length

    def too_large(self) -> Problem:
        """Return the problem of a request with a body above the limit."""
        message = (
            f"the body of the request is larger than {self._body_bytes / MIB:g} MiB;"
            " the operator can raise --body-limit-mb"
        )
        return Problem(status=413, message=message, code="request_too_large")

    def _check_route(self, request: Request) -> Problem | None:
        route = request.route = self._routes.find(request.path)
        if route is None:
            return Problem(status=404, message=f"there is no {request.path[:256]}", code="unknown_url")
        method = "GET" if request.method == "HEAD" else request.method
        if method == "OPTIONS" and (headers := self._access.preflight_headers(route, request)) is not None:
            request.route = _preflight(headers)
            return None
        if method not in route.methods:
            return _wrong_method(request, route)
        return self._access.check(route, request) or _check_type(route, request)


def assign_id(request: Request) -> None:
    """Take the id of the request from its client, or make one."""
    given = request.header(b"x-request-id")
    if given is not None and _SAFE_ID.fullmatch(given):
        request.request_id = given.decode()
    else:
        request.request_id = _ids.take()


class _RandomIds:
    """Random UUIDs. Those of a batch share all but their last 48 bits, which makes them a quarter as expensive."""

    def __init__(self) -> None:
        self._ready: list[str] = []

    def take(self) -> str:
        """Return an id that cannot be guessed, not even from those before it."""
        if not self._ready:
            digits = os.urandom(16 + 6 * _BATCH).hex()
            shared = f"{digits[:8]}-{digits[8:12]}-4{digits[12:15]}-a{digits[15:18]}-"
            self._ready = [shared + digits[at : at + 12] for at in range(32, len(digits), 12)]
        return self._ready.pop()


_ids = _RandomIds()


def _body_length(headers: Headers) -> int | None:
    for name, value in headers:
        if name == b"content-length":
            return int(value)
        if name == b"transfer-encoding":
            return None
    return 0


def _check_http(headers: Headers, version: str) -> Problem | None:
    """Return the problem of a head that the parser accepts and HTTP/1.1 does not."""
    if version not in _VERSIONS:
        return _bad(f"HTTP/{version} is not supported; use HTTP/1.1")
    names = [name for name, _ in headers]
    hosts = names.count(b"host")
    if hosts > 1 or (hosts == 0 and version == "1.1"):
        return _bad("the request needs one Host header")
    allowed = ([], [b"chunked"]) if version == "1.1" else ([],)
    if _codings(headers) not in allowed:
        return _bad("the only transfer encoding is chunked, with HTTP/1.1")
    return None


def _codings(headers: Headers) -> list[bytes]:
    return [value.lower() for name, value in headers if name == b"transfer-encoding"]


def _split(request: Request, url: bytes) -> Problem | None:
    """Set path and query."""
    if url.startswith(b"/"):
        path, _, request.query = url.partition(b"?")
        request.path = path.decode("latin-1")
        return None
    try:
        parsed = httptools.parse_url(url)
    except httptools.HttpParserInvalidURLError:
        return _bad("the target of the request is not valid")
    request.path, request.query = (parsed.path or b"/").decode("latin-1"), parsed.query or b""
    return None


def _wrong_method(request: Request, route: Route) -> Problem:
    allowed = ", ".join(route.methods)
    message = f"{request.method} is not possible on {request.path[:256]}: use {allowed}"
    return Problem(status=405, message=message, code="method_not_allowed", headers=((b"allow", allowed.encode()),))


def _check_type(route: Route, request: Request) -> Problem | None:
    """Refuse what the frontend would refuse without reading the body, which resets its connection with the answer."""
    if not route.generates or _JSON_TYPE.fullmatch(request.header(b"content-type") or b""):
        return None
    message = "the body must be JSON: send it with `Content-Type: application/json`"
    return Problem(status=415, message=message, code="unsupported_media_type")


def _preflight(headers: Headers) -> Route:
    async def answer(request: Request, frontend: object) -> Answer:
        return Answer(status=204, headers=tuple(headers))

    return Route(path="", methods=("OPTIONS",), access="open", own=answer)


def _bad(message: str) -> Problem:
    return Problem(status=400, message=message, code="bad_http")
