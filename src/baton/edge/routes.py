"""The routes of the edge: which paths are public, what they need, and what the edge does with them.

A route is forwarded to the frontend unless it has an `own` handler. The JSON body of a forwarded route passes through
`prepare` on its way to the frontend, and a whole answer through `normalise` on its way back. Some bodies need several
requests to the frontend, or answers that depend on the request: `compose` answers those.
"""

from collections.abc import Awaitable, Callable
from typing import Literal, Protocol

import msgspec

from baton.edge.errors import Style
from baton.edge.messages import Answer, Request

Json = dict[str, object]

Prepare = Callable[[str, Json], Json]
"""Called with the path of the route and the decoded body, which it does not change. Returns the body to forward: the
same object if nothing changes. Raises FieldError."""

Normalise = Callable[[str, Json], Json]
"""Called with the path of the route and a whole, decoded answer of status 200. Returns the answer to send."""

IsNormal = Callable[[bytes], bool]
"""Called with a whole, encoded answer. Returns whether `Normalise` certainly leaves it as it is."""

NormaliseEvents = Callable[[str, bytes], bytes]
"""Called with the path of the route and some whole server-sent events. Returns the bytes to send instead."""


class Join(msgspec.Struct, frozen=True):
    """Answers that are whole for the client and a stream at the frontend.

    `as_stream` is called with the prepared body; it returns the body of a stream, or None if the request is sent as it
    is. `joined` is called with all events of that stream; it returns the whole answer, or one with `error`.
    """

    as_stream: Callable[[Json], Json | None]
    joined: Callable[[bytes], Json]


class Frontend(Protocol):
    """What an own handler can ask the edge for."""

    async def fetch(self, path: str) -> tuple[int, bytes]:
        """Return status and body of the frontend's answer to a GET. Raises BatonError if there is none."""


Own = Callable[[Request, Frontend], Awaitable[Answer]]
"""Answers a request itself. Raises BatonError (FieldError for a field); other errors become a 500."""


Send = Callable[[Json], Awaitable[Json]]
"""Sends a body to the frontend, on the path of the request. Returns its normalised answer; raises BatonError if that is
an error. Cancelling it cancels the request at the frontend."""

Composed = Callable[[Send], Awaitable[Answer]]
Compose = Callable[[str, Json], Composed | None]
"""Called with the path of the route and the prepared body. Returns what answers the request, or None if the body is to
be forwarded. Raises FieldError."""


class Route(msgspec.Struct, frozen=True, kw_only=True):
    """One path. With a final slash, every path below it."""

    path: str
    methods: tuple[str, ...]
    access: Literal["open", "key", "control"] = "key"
    generates: bool = False
    """Whether a request makes workers compute: it counts against the limits of its key, and is cancelled when its
    client leaves, also by closing its sending side only."""
    style: Style = "openai"
    own: Own | None = None
    prepare: Prepare | None = None
    compose: Compose | None = None
    join: Join | None = None
    normalise: Normalise | None = None
    is_normal: IsNormal | None = None
    normalise_events: NormaliseEvents | None = None


def _generating(path: str, style: Style = "openai") -> Route:
    return Route(path=path, methods=("POST",), generates=True, style=style)


ROUTES: tuple[Route, ...] = (
    _generating("/v1/chat/completions"),
    _generating("/v1/completions"),
    _generating("/v1/embeddings"),
    _generating("/v1/responses"),
    _generating("/v1/messages", style="anthropic"),
    Route(path="/v1/messages/count_tokens", methods=("POST",), style="anthropic"),
    Route(path="/v1/models", methods=("GET",)),
    Route(path="/v1/models/", methods=("GET",)),
    Route(path="/tokenize", methods=("POST",)),
    Route(path="/detokenize", methods=("POST",)),
    Route(path="/version", methods=("GET",), access="open"),
    Route(path="/metrics", methods=("GET",)),
    Route(path="/metrics/targets", methods=("GET",)),
    Route(path="/openapi.json", methods=("GET",)),
    Route(path="/health", methods=("GET",), access="open"),
    Route(path="/live", methods=("GET",), access="open"),
    Route(path="/busy_threshold", methods=("GET", "POST"), access="control"),
    Route(path="/control/about", methods=("GET",), access="control"),
    Route(path="/control/timelines", methods=("GET",), access="control"),
)


class RouteTable:
    """Finds the route of a path."""

    def __init__(self, routes: tuple[Route, ...] = ROUTES) -> None:
        self._exact = {route.path: route for route in routes if not route.path.endswith("/")}
        self._below = tuple(route for route in routes if route.path.endswith("/"))

    def find(self, path: str) -> Route | None:
        """Return the route of `path`, None if there is none."""
        if (route := self._exact.get(path)) is not None:
            return route
        for route in self._below:
            if path.startswith(route.path) and len(path) > len(route.path):
                return route
        return None
