"""One request and its answer: from the complete request to the last byte for the client.

The body of a successful answer passes through as bytes. Errors are collected and rewritten, and so are whole answers of
routes that normalise them. Of a stream only whole events are passed on, so that an error event can be rewritten.
"""

import asyncio
import enum
import logging
from collections.abc import Awaitable
from typing import TYPE_CHECKING, NamedTuple, Protocol

import msgspec

from baton.edge.errors import FieldError, Problem, ProblemError, error_answer, problem_of
from baton.edge.frontend_errors import has_error_event, problem_from_frontend, rewrite_error_events
from baton.edge.messages import HOP_BY_HOP, Answer, Headers, Request, end_to_end, request_head
from baton.edge.routes import Composed, Join, Json, Route
from baton.edge.upstream import UpstreamConnection
from baton.errors import BatonError

if TYPE_CHECKING:
    from baton.edge.server import Edge

log = logging.getLogger(__name__)

_NOT_FORWARDED = HOP_BY_HOP | {
    b"host",
    b"expect",
    b"authorization",
    b"x-api-key",
    b"x-request-id",
    b"x-dynamo-request-id",
    b"accept-encoding",
    b"origin",
    b"cookie",
}
_NOT_RETURNED = HOP_BY_HOP | {b"x-request-id", b"date", b"server"}
_EVENT_END = b"\n\n"
INTERNAL = Problem(status=500, message="internal error", code="internal")
_EVENTS_TYPE = b"text/event-stream"


class Mode(enum.Enum):
    """What becomes of the body of an answer."""

    RAW = enum.auto()
    EVENTS = enum.auto()
    WHOLE = enum.auto()


_RAW, _EVENTS = Mode.RAW, Mode.EVENTS  # an attribute of an enum is slow to look up


class Writer(Protocol):
    """The client's connection, as an exchange sees it."""

    def write_head(self, request: Request, status: int, headers: Headers, length: int | None) -> None:
        """Send the head of an answer; with no `length`, the body is chunked or ends with the connection."""

    def write_body(self, data: bytes) -> None:
        """Send some of the body."""

    def flush(self) -> None:
        """Send what was written: nothing more is there for now."""

    def write_end(self) -> None:
        """End the body. The exchange is over."""

    def write_answer(self, request: Request, answer: Answer) -> None:
        """Send a complete answer. The exchange is over."""

    def break_off(self) -> None:
        """Close the connection within an answer, so that the client sees that the answer is not complete."""


class Exchange:
    """Forwards one request to the frontend, or has its route answer it."""

    __slots__ = (
        "_buffer",
        "_connecting",
        "_edge",
        "_held",
        "_join",
        "_mode",
        "_outgoing",
        "_paused",
        "_request",
        "_route",
        "_status",
        "_task",
        "_upstream",
        "_writer",
    )

    def __init__(self, edge: "Edge", writer: Writer, request: Request, route: Route) -> None:
        self._edge = edge
        self._writer = writer
        self._request = request
        self._route = route
        self._upstream: UpstreamConnection | None = None
        self._connecting: asyncio.Task[None] | None = None
        self._task: asyncio.Task[None] | None = None
        self._outgoing: tuple[bytes, bytes] = (b"", b"")
        self._join: Join | None = None
        self._mode: Mode | None = None
        self._status = 0
        self._buffer: list[bytes] = []
        self._held = b""
        self._paused = False

    @property
    def generates(self) -> bool:
        """Whether workers compute for this request."""
        return self._route.generates

    def start(self) -> None:
        """Begin. The writer may be called before this returns."""
        if self._route.own is not None:
            self._task = self._edge.start_task(self._answer_itself(self._route.own(self._request, self._edge)))
            return
        try:
            body, composed, self._join = prepared_body(self._route, self._request.body)
        except BatonError as error:
            self._refuse(problem_of(error))
            return
        except Exception:
            log.exception("%s: %s failed", self._request.request_id, self._route.path)
            self._refuse(INTERNAL)
            return
        if composed is not None:
            self._task = self._edge.start_task(self._answer_itself(composed(Sender(self._edge, self._request).send)))
            return
        self._outgoing = (forwarded_head(self._edge, self._request, len(body)), body)
        if (connection := self._edge.pool.take()) is not None:
            self.on_connected(connection)
        elif self._edge.pool.open < self._edge.limits.max_exchanges:
            self._connecting = self._edge.pool.connect(self)
        else:
            message = "the server has no connection left for this request; try again"
            self._refuse(Problem(status=503, message=message, code="overloaded", retry_after_s=1))

    def cancel(self) -> None:
        """The client has left: cancel the request at the frontend. Nothing is called after this."""
        if self._connecting is not None:
            self._connecting.cancel()
        if self._task is not None:
            self._task.cancel()
        if self._upstream is not None:
            upstream, self._upstream = self._upstream, None
            upstream.abort()

    def pause(self) -> None:
        """The client does not read: stop reading the answer."""
        self._paused = True
        if self._upstream is not None:
            self._upstream.pause()

    def resume(self) -> None:
        """The client reads again."""
        self._paused = False
        if self._upstream is not None:
            self._upstream.resume()

    # The upstream connection's callbacks.

    def on_connected(self, connection: UpstreamConnection) -> None:
        """See `Opened`."""
        self._connecting = None
        self._upstream = connection
        head, body = self._outgoing
        self._outgoing = (b"", b"")
        connection.send(self, head, body)

    def on_head(self, status: int, headers: Headers) -> None:
        """See `Receiver`."""
        self._status = status
        content_type = next((value for name, value in headers if name == b"content-type"), b"")
        streams = content_type.startswith(_EVENTS_TYPE)
        if status >= 400 or self._collects(streams):
            self._mode = Mode.WHOLE
            return
        self._mode = Mode.EVENTS if streams else Mode.RAW
        length = next((value for name, value in headers if name == b"content-length"), None)
        kept = end_to_end(headers, _NOT_RETURNED)
        self._writer.write_head(self._request, status, kept, None if length is None else int(length))

    def _collects(self, streams: bool) -> bool:
        """Whether an answer is sent when it is complete."""
        return self._join is not None if streams else self._route.normalise is not None

    def on_data(self, data: bytes) -> None:
        """See `Receiver`."""
        mode = self._mode
        if mode is _EVENTS:
            self._pass_events(data)
        elif mode is _RAW:
            self._writer.write_body(data)
        else:
            self._buffer.append(data)

    def flush(self) -> None:
        """See `Receiver`."""
        self._writer.flush()

    def on_end(self) -> None:
        """See `Receiver`."""
        self._resume_released()
        if self._mode is Mode.WHOLE:
            self._end_whole(b"".join(self._buffer))
            return
        if self._held:
            self._writer.write_body(self._held)
        self._writer.write_end()

    def on_lost(self, error: BatonError) -> None:
        """See `Receiver`."""
        self._connecting = self._upstream = None
        problem = Problem(status=503, message=error.message, code=error.code, retry_after_s=1)
        if self._mode in (None, Mode.WHOLE):
            self._refuse(problem)
        else:
            log.warning("%s: %s", self._request.request_id, error.message)
            self._writer.break_off()

    def _resume_released(self) -> None:
        """Give the connection up, reading: it may serve another exchange now."""
        upstream, self._upstream = self._upstream, None
        if self._paused and upstream is not None:
            upstream.resume()

    def _pass_events(self, data: bytes) -> None:
        """Pass on whole events, and hold the rest back."""
        if self._held:
            data = self._held + data
            self._held = b""
        if not data.endswith(_EVENT_END):
            cut = data.rfind(_EVENT_END) + len(_EVENT_END)
            if cut < len(_EVENT_END):
                self._held = data
                return
            self._held = data[cut:]
            data = data[:cut]
        if has_error_event(data):
            data = self._rewritten(data)
        if self._route.normalise_events is not None:
            data = self._route.normalise_events(self._route.path, data)
        if data:
            self._writer.write_body(data)

    def _end_whole(self, body: bytes) -> None:
        if self._status == 404 and self._route.generates:
            self._task = self._edge.start_task(self._answer_missing_model(body))
        elif self._status >= 400:
            self._refuse(self._problem(body))
        elif self._join is not None:
            self._end_joined(self._join.joined(body))
        else:
            self._writer.write_answer(self._request, Answer(status=self._status, body=self._normalised(body)))

    def _end_joined(self, answer: Json) -> None:
        body = msgspec.json.encode(answer)
        error = answer.get("error")
        if error is None:
            self._writer.write_answer(self._request, Answer(status=self._status, body=self._normalised(body)))
            return
        code = error.get("code") if isinstance(error, dict) else None
        self._status = code if isinstance(code, int) and code >= 400 else 500
        self._refuse(self._problem(body))

    def _problem(self, body: bytes) -> Problem:
        reason = self._edge.take_reason(self._request.request_id)
        return problem_from_frontend(self._route.path, self._status, body, reason)

    def _rewritten(self, data: bytes) -> bytes:
        identity = self._request.request_id
        return rewrite_error_events(data, self._route.style, identity, self._edge.take_reason(identity))

    def _normalised(self, body: bytes) -> bytes:
        assert self._route.normalise is not None
        try:
            return msgspec.json.encode(self._route.normalise(self._route.path, msgspec.json.decode(body, type=Json)))
        except msgspec.DecodeError:
            return body

    async def _answer_missing_model(self, body: bytes) -> None:
        problem = await self._edge.models.explain_missing(self._request, self._edge, self._edge.now())
        self._refuse(problem or self._problem(body))

    async def _answer_itself(self, answering: Awaitable[Answer]) -> None:
        try:
            answer = await answering
        except BatonError as error:
            self._refuse(problem_of(error))
        except Exception:
            log.exception("%s: %s failed", self._request.request_id, self._route.path)
            self._refuse(INTERNAL)
        else:
            self._writer.write_answer(self._request, answer)

    def _refuse(self, problem: Problem) -> None:
        request = self._request
        self._writer.write_answer(request, error_answer(problem, self._route.style, request.request_id))


class Sender:
    """Sends bodies of its own for one request of a client."""

    def __init__(self, edge: "Edge", request: Request) -> None:
        self._edge = edge
        self._request = request

    async def send(self, body: Json) -> Json:
        """See `Send`."""
        edge, request, route = self._edge, self._request, self._request.route
        assert route is not None
        content = msgspec.json.encode(body)
        status, answer = await edge.send(forwarded_head(edge, request, len(content)), content)
        if status == 404 and (missing := await edge.models.explain_missing(request, edge, edge.now())) is not None:
            raise ProblemError(missing)
        if status >= 400:
            raise ProblemError(problem_from_frontend(route.path, status, answer, edge.take_reason(request.request_id)))
        decoded = msgspec.json.decode(answer, type=Json)
        return decoded if route.normalise is None else route.normalise(route.path, decoded)


def forwarded_head(edge: "Edge", request: Request, length: int) -> bytes:
    """Return the head of a request for the frontend, whose body has `length` bytes."""
    headers = end_to_end(request.headers, _NOT_FORWARDED)
    headers.append((b"host", edge.upstream_host))
    headers.append((b"x-request-id", request.request_id.encode()))
    if request.method == "POST":
        headers.append((b"content-length", b"%d" % length))
    # The frontend sees GET for HEAD, so that the length of the answer is known; the body stays here.
    method = b"GET" if request.method == "HEAD" else request.method.encode()
    target = request.path.encode("latin-1")
    return request_head(method, target + b"?" + request.query if request.query else target, headers)


class Prepared(NamedTuple):
    """The body to forward, and how its answer is joined if it is for a stream; or what answers the request instead."""

    body: bytes
    composed: Composed | None = None
    join: Join | None = None


def prepared_body(route: Route, body: bytes) -> Prepared:
    """Apply the rules of a route to a body. Raises BatonError."""
    if route.prepare is None and route.compose is None:
        return Prepared(body)
    decoded = decode_object(body)
    prepared = decoded if route.prepare is None else route.prepare(route.path, decoded)
    if route.compose is not None and (composed := route.compose(route.path, prepared)) is not None:
        return Prepared(body, composed)
    if route.join is not None and (stream := route.join.as_stream(prepared)) is not None:
        return Prepared(msgspec.json.encode(stream), join=route.join)
    return Prepared(body if prepared is decoded else msgspec.json.encode(prepared))


def decode_object(body: bytes) -> Json:
    """Return the JSON object in `body`. Raises FieldError."""
    try:
        return msgspec.json.decode(body, type=Json)
    except msgspec.ValidationError:
        raise FieldError(None, "the body must be a JSON object") from None
    except (msgspec.DecodeError, RecursionError, UnicodeError) as error:
        raise FieldError(None, f"the body is not valid JSON: {error}") from None
