"""One request and its answer: from the complete request to the last byte for the client.

The body of a successful answer passes through as bytes. Errors are collected and rewritten, and so are whole answers of
routes that normalise them. Of a stream only whole events are passed on, so that an error event can be rewritten.
"""

import asyncio
import enum
import logging
from collections.abc import Awaitable, Callable
from functools import partial
from time import perf_counter_ns
from typing import TYPE_CHECKING, NamedTuple, Protocol

import msgspec

from baton.edge.errors import FieldError, Problem, ProblemError, error_answer, problem_of
from baton.edge.fetch import Fetch
from baton.edge.frontend_errors import has_error_event, problem_from_frontend, rewrite_error_events
from baton.edge.messages import HOP_BY_HOP, Answer, Headers, Request, end_to_end, request_head
from baton.edge.recording import CLIENT_LEFT, TRACE_HEADERS, end_timeline, start_timeline, trace_headers
from baton.edge.routes import Composed, Join, Json, Route
from baton.edge.upstream import UpstreamConnection
from baton.errors import BatonError
from baton.timelines.timeline import UNRECORDED, Failure, Recorder

if TYPE_CHECKING:
    from baton.edge.server import Edge

log = logging.getLogger(__name__)

_NOT_FORWARDED = (
    HOP_BY_HOP
    | TRACE_HEADERS
    | {
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
)
_NOT_RETURNED = HOP_BY_HOP | {b"x-request-id", b"date", b"server"}
_EVENT_END = b"\n\n"
NO_CONNECTION = Problem(
    status=503,
    message="the server has no connection left for this request; try again",
    code="overloaded",
    retry_after_s=1,
)
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
        "_has_output",
        "_held",
        "_join",
        "_mode",
        "_outgoing",
        "_paused",
        "_request",
        "_route",
        "_status",
        "_stream_failure",
        "_task",
        "_timeline",
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
        self._has_output = False
        self._buffer: list[bytes] = []
        self._held = b""
        self._paused = False
        self._stream_failure: Failure | None = None
        self._timeline: Recorder = UNRECORDED

    @property
    def route(self) -> Route:
        """The route of the request."""
        return self._route

    @property
    def generates(self) -> bool:
        """Whether workers compute for this request."""
        return self._route.generates

    def start(self) -> None:
        """Begin. The writer may be called before this returns."""
        if self._route.own is not None:
            self._task = self._edge.start_task(self._answer_itself(partial(self._route.own, self._request, self._edge)))
            return
        if self._route.generates:
            self._timeline = start_timeline(self._edge.timelines, self._request)
        try:
            body, composed, self._join, model = prepared_body(self._route, self._request.body)
        except BatonError as error:
            self._refuse(problem_of(error))
            return
        except Exception:  # noqa: BLE001 - logged and answered
            self._fail_internally()
            return
        self._timeline.name_model(model)
        self._timeline.mark("admitted")
        if composed is not None:
            sender = Sender(self._edge, self._request)
            self._task = self._edge.start_task(self._answer_itself(partial(composed, sender.send)))
            return
        self._outgoing = (forwarded_head(self._edge, self._request, len(body)), body)
        if (connection := self._edge.pool.take()) is not None:
            self.on_connected(connection)
        elif self._edge.pool.open < self._edge.limits.max_exchanges:
            self._connecting = self._edge.pool.connect(self)
        else:
            self._refuse(NO_CONNECTION)

    def cancel(self) -> None:
        """The client has left: cancel the request at the frontend. Nothing is called after this."""
        if self._connecting is not None:
            self._connecting.cancel()
        if self._task is not None:
            self._task.cancel()
        if self._upstream is not None:
            upstream, self._upstream = self._upstream, None
            upstream.abort()
        self._finish(CLIENT_LEFT, Failure("cancelled", "the client left"))

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
        self._timeline.mark("forwarded")

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
        if self._status < 400:  # the body of an error is no output
            if not self._has_output:
                self._has_output = True
                self._timeline.mark("first_token")
            self._timeline.output(perf_counter_ns())
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
        self._finish(self._status, self._stream_failure)
        self._writer.write_end()

    def on_lost(self, error: BatonError) -> None:
        """See `Receiver`."""
        self._connecting = self._upstream = None
        problem = Problem(status=503, message=error.message, code=error.code, retry_after_s=1)
        if self._mode in (None, Mode.WHOLE):
            self._refuse(problem)
        else:
            log.warning("%s: %s", self._request.request_id, error.message, extra=self._log_ids())
            self._finish(503, Failure(error.code, error.message))
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
        try:
            self._answer_whole(body)
        except Exception:  # noqa: BLE001 - logged and answered
            self._fail_internally()

    def _answer_whole(self, body: bytes) -> None:
        if self._status == 404 and self._route.generates:
            self._task = self._edge.start_task(self._answer_itself(partial(self._explain_missing_model, body)))
        elif self._status >= 400:
            self._refuse(self._problem(body))
        elif self._join is not None:
            self._end_joined(self._join.joined(body))
        else:
            self._answer(Answer(status=self._status, body=self._normalised(body)))

    def _end_joined(self, answer: Json) -> None:
        error, route = answer.get("error"), self._route
        if error is None:
            answer = answer if route.normalise is None else route.normalise(route.path, answer)
            self._answer(Answer(status=self._status, body=msgspec.json.encode(answer)))
            return
        code = error.get("code") if isinstance(error, dict) else None
        self._status = code if isinstance(code, int) and code >= 400 else 500
        self._refuse(self._problem(msgspec.json.encode(answer)))

    def _problem(self, body: bytes) -> Problem:
        reason = self._edge.take_reason(self._request.request_id)
        return problem_from_frontend(self._route.path, self._status, body, reason)

    def _rewritten(self, data: bytes) -> bytes:
        identity = self._request.request_id
        reason = self._edge.take_reason(identity)
        self._stream_failure = Failure("error_event", reason or "the stream has an error event")
        return rewrite_error_events(data, self._route.style, identity, reason)

    def _normalised(self, body: bytes) -> bytes:
        route = self._route
        assert route.normalise is not None
        if route.is_normal is not None and route.is_normal(body):
            return body
        try:
            return msgspec.json.encode(route.normalise(route.path, msgspec.json.decode(body, type=Json)))
        except msgspec.DecodeError:
            return body

    async def _explain_missing_model(self, body: bytes) -> Answer:
        problem = await self._edge.models.explain_missing(self._request, self._edge, self._edge.now())
        raise ProblemError(problem or self._problem(body))

    async def _answer_itself(self, handler: Callable[[], Awaitable[Answer]]) -> None:
        try:
            answer = await handler()
        except BatonError as error:
            self._refuse(problem_of(error))
        except Exception:  # noqa: BLE001 - logged and answered
            self._fail_internally()
        else:
            self._answer(answer)

    def _answer(self, answer: Answer) -> None:
        self._finish(answer.status, None)
        self._writer.write_answer(self._request, answer)

    def _finish(self, status: int, failure: Failure | None) -> None:
        """End the timeline, if it has not ended."""
        timeline, self._timeline = self._timeline, UNRECORDED
        end_timeline(self._edge.timelines, timeline, self._request, status, failure)

    def _log_ids(self) -> dict[str, object]:
        """Return the ids of the request for a line in the log."""
        trace = self._request.trace
        return {"request_id": self._request.request_id, "trace_id": None if trace is None else trace.trace_id}

    def _fail_internally(self) -> None:
        """Answer after an exception that nothing here expects, which is logged."""
        log.exception("%s: %s failed", self._request.request_id, self._route.path, extra=self._log_ids())
        self._refuse(INTERNAL)

    def _refuse(self, problem: Problem) -> None:
        request = self._request
        self._finish(problem.status, Failure(problem.code or "", problem.message))
        self._writer.write_answer(request, error_answer(problem, self._route.style, request.request_id))


class Sender:
    """Sends bodies of its own for one request of a client.

    Those for which the edge has no connection left wait for the others. The request is refused if it has not even one.
    """

    def __init__(self, edge: "Edge", request: Request) -> None:
        self._edge = edge
        self._request = request
        self._sent = 0
        self._answered = asyncio.Event()

    async def send(self, body: Json) -> Json:
        """See `Send`."""
        edge, request, route = self._edge, self._request, self._request.route
        assert route is not None
        content = msgspec.json.encode(body)
        status, answer = await self._exchange(forwarded_head(edge, request, len(content)), content)
        if status == 404 and (missing := await edge.models.explain_missing(request, edge, edge.now())) is not None:
            raise ProblemError(missing)
        if status >= 400:
            raise ProblemError(problem_from_frontend(route.path, status, answer, edge.take_reason(request.request_id)))
        decoded = msgspec.json.decode(answer, type=Json)
        return decoded if route.normalise is None else route.normalise(route.path, decoded)

    async def _exchange(self, head: bytes, body: bytes) -> tuple[int, bytes]:
        edge = self._edge
        fetch = Fetch(edge.pool, edge.upstream_host)
        while not fetch.begin(head, body, edge.limits.max_exchanges):
            if not self._sent:
                raise ProblemError(NO_CONNECTION)
            self._answered.clear()
            await self._answered.wait()
        self._sent += 1
        try:
            return await fetch.answer()
        finally:
            self._sent -= 1
            self._answered.set()


def forwarded_head(edge: "Edge", request: Request, length: int) -> bytes:
    """Return the head of a request for the frontend, whose body has `length` bytes."""
    headers = end_to_end(request.headers, _NOT_FORWARDED)
    headers += trace_headers(request)
    headers.append((b"host", edge.upstream_host))
    headers.append((b"x-request-id", request.request_id.encode()))
    if request.method == "POST":
        headers.append((b"content-length", b"%d" % length))
    # The frontend sees GET for HEAD, so that the length of the answer is known; the body stays here.
    method = b"GET" if request.method == "HEAD" else request.method.encode()
    target = request.path.encode("latin-1")
    return request_head(method, target + b"?" + request.query if request.query else target, headers)


class Prepared(NamedTuple):
    """The body to forward, and how its answer is joined if it is for a stream; or what answers the request instead.

    `model` is the one that the body names.
    """

    body: bytes
    composed: Composed | None = None
    join: Join | None = None
    model: str = ""


def prepared_body(route: Route, body: bytes) -> Prepared:
    """Apply the rules of a route to a body. Raises BatonError."""
    if route.prepare is None and route.compose is None:
        return Prepared(body)
    decoded = decode_object(body)
    prepared = decoded if route.prepare is None else route.prepare(route.path, decoded)
    model = str(prepared.get("model") or "")
    if route.compose is not None and (composed := route.compose(route.path, prepared)) is not None:
        return Prepared(body, composed, model=model)
    if route.join is not None and (stream := route.join.as_stream(prepared)) is not None:
        return Prepared(msgspec.json.encode(stream), join=route.join, model=model)
    return Prepared(body if prepared is decoded else msgspec.json.encode(prepared), model=model)


def decode_object(body: bytes) -> Json:
    """Return the JSON object in `body`. Raises FieldError."""
    try:
        decoded = msgspec.json.decode(body)
    except (msgspec.DecodeError, RecursionError, UnicodeError) as error:
        raise FieldError(None, f"the body is not valid JSON: {error}") from None
    if not isinstance(decoded, dict):
        raise FieldError(None, "the body must be a JSON object")
    return decoded
