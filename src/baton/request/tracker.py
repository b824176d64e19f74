"""One request at this worker, from admission to its one terminal state."""

import asyncio
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

import msgspec

from baton.errors import BatonError, Cancelled, DeadlineExceeded, Draining, InvalidRequest, Overloaded, Paused
from baton.ports.observer import Observer, RequestRecord
from baton.ports.runtime import Context
from baton.protocol.ids import new_request_id
from baton.protocol.lifecycle import Lifecycle, State
from baton.request.cancel_scope import CancelScope
from baton.request.gate import Gate


class RequestLimits(msgspec.Struct, frozen=True, kw_only=True):
    """Time limits of every request."""

    request_timeout_s: float = 600.0
    abort_timeout_s: float = 10.0
    flush_interval_s: float = 0.002


class TrackedRequest:
    """One request while it runs: its id, cancel scope, state and token counts."""

    __slots__ = (
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
    )

    def __init__(self, context: Context, prompt_tokens: int, gate: Gate, model: str) -> None:
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

    def record(self, role: str, error: BaseException | None, headers: Mapping[str, str]) -> RequestRecord:
        """Return the record of the request after its end."""
        first = self.first_output_at
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
            trace_id=_trace_id(headers),
            client_id=headers.get("x-request-id"),
        )


class RequestTracker:
    """Tracks the requests of one handler: gate, limits and observer of its worker."""

    def __init__(
        self,
        gate: Gate,
        limits: RequestLimits,
        observer: Observer,
        role: str,
        on_fatal: Callable[[BatonError], None],
    ) -> None:
        self.gate = gate
        self.limits = limits
        self._observer = observer
        self._role = role
        self._on_fatal = on_fatal

    @contextmanager
    def track(self, context: Context, prompt_tokens: int, model: str = "") -> Iterator[TrackedRequest]:
        """Admit a request and track it until the block ends, whatever ends it. `model` is the name that it asks for.

        The cancel scope is armed (client, deadline) before the block runs. Raises Draining, Paused or Overloaded.
        """
        tracked = TrackedRequest(context, prompt_tokens, self.gate, model)
        error: BaseException | None = None
        try:
            self.gate.enter(tracked.scope)
            tracked.lifecycle.advance(State.ADMITTED)
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
            self._observer.finished(tracked.record(self._role, error, context.trace_headers))

    def _arm(self, tracked: TrackedRequest, context: Context) -> None:
        request_timeout_s = self.limits.request_timeout_s
        expired = DeadlineExceeded(f"the request took longer than {request_timeout_s:g} s")
        tracked.scope.fire_after(request_timeout_s, expired)
        context.on_cancel(lambda: tracked.scope.fire(Cancelled("the client cancelled the request")))


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


def _trace_id(headers: Mapping[str, str]) -> str | None:
    parts = headers.get("traceparent", "").split("-")
    return parts[1] if len(parts) == 4 else None
