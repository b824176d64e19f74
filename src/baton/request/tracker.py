"""One request at this worker, from admission to its one terminal state."""

import asyncio
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import msgspec

from baton.errors import BatonError, Cancelled, DeadlineExceeded, Draining, InvalidRequest, Overloaded, Paused
from baton.ports.observer import Observer, RequestRecord
from baton.ports.runtime import Context
from baton.protocol.ids import new_request_id
from baton.protocol.lifecycle import Lifecycle, State
from baton.protocol.outputs import PromptProgress
from baton.request.cancel_scope import CancelScope
from baton.request.gate import Gate
from baton.request.log_ids import CURRENT, LogIds
from baton.timelines.ring import TimelineRing
from baton.timelines.timeline import UNRECORDED, Failure, Recorder
from baton.timelines.trace_context import TRACEPARENT, continue_trace, parse_traceparent


class RequestLimits(msgspec.Struct, frozen=True, kw_only=True):
    """Time limits of every request."""

    request_timeout_s: float = 600.0
    abort_timeout_s: float = 10.0
    flush_interval_s: float = 0.002


class TrackedRequest:
    """One request while it runs: its id, cancel scope, state, token counts and timeline.

    `trace_headers` are for the processes and the engine that it is passed on to: their parent is the span of this one.
    """

    __slots__ = (
        "_last_output_ns",
        "_on_gap",
        "_progress",
        "_trace_id",
        "cached_tokens",
        "completion_tokens",
        "first_output_at",
        "gate",
        "lifecycle",
        "model",
        "prompt_tokens",
        "request_id",
        "scope",
        "started_at",
        "timeline",
        "trace_headers",
    )

    def __init__(
        self,
        context: Context,
        prompt_tokens: int,
        gate: Gate,
        model: str,
        ring: TimelineRing,
        on_gap: Callable[[float], None],
    ) -> None:
        self._on_gap = on_gap
        self._last_output_ns = 0
        self._progress: Sequence[PromptProgress] = ()
        self.gate = gate
        self.model = model
        self.request_id = new_request_id(context.id)
        self.scope = CancelScope()
        self.lifecycle = Lifecycle()
        self.prompt_tokens = prompt_tokens
        self.completion_tokens = 0
        self.cached_tokens: int | None = None
        self.started_at = time.perf_counter()
        self.first_output_at: float | None = None
        headers = self.trace_headers = context.trace_headers
        self.timeline: Recorder = UNRECORDED
        self._trace_id: str | None = None
        if ring.is_on:
            trace = continue_trace(headers.get(TRACEPARENT), ring.samples)
            self._trace_id = trace.trace_id
            self.trace_headers = {**headers, TRACEPARENT: trace.traceparent}
            self.timeline = ring.start(self.request_id, model, trace, headers.get("x-request-id"), self)
        elif (parent := parse_traceparent(headers.get(TRACEPARENT, ""))) is not None:
            self._trace_id = parent.trace_id

    def submitted(self) -> None:
        """The engine, or another process, has the work."""
        self.lifecycle.advance(State.SUBMITTED)
        self.timeline.mark("submitted")

    def first_output(self) -> None:
        """The first output has arrived now. `output` calls it where it has not been called."""
        self.first_output_at = time.perf_counter()
        self.lifecycle.advance(State.STREAMING)
        self.timeline.mark("first_token")

    def follow(self, progress: Sequence[PromptProgress]) -> None:
        """Read what the engine has done with the prompt from `progress`, which grows."""
        self._progress = progress
        self.timeline.follow(progress)

    def output(self) -> None:
        """Output is sent on now."""
        now_ns = time.perf_counter_ns()
        last_ns, self._last_output_ns = self._last_output_ns, now_ns
        if last_ns:
            self._on_gap((now_ns - last_ns) * 1e-9)
        elif self.first_output_at is None:
            self.first_output()
        self.timeline.output(now_ns)

    def record(self, role: str, error: BaseException | None) -> RequestRecord:
        """Return the record of the request after its end."""
        first = self.first_output_at
        queued_s, first_step_s = _first(self._progress, "queued"), _first(self._progress, "first_step")
        return RequestRecord(
            request_id=self.request_id,
            role=role,
            state=self.lifecycle.state,
            error_code=_error_code(error),
            prompt_tokens=self.prompt_tokens,
            cached_tokens=self.cached_tokens or 0,
            completion_tokens=self.completion_tokens,
            first_output_s=None if first is None else first - self.started_at,
            duration_s=time.perf_counter() - self.started_at,
            model=self.model,
            trace_id=self._trace_id,
            client_id=self.trace_headers.get("x-request-id"),
            queue_s=_between(queued_s, first_step_s),
            prefill_s=_between(first_step_s, first),
        )


class RequestTracker:
    """Tracks the requests of one handler: gate, limits, observer and timelines of its worker."""

    def __init__(
        self,
        gate: Gate,
        limits: RequestLimits,
        observer: Observer,
        role: str,
        on_fatal: Callable[[BatonError], None],
        timelines: TimelineRing | None = None,
        on_gap: Callable[[float], None] = lambda seconds: None,
    ) -> None:
        """Prepare. Without `timelines` none are kept, as for probes. `on_gap` gets the times between outputs."""
        self._on_gap = on_gap
        self.gate = gate
        self.limits = limits
        self._observer = observer
        self._role = role
        self._on_fatal = on_fatal
        self._timelines = timelines or TimelineRing(0)

    @contextmanager
    def track(self, context: Context, prompt_tokens: int, model: str = "") -> Iterator[TrackedRequest]:
        """Admit a request and track it until the block ends, whatever ends it. `model` is the name that it asks for.

        The cancel scope is armed (client, deadline) before the block runs. Raises Draining, Paused or Overloaded.
        """
        tracked = TrackedRequest(context, prompt_tokens, self.gate, model, self._timelines, self._on_gap)
        log_ids = LogIds(tracked.request_id, tracked.trace_headers)
        CURRENT.set(log_ids)
        error: BaseException | None = None
        try:
            self.gate.enter(tracked.scope)
            tracked.lifecycle.advance(State.ADMITTED)
            tracked.timeline.mark("admitted")
            self._arm(tracked, context)
            yield tracked
            tracked.lifecycle.advance(State.COMPLETED)
        except BaseException as raised:
            error = raised
            tracked.lifecycle.advance(_ending(raised, tracked.lifecycle.state))
            if isinstance(raised, BatonError) and raised.scope == "worker":
                self._on_fatal(raised)
            raise
        finally:
            tracked.scope.close()
            self.gate.leave(tracked.scope)
            self._observer.finished(tracked.record(self._role, error))
            self._end_timeline(tracked, error)
            log_ids.end()

    def _end_timeline(self, tracked: TrackedRequest, error: BaseException | None) -> None:
        state = tracked.lifecycle.state
        failure = None
        if error is not None:
            message = error.message if isinstance(error, BatonError) else ""
            failure = Failure(_error_code(error) or "", message)
            if state is not State.CANCELLED and not isinstance(error, InvalidRequest):
                self._timelines.note_error(tracked.request_id, failure)
        tracked.timeline.finish(str(state), failure)  # `value` of an enum is slow to look up

    def _arm(self, tracked: TrackedRequest, context: Context) -> None:
        request_timeout_s = self.limits.request_timeout_s
        expired = DeadlineExceeded(f"the request took longer than {request_timeout_s:g} s")
        tracked.scope.fire_after(request_timeout_s, expired)
        context.on_cancel(lambda: tracked.scope.fire(Cancelled("the client cancelled the request")))


def _first(progress: Sequence[PromptProgress], phase: str) -> float | None:
    """Return when the prompt reached `phase`, in seconds of `perf_counter`."""
    return next((each.at_ns / 1e9 for each in progress if each.phase == phase), None)


def _between(start_s: float | None, end_s: float | None) -> float | None:
    return None if start_s is None or end_s is None else max(0.0, end_s - start_s)


def _ending(error: BaseException, state: State) -> State:
    match error:
        case Cancelled() | asyncio.CancelledError() | GeneratorExit():
            return State.CANCELLED
        case DeadlineExceeded():
            return State.EXPIRED
        case InvalidRequest() | Overloaded() | Paused() | Draining() if state in (
            State.RECEIVED,
            State.ADMITTED,
        ):
            return State.REFUSED
        case _:
            return State.FAILED


def _error_code(error: BaseException | None) -> str | None:
    if isinstance(error, BatonError):
        return error.code
    return None if error is None else type(error).__name__
