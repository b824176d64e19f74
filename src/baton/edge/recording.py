"""The timelines of requests at the edge: it starts a trace where the client has sent none."""

from baton.edge.messages import Headers, Request
from baton.protocol.lifecycle import State
from baton.timelines.ring import TimelineRing
from baton.timelines.timeline import UNRECORDED, Failure, FinalCounts, Recorder
from baton.timelines.trace_context import TRACEPARENT, parse_traceparent

CLIENT_LEFT = 499
MAX_TRACESTATE_BYTES = 512
_TRACEPARENT = TRACEPARENT.encode()
_TRACESTATE = b"tracestate"
# The frontend passes headers with this prefix on to workers, without it. Of a trace it passes on the id, with a parent
# of its own that nothing exports.
_METADATA = b"x-dynamo-meta-"
TRACE_HEADERS = frozenset(
    prefix + name for prefix in (b"", _METADATA) for name in (_TRACEPARENT, _TRACESTATE, b"x-request-id", b"request-id")
)
"""Headers that the edge sets itself, or that only it may set."""
_NOT_COUNTED = FinalCounts()


def start_timeline(timelines: TimelineRing, request: Request) -> Recorder:
    """Return the recorder of a request, which gets a trace."""
    if not timelines.is_on:
        return UNRECORDED
    given = request.header(_TRACEPARENT)
    headers = {} if given is None else {TRACEPARENT: given.decode("latin-1")}
    request.trace = timelines.trace_of(headers)
    return timelines.start(request.request_id, "", request.trace, request.request_id, _NOT_COUNTED)


def trace_headers(request: Request) -> Headers:
    """Return the headers that continue the trace of a request in the frontend and in workers."""
    given = request.header(_TRACEPARENT)
    parent = parse_traceparent(given.decode("latin-1")) if given is not None else None
    if request.trace is not None:
        given = request.trace.traceparent.encode()
    elif parent is None:
        return []
    headers = [(_TRACEPARENT, given), (_METADATA + _TRACEPARENT, given)]
    state = request.header(_TRACESTATE) if parent is not None else None
    if state is not None and len(state) <= MAX_TRACESTATE_BYTES:
        headers.append((_METADATA + _TRACESTATE, state))
    return [(name, value) for name, value in headers if value is not None]


def end_timeline(
    timelines: TimelineRing, timeline: Recorder, request: Request, status: int, failure: Failure | None
) -> None:
    """End the timeline of a request that was answered with `status`."""
    state = _state(status, failure)
    timeline.finish(state.value, failure)
    if state is State.FAILED and failure is not None:
        timelines.note_error(request.request_id, failure)


def _state(status: int, failure: Failure | None) -> State:
    if status == CLIENT_LEFT:
        return State.CANCELLED
    if failure is None:
        return State.COMPLETED
    return State.REFUSED if 400 <= status < 500 else State.FAILED
