"""Who may use the view: the same checks of host and origin as the control API has, and a token off loopback, where
only connections of this user are accepted without one.

The token comes once, in the URL that was printed; from then on the browser has a cookie that no script can read.
"""

import hashlib
import hmac
from urllib.parse import urlsplit
from weakref import WeakKeyDictionary

from aiohttp import web
from aiohttp.typedefs import Handler, Middleware

from baton.control.http.host_check import is_own_host
from baton.control.http.replies import error_reply
from baton.views.peer_user import Endpoint, is_other_user

TOKEN_PARAMETER = "token"
COOKIE_AGE_S = 7 * 24 * 3600
SAFE_METHODS = ("GET", "HEAD")
HEADERS = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self';"
    " img-src 'self' data: blob:; base-uri 'none'; form-action 'self'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Permissions-Policy": "camera=(), microphone=(), geolocation=()",
}


class ViewAccess:
    """Checks every request. Without a token, only connections of the same user of this machine may use the view."""

    def __init__(self, token: str | None) -> None:
        self._token = token
        self._foreign: WeakKeyDictionary[object, bool] = WeakKeyDictionary()  # by connection
        # The cookie proves that the browser had the token, and does not contain it.
        self._cookie_value = hashlib.sha256(b"baton view " + token.encode()).hexdigest() if token else ""

    def middleware(self, address: str, host: str, port: int) -> Middleware:
        """Return what checks the requests to a server at this address, and adds the security headers."""
        cookie = f"baton_view_{port}"  # a browser sends cookies to all ports of a host

        @web.middleware
        async def check(request: web.Request, handler: Handler) -> web.StreamResponse:
            refusal = self._refusal(request, address, host, cookie)
            if refusal is not None:
                refusal.headers.update(HEADERS)
                return refusal
            return await handler(request)

        return check

    def _refusal(self, request: web.Request, address: str, host: str, cookie: str) -> web.Response | None:
        """Return the response to a request that may not pass, or that only signs in; None for all others."""
        header = request.headers.get("Host", "")
        if not is_own_host(header, address, host):
            return error_reply(403, "forbidden", f"this server has no name {header!r}; use localhost or its IP address")
        if not is_same_origin(request):
            return error_reply(403, "forbidden", "requests of other web pages are refused")
        if self._token is None:
            return self._user_refusal(request)
        if TOKEN_PARAMETER in request.query and self._is_token(request.query[TOKEN_PARAMETER]):
            return self._signed_in(request, cookie)
        if self._is_signed_in(request, cookie):
            return None
        return error_reply(401, "unauthorized", "open the address with ?token= that `baton` printed at its start")

    def _user_refusal(self, request: web.Request) -> web.Response | None:
        transport = request.transport
        if transport is not None and transport not in self._foreign:
            peer, own = transport.get_extra_info("peername"), transport.get_extra_info("sockname")
            known = bool(peer and own)
            self._foreign[transport] = not known or is_other_user(Endpoint(*peer[:2]), Endpoint(*own[:2]))
        # A client that has closed its connection gets no reply, and cannot have its request executed unchecked.
        if transport is not None and not self._foreign[transport]:
            return None
        message = "this view is of another user of the machine: ask for its --view-token"
        return error_reply(403, "forbidden", message)

    def _is_token(self, given: str) -> bool:
        return self._token is not None and _is_equal(given, self._token)

    def _is_signed_in(self, request: web.Request, cookie: str) -> bool:
        scheme, _, given = request.headers.get("Authorization", "").partition(" ")
        if scheme.lower() == "bearer":
            return self._is_token(given.strip())
        return _is_equal(request.cookies.get(cookie, ""), self._cookie_value)

    def _signed_in(self, request: web.Request, cookie: str) -> web.Response:
        response = web.Response(status=303, headers={"Location": request.path, "Cache-Control": "no-store"})
        response.set_cookie(
            cookie,
            self._cookie_value,
            max_age=COOKIE_AGE_S,
            httponly=True,
            samesite="Strict",
            secure=request.secure,
        )
        return response


def _is_equal(given: str, expected: str) -> bool:
    """Compare in constant time. Bytes of a header that are not UTF-8 are surrogates."""
    return hmac.compare_digest(given.encode(errors="surrogateescape"), expected.encode())


def is_same_origin(request: web.Request) -> bool:
    """Whether a request was sent by a page of this server, or by no page. Other pages may link to it."""
    site = request.headers.get("Sec-Fetch-Site", "none")
    navigates = request.headers.get("Sec-Fetch-Mode") == "navigate" and request.method in SAFE_METHODS
    if site not in ("none", "same-origin") and not navigates:
        return False
    origin = request.headers.get("Origin")
    return origin is None or urlsplit(origin).netloc == request.headers.get("Host", "")


async def add_headers(_: web.Request, response: web.StreamResponse) -> None:
    """Add the security headers to a response that is about to be sent."""
    response.headers.update(HEADERS)
