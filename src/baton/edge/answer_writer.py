"""Writes the answers of one client's connection, one after the other: heads, the framing of bodies, and their ends.

What is written goes out with the next flush, in one system call.
"""

import asyncio
from collections.abc import Callable
from typing import TYPE_CHECKING

from baton.edge.messages import Answer, Headers, Request, answer_head

if TYPE_CHECKING:
    from baton.edge.server import Edge

_LAST_CHUNK = b"0\r\n\r\n"


class AnswerWriter:
    """The `Writer` that exchanges get. `ended` is called after each answer that is complete, `broken` after another."""

    __slots__ = ("_broken", "_chunked", "_edge", "_ended", "_out", "_skips_body", "_transport", "closes")

    def __init__(
        self, edge: "Edge", transport: asyncio.Transport, ended: Callable[[], None], broken: Callable[[], None]
    ) -> None:
        self._edge = edge
        self._transport: asyncio.Transport | None = transport
        self._ended: Callable[[], None] | None = ended
        self._broken: Callable[[], None] | None = broken
        self._out: list[bytes] = []
        self._chunked = False
        self._skips_body = False
        self.closes = False
        """Whether the connection closes after the answer. The client is told if its head has not been written."""

    def detach(self) -> None:
        """The connection is lost: write nothing more, and refer to nothing of it."""
        self._transport = self._ended = self._broken = None
        self._out.clear()

    def write_head(self, request: Request, status: int, headers: Headers, length: int | None) -> None:
        """See `Writer`."""
        self._edge.counts.answered(request.route, status)
        if status == 204:  # has no body, and must not say so
            pass
        elif length is not None:
            headers.append((b"content-length", b"%d" % length))
        elif request.http11:
            headers.append((b"transfer-encoding", b"chunked"))
            self._chunked = True
        else:
            self.closes = True
        if not request.keep_alive or self.closes:
            self.closes = True
            headers.append((b"connection", b"close"))
        self._skips_body = request.method == "HEAD"
        self._out.append(answer_head(status, headers + self._edge.answer_headers(request)))

    def write_body(self, data: bytes) -> None:
        """See `Writer`."""
        if not self._skips_body:
            self._out.append(b"%x\r\n%b\r\n" % (len(data), data) if self._chunked else data)

    def flush(self) -> None:
        """See `Writer`."""
        if self._out and self._transport is not None:
            out, self._out = self._out, []
            if len(out) == 1:
                self._transport.write(out[0])
            else:
                self._transport.writelines(out)

    def write_end(self) -> None:
        """See `Writer`."""
        if self._chunked:
            self._chunked = False
            if not self._skips_body:
                self._out.append(_LAST_CHUNK)
        self._end()

    def write_answer(self, request: Request, answer: Answer) -> None:
        """See `Writer`."""
        headers: Headers = [*answer.headers]
        if answer.body:
            headers.append((b"content-type", answer.content_type))
        self.write_head(request, answer.status, headers, len(answer.body))
        if answer.body:
            self.write_body(answer.body)
        self._end()

    def break_off(self) -> None:
        """See `Writer`."""
        self.flush()
        if self._broken is not None:
            self._broken()

    def _end(self) -> None:
        self.flush()
        if self._ended is not None:
            self._ended()
