"""One connection of a client: its requests, one after the other, and their answers.

    waiting ──► head ──► body ──► exchange ──► waiting        (keep-alive)
                 │         │         └───────► closed
                 └─────────┴──► refused ──► lingering ──► closed

Requests that arrive while an exchange runs are parsed and wait. What is not valid HTTP, or could be read in two ways,
is refused and the connection closed; the parser decides that.
"""

import asyncio
import enum
import math
from typing import TYPE_CHECKING, cast

import httptools

from baton.edge.access import Client
from baton.edge.answer_writer import AnswerWriter
from baton.edge.errors import Problem, error_answer
from baton.edge.exchange import Exchange
from baton.edge.heads import assign_id
from baton.edge.messages import Request, request_head

if TYPE_CHECKING:
    from baton.edge.server import Edge

_CONTINUE = b"HTTP/1.1 100 Continue\r\n\r\n"
_UPGRADE_HEADERS = frozenset((b"upgrade", b"connection", b"http2-settings"))
_FRAMING_SHARE = 8
"""A chunk of one byte needs five more."""
_SMALL_BODY = 64 * 1024
"""A body of up to this size is read even if its request is refused, so that the connection can be kept."""


_READ_AHEAD = 4
"""How many requests may wait while reading goes on."""


class Reading(enum.Enum):
    """What the next bytes of the client are."""

    HEAD = enum.auto()
    BODY = enum.auto()
    NOTHING = enum.auto()


class ClientConnection(asyncio.Protocol):
    """The edge's end of one client's connection."""

    __slots__ = (
        "_admitted",
        "_body",
        "_body_bytes",
        "_body_timeout_s",
        "_client_sends",
        "_edge",
        "_exchange",
        "_framing_bytes",
        "_has_completed",
        "_head_bytes",
        "_owes_continue",
        "_parser",
        "_paused_reading",
        "_paused_writing",
        "_queue",
        "_reading",
        "_request",
        "_started_at",
        "_transport",
        "_writer",
        "deadline",
    )

    def __init__(self, edge: "Edge") -> None:
        self._edge = edge
        self._transport: asyncio.Transport | None = None
        self._writer: AnswerWriter | None = None
        self._parser = httptools.HttpRequestParser(self)
        self._reading = Reading.HEAD
        self._request: Request | None = None
        self._body: list[bytes] = []
        self._body_bytes = 0
        self._body_timeout_s = 0.0
        self._head_bytes = 0
        self._framing_bytes = 0
        self._has_completed = False
        """Whether a request has ended within what was read last."""
        self._queue: list[Request] = []
        self._exchange: Exchange | None = None
        self._started_at = 0.0
        self._admitted: Client | None = None
        self._owes_continue = False
        self._client_sends = True
        self._paused_reading = False
        self._paused_writing = False
        self.deadline = math.inf
        """When the connection is closed unless something happens before, in the time of the event loop."""

    @property
    def awaits_head(self) -> bool:
        """Whether no complete head of a request has arrived that is not answered."""
        return self._exchange is None and self._reading is Reading.HEAD and not self._queue

    @property
    def is_answering(self) -> bool:
        """Whether the client is still to get something."""
        waiting = self._transport is not None and self._transport.get_write_buffer_size() > 0
        return self._exchange is not None or waiting

    def expire(self) -> None:
        """The deadline has passed: say so to a client within a request, and close."""
        if self._transport is None:
            return
        if self._exchange is not None or self._request is None or self._reading is Reading.NOTHING:
            self.abort()
            return
        part = "head" if self._reading is Reading.HEAD else "body"
        self._refuse_rest(
            Problem(status=408, message=f"the {part} of the request took too long", code="request_timeout")
        )

    def close_when_idle(self) -> None:
        """Close the connection after the request in progress, or now without one."""
        if self._transport is None or self._writer is None:
            return
        self._writer.closes = True
        if self.awaits_head and self._request is None:
            self._close()

    def abort(self) -> None:
        """Close the connection at once."""
        if self._transport is not None:
            self._transport.abort()

    # The transport's callbacks.

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's is no subclass
        self._writer = AnswerWriter(self._edge, self._transport, self._answered, self._close)
        self.deadline = self._edge.now() + self._edge.limits.head_timeout_s
        if not self._edge.add(self):
            message = "the server has no connection left; try again"
            self._refuse_rest(Problem(status=503, message=message, code="overloaded", retry_after_s=1))

    def data_received(self, data: bytes) -> None:
        if self._reading is Reading.NOTHING:
            return
        self._has_completed = False
        before = self._body_bytes if self._reading is Reading.BODY else 0
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserUpgrade as upgrade:
            self._ignore_upgrade(data[upgrade.args[0] :])
        except httptools.HttpParserCallbackError as error:
            cause = error.__context__
            if not isinstance(cause, RefusedHead):
                raise
            self._refuse_rest(cause.problem)
        except httptools.HttpParserError as error:
            self._refuse_rest(Problem(status=400, message=f"the request is not valid HTTP: {error}", code="bad_http"))
        else:
            if not self._has_completed:  # all of the data belongs to the request in progress
                self._bound_head(len(data))
                self._bound_framing(len(data) - (self._body_bytes - before))

    def eof_received(self) -> bool:
        """Keep the connection for an answer that needs no computing; otherwise the client has left."""
        self._client_sends = False
        assert self._transport is not None
        assert self._writer is not None
        if self._exchange is not None and not self._exchange.generates and self._transport.can_write_eof():
            self._writer.closes = True
            return True
        if self._exchange is not None:
            self.abort()
        self._close()
        return False

    def connection_lost(self, exc: Exception | None) -> None:
        self._edge.remove(self)
        exchange, self._exchange = self._exchange, None
        if exchange is not None:
            exchange.cancel()
            self._edge.counts.abandoned(exchange.route)
        self._leave()
        self._queue.clear()
        if self._writer is not None:
            self._writer.detach()
        self._transport = self._writer = None
        del self._parser  # which refers to this object

    def pause_writing(self) -> None:
        self._paused_writing = True
        self._renew_deadline()
        if self._exchange is not None:
            self._exchange.pause()

    def resume_writing(self) -> None:
        self._paused_writing = False
        self._renew_deadline()
        if self._exchange is not None:
            self._exchange.resume()
        else:
            self._next()

    # The parser's callbacks.

    def on_message_begin(self) -> None:
        if len(self._queue) >= self._edge.limits.pipelined:
            raise RefusedHead(Problem(status=400, message="too many requests are sent ahead", code="bad_http"))
        self._request = Request()
        self._head_bytes = 0
        self._renew_deadline()

    def on_url(self, url: bytes) -> None:
        assert self._request is not None
        self._request.query += url  # may arrive in parts; split when the head is complete

    def on_header(self, name: bytes, value: bytes) -> None:
        assert self._request is not None
        headers = self._request.headers
        limits = self._edge.limits
        self._head_bytes += len(name) + len(value)
        if self._head_bytes > limits.head_bytes or len(headers) >= limits.headers:
            raise RefusedHead(_head_too_large(limits.head_bytes))
        if self._reading is Reading.HEAD:  # not a trailer
            headers.append((name.lower(), value))

    def on_headers_complete(self) -> None:
        request = self._request
        assert request is not None
        self._reading = Reading.BODY
        self._body_bytes = self._framing_bytes = 0
        parser = self._parser
        request.method = parser.get_method().decode("latin-1")
        request.keep_alive = parser.should_keep_alive()
        if parser.should_upgrade():
            return
        length = self._edge.heads.check(request, request.query, parser.get_http_version())
        limits = self._edge.limits
        self._body_timeout_s = limits.body_timeout_s + (length or 0) / limits.body_bytes_per_s
        self._renew_deadline()
        if request.http11 and request.header(b"expect") is not None:
            self._expect(request)
        elif request.problem is not None and (length is None or length > _SMALL_BODY):
            raise RefusedHead(request.problem)

    def on_body(self, body: bytes) -> None:
        request = self._request
        assert request is not None
        self._body_bytes += len(body)
        if self._body_bytes > self._edge.limits.body_bytes:
            raise RefusedHead(self._edge.heads.too_large())
        if request.problem is None:
            self._body.append(body)

    def on_message_complete(self) -> None:
        request = self._request
        assert request is not None
        if self._parser.should_upgrade():
            return
        if self._body:
            request.body = self._body[0] if len(self._body) == 1 else b"".join(self._body)
            self._body.clear()
        self._request = None
        self._has_completed = True
        self._owes_continue = False
        self._reading = Reading.HEAD
        self._queue.append(request)
        if self._is_free():
            self._next()
        else:
            self._bound_waiting()

    def _next(self) -> None:
        """Start the exchanges of waiting requests, until one of them takes its time."""
        while self._queue and self._is_free():
            self.deadline = math.inf
            self._start(self._queue.pop(0))
        if self._is_free():
            self._read_on()
        elif self._queue or self._paused_reading:
            self._bound_waiting()

    def _bound_waiting(self) -> None:
        """Read while a few small requests wait for an answer that is computed: its client may leave."""
        if self._transport is None or self._transport.is_closing():
            return
        pauses = not (self._exchange is not None and self._exchange.generates and self._few_wait())
        if pauses and not self._paused_reading:
            self._transport.pause_reading()
        elif self._paused_reading and not pauses:
            self._transport.resume_reading()
        self._paused_reading = pauses

    def _few_wait(self) -> bool:
        return len(self._queue) <= _READ_AHEAD and sum(len(each.body) for each in self._queue) <= _SMALL_BODY

    def _is_free(self) -> bool:
        """Whether the next request can be answered: none is in progress, and the client reads."""
        writable = self._transport is not None and not self._transport.is_closing()
        return writable and self._exchange is None and not self._paused_writing

    def _start(self, request: Request) -> None:
        assert self._writer is not None
        route = request.route
        if request.problem is None and route is not None and route.generates:
            self._admit(request)
        if request.problem is not None or route is None:
            problem = request.problem or Problem(status=404, message="not found")
            style = route.style if route is not None else "openai"
            self._writer.write_answer(request, error_answer(problem, style, request.request_id))
            return
        self._exchange = Exchange(self._edge, self._writer, request, route)
        self._started_at = self._edge.now()
        self._edge.counts.in_flight += 1
        self._exchange.start()

    def _admit(self, request: Request) -> None:
        """Count the request for its client, or refuse it."""
        if request.client is not None:
            request.problem = request.client.admit(self._edge.now())
            self._admitted = request.client if request.problem is None else None

    def _answered(self) -> None:
        """The answer is complete: go on to the next request, or close."""
        exchange, self._exchange = self._exchange, None
        if exchange is not None:
            self._edge.counts.completed(exchange.route, self._edge.now() - self._started_at)
        self._leave()
        if self._writer is not None and self._writer.closes:
            self._close_after_answer()
        elif exchange is not None:
            self._next()

    def _read_on(self) -> None:
        assert self._transport is not None
        self._renew_deadline()
        if self._owes_continue:
            self._owes_continue = False
            self._transport.write(_CONTINUE)
        if self._paused_reading:
            self._paused_reading = False
            self._transport.resume_reading()

    def _close_after_answer(self) -> None:
        """Close the connection, after the client has had time to read the answer if it still sends."""
        self._queue.clear()
        assert self._transport is not None
        if self._request is None or not self._client_sends or not self._transport.can_write_eof():
            self._close()
            return
        self._reading = Reading.NOTHING
        self._transport.write_eof()
        self._renew_deadline()

    def _close(self) -> None:
        """Close the connection when the client has read what is written."""
        if self._transport is not None:
            self._transport.close()
            self._renew_deadline()

    def _leave(self) -> None:
        if self._admitted is not None:
            self._admitted.leave()
            self._admitted = None

    def _renew_deadline(self) -> None:
        """Give what the connection waits for now all of its time."""
        limits = self._edge.limits
        if self._paused_writing or self._transport is None or self._transport.is_closing():
            after_s = limits.stall_timeout_s
        elif self._exchange is not None:
            after_s = math.inf
        elif self._reading is Reading.NOTHING:
            after_s = limits.linger_timeout_s
        elif self._request is None:
            after_s = limits.idle_timeout_s
        elif self._reading is Reading.HEAD:
            after_s = limits.head_timeout_s
        else:
            after_s = self._body_timeout_s
        self.deadline = self._edge.now() + after_s

    # Requests that are refused before they are complete.

    def _refuse_rest(self, problem: Problem) -> None:
        """Answer the request in progress with `problem` when its turn comes, and read nothing after it."""
        request = self._request or _refused(problem)
        request.problem = problem
        request.keep_alive = False
        if not request.request_id:
            assign_id(request)
        self._request = request
        self._body.clear()
        self._owes_continue = False
        self._reading = Reading.NOTHING
        self._queue.append(request)
        if self._exchange is None:
            self._next()

    def _expect(self, request: Request) -> None:
        """Ask for the body that the client holds back, unless the request is refused without it."""
        if request.problem is not None:
            raise RefusedHead(request.problem)
        if self._exchange is None and not self._queue and self._transport is not None:
            self._transport.write(_CONTINUE)
        else:
            self._owes_continue = True

    def _ignore_upgrade(self, rest: bytes) -> None:
        """Serve the request as it is. The parser has not read its body: another one reads the request again."""
        request = self._request
        assert request is not None
        if request.method == "CONNECT":
            self._refuse_rest(Problem(status=405, message="this is no proxy", code="method_not_allowed"))
            return
        headers = [header for header in request.headers if header[0] not in _UPGRADE_HEADERS]
        headers.append((b"connection", b"keep-alive" if request.keep_alive else b"close"))
        version = self._parser.get_http_version().encode()
        self._parser = httptools.HttpRequestParser(self)
        self._reading = Reading.HEAD
        self.data_received(request_head(request.method.encode(), request.query, headers, version) + rest)

    def _bound_head(self, received: int) -> None:
        """Bound a head whose single name or value has not ended."""
        if self._reading is Reading.HEAD and self._request is not None:
            self._head_bytes += received
            if self._head_bytes > 2 * self._edge.limits.head_bytes:
                self._refuse_rest(_head_too_large(self._edge.limits.head_bytes))

    def _bound_framing(self, received: int) -> None:
        """Bound what is sent around a body in chunks: their sizes, and extensions that nobody reads."""
        if self._reading is Reading.BODY:
            self._framing_bytes += received
            if self._framing_bytes > 2 * self._edge.limits.head_bytes + _FRAMING_SHARE * self._body_bytes:
                message = "the chunks of the request consist of more than their content"
                self._refuse_rest(Problem(status=400, message=message, code="bad_http"))


class RefusedHead(Exception):
    """Raised in a callback of the parser, to stop it."""

    def __init__(self, problem: Problem) -> None:
        super().__init__(problem.message)
        self.problem = problem


def _refused(problem: Problem) -> Request:
    request = Request()
    request.problem = problem
    request.keep_alive = False
    return request


def _head_too_large(limit: int) -> Problem:
    message = f"the head of the request is larger than {limit} bytes"
    return Problem(status=431, message=message, code="head_too_large")
