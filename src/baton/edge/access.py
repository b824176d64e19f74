"""Who may send requests: API keys with limits of their own, the control token, and the origins of web pages."""

import hashlib
import logging
import math
import os
from pathlib import Path

import msgspec

from baton.config.load import read_api_keys
from baton.edge.errors import Problem
from baton.edge.messages import Headers, Request
from baton.edge.routes import Route
from baton.errors import ConfigError

log = logging.getLogger(__name__)

SECONDS_PER_MINUTE = 60.0
PREFLIGHT_MAX_AGE_S = 600
_EXPOSED = (b"access-control-expose-headers", b"x-request-id, retry-after")


class KeyLimits(msgspec.Struct, frozen=True, kw_only=True):
    """Limits of each key. 0: none."""

    requests_per_minute: int = 0
    max_concurrency: int = 0


class Client:
    """The requests of one API key, or of everybody where no key is needed."""

    __slots__ = ("_allowance", "_at", "_limits", "in_flight")

    def __init__(self, limits: KeyLimits) -> None:
        self._limits = limits
        self._allowance = float(limits.requests_per_minute)
        self._at = 0.0
        self.in_flight = 0

    def admit(self, now: float) -> Problem | None:
        """Count a request in, or return why it has to wait. Pair with `leave`."""
        if self._limits.max_concurrency and self.in_flight >= self._limits.max_concurrency:
            message = f"this API key has {self.in_flight} requests in progress, which is its limit; wait for one to end"
            return Problem(status=429, message=message, code="concurrency_limit_exceeded", retry_after_s=1)
        if (wait_s := self._take(now)) is not None:
            message = (
                f"this API key may send {self._limits.requests_per_minute} requests per minute; try again in {wait_s} s"
            )
            return Problem(status=429, message=message, code="rate_limit_exceeded", retry_after_s=wait_s)
        self.in_flight += 1
        return None

    def leave(self) -> None:
        """Count a request out."""
        self.in_flight -= 1

    def _take(self, now: float) -> int | None:
        """Take one request from the allowance; return the seconds to wait if there is none."""
        per_minute = self._limits.requests_per_minute
        if not per_minute:
            return None
        gained = (now - self._at) * per_minute / SECONDS_PER_MINUTE if self._at else 0.0
        self._allowance = min(float(per_minute), self._allowance + gained)
        self._at = now
        if self._allowance < 1:
            return max(1, math.ceil((1 - self._allowance) * SECONDS_PER_MINUTE / per_minute))
        self._allowance -= 1
        return None


class ApiKeys:
    """The keys that are accepted, given and from a file that is read again when it changes.

    Keys are looked up by a keyed hash, so the time of a lookup says nothing about a key.
    """

    def __init__(self, given: tuple[str, ...], file: Path | None, limits: KeyLimits) -> None:
        self._given = given
        self._file = file
        self._limits = limits
        self._salt = os.urandom(16)
        self._version: tuple[int, int, int] | None = None
        self._clients: dict[bytes, Client] = {}
        self._anonymous = Client(limits)
        self._load()

    @property
    def needed(self) -> bool:
        """Whether requests need a key."""
        return bool(self._clients) or self._file is not None

    def client(self, key: bytes | None) -> Client | None:
        """Return the client of `key`, None if the key is not accepted."""
        if not self.needed:
            return self._anonymous
        return self._clients.get(self._hash(key)) if key is not None else None

    def reload_changed(self) -> None:
        """Read the file again if it has changed. A file that cannot be read leaves the keys as they are."""
        if self._file is None or self._file_version() == self._version:
            return
        try:
            self._load()
            log.info("%d API keys are accepted", len(self._clients))
        except ConfigError as error:
            log.error("%s; the API keys stay as they were", error.message)
            self._version = self._file_version()

    def _load(self) -> None:
        version = self._file_version()
        keys = [*self._given, *(read_api_keys(self._file) if self._file is not None else ())]
        digests = [self._hash(key.encode()) for key in keys]
        self._clients = {digest: self._clients.get(digest) or Client(self._limits) for digest in digests}
        self._version = version

    def _file_version(self) -> tuple[int, int, int] | None:
        try:
            stat = self._file.stat() if self._file is not None else None
        except OSError:
            return None
        return (stat.st_mtime_ns, stat.st_size, stat.st_ino) if stat is not None else None

    def _hash(self, key: bytes) -> bytes:
        return hashlib.blake2b(key, key=self._salt, digest_size=32).digest()


class Access:
    """Decides by the head of a request whether it may come in."""

    def __init__(self, keys: ApiKeys, control_token: str | None, cors_origins: frozenset[str]) -> None:
        self.keys = keys
        self._salt = os.urandom(16)
        self._control = None if control_token is None else self._hash(control_token.encode())
        self._origins = frozenset(origin.encode() for origin in cors_origins)
        self._any_origin = b"*" in self._origins

    def check(self, route: Route, request: Request) -> Problem | None:
        """Return why `request` is refused, None if it is not. Sets its client."""
        if route.access == "open":
            return None
        if route.access == "control":
            return self._check_control(request)
        request.client = self.keys.client(_given_key(request))
        if request.client is not None:
            return None
        message = (
            "this endpoint needs an API key: send it as `Authorization: Bearer KEY`"
            if _given_key(request) is None
            else "the API key is not valid"
        )
        challenge = ((b"www-authenticate", b"Bearer"),)
        return Problem(status=401, message=message, code="invalid_api_key", headers=challenge)

    def cors_headers(self, request: Request) -> Headers:
        """Return the headers that let a web page of an allowed origin read the answer."""
        if not self._origins or not (origin := request.header(b"origin")):
            return []
        if self._any_origin:
            return [(b"access-control-allow-origin", b"*"), _EXPOSED]
        if origin in self._origins:
            return [(b"access-control-allow-origin", origin), (b"vary", b"Origin"), _EXPOSED]
        return [(b"vary", b"Origin")]

    def preflight_headers(self, route: Route, request: Request) -> Headers | None:
        """Return what the answer to a preflight request has besides `cors_headers`.

        None if the request is none, or from an origin that is not allowed.
        """
        if request.header(b"access-control-request-method") is None or not self._allows(request.header(b"origin")):
            return None
        asked = request.header(b"access-control-request-headers") or b"authorization, content-type"
        return [
            (b"access-control-allow-methods", ", ".join(route.methods).encode()),
            (b"access-control-allow-headers", asked),
            (b"access-control-max-age", b"%d" % PREFLIGHT_MAX_AGE_S),
        ]

    def _allows(self, origin: bytes | None) -> bool:
        return bool(origin) and (self._any_origin or origin in self._origins)

    def _check_control(self, request: Request) -> Problem | None:
        key = _given_key(request)
        if key is not None and self._control is not None and self._hash(key) == self._control:
            return None
        message = "this route needs the control token: send it as `Authorization: Bearer TOKEN`"
        return Problem(status=401, message=message, code="invalid_control_token")

    def _hash(self, token: bytes) -> bytes:
        return hashlib.blake2b(token, key=self._salt, digest_size=32).digest()


def _given_key(request: Request) -> bytes | None:
    """Return the key of OpenAI's clients (Authorization) or Anthropic's (x-api-key)."""
    if (authorization := request.header(b"authorization")) is not None:
        scheme, _, key = authorization.partition(b" ")
        if scheme.lower() == b"bearer":
            return key.strip()
    return request.header(b"x-api-key")
