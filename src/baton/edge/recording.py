"""The timelines of requests at the edge: it starts a trace where the client has sent none."""

from baton.edge.messages import Headers, Request
from baton.protocol.lifecycle import State
from baton.timelines.ring import TimelineRing
from baton.timelines.timeline import UNRECORDED, Failure, FinalCounts, Recorder
from baton.timelines.trace_context import TRACEPARENT, continue_trace, parse_traceparent

CLIENT_LEFT = 499
MAX_TRACESTATE_BYTES = 512
_TRACEPARENT = TRACEPARENT.encode()
_TRACESTATE = b"tracestate"
# The frontend passes headers with this prefix on to workers, without it. Of a trace it passes on the id, with a parent
# of its own that nothing exports.
_METADATA = b"x-dynamo-meta-"
_PASSED_TRACEPARENT = _METADATA + _TRACEPARENT
_PASSED_TRACESTATE = _METADATA + _TRACESTATE
TRACE_HEADERS = frozenset(
    prefix + name for prefix in (b"", _METADATA) for name in (_TRACEPARENT, _TRACESTATE, b"x-request-id", b"request-id")
)
"""Headers that the edge sets itself, or that only it may set."""
_NOT_COUNTED = FinalCounts()
# An attribute of an enum is slow to look up.
_COMPLETED, _CANCELLED = State.COMPLETED.value, State.CANCELLED.value
_REFUSED, _FAILED = State.REFUSED.value, State.FAILED.value


def start_timeline(timelines: TimelineRing, request: Request) -> Recorder:
    """Return the recorder of a request, which gets a trace."""
    if not timelines.is_on:
        return UNRECORDED
    given = request.header(_TRACEPARENT)
    trace = request.trace = continue_trace(None if given is None else given.decode("latin-1"), timelines.samples)
    return timelines.start(request.request_id, "", trace, request.request_id, _NOT_COUNTED)


def trace_headers(request: Request) -> Headers:
    """Return the headers that continue the trace of a request in the frontend and in workers."""
    trace = request.trace
    if trace is not None:
        value, is_continued = trace.traceparent.encode(), trace.given is not None
    else:
        given = request.header(_TRACEPARENT)
        if given is None or parse_traceparent(given.decode("latin-1")) is None:
            return []
        value, is_continued = given, True
    headers = [(_TRACEPARENT, value), (_PASSED_TRACEPARENT, value)]
    state = request.header(_TRACESTATE) if is_continued else None
    if state is not None and len(state) <= MAX_TRACESTATE_BYTES:
        headers.append((_PASSED_TRACESTATE, state))
    return headers


def end_timeline(
    timelines: TimelineRing, timeline: Recorder, request: Request, status: int, failure: Failure | None
) -> None:
    """End the timeline of a request that was answered with `status`."""
    state = _COMPLETED if failure is None and status != CLIENT_LEFT else _state(status)
    timeline.finish(state, failure)
    if state is _FAILED and failure is not None:
        timelines.note_error(request.request_id, failure)


def _state(status: int) -> str:
    if status == CLIENT_LEFT:
        return _CANCELLED
    return _REFUSED if 400 <= status < 500 else _FAILED
