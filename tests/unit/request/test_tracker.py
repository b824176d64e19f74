"""A tracked request: admitted or refused, one terminal state, one record, whatever ends it."""

import asyncio
from collections.abc import Callable

import pytest

from baton.errors import (
    BatonError,
    Cancelled,
    DeadlineExceeded,
    Draining,
    EngineDead,
    EngineFailed,
    InvalidRequest,
    Overloaded,
    Paused,
    Unsupported,
)
from baton.protocol.lifecycle import State
from baton.request.gate import Gate
from baton.request.tracker import RequestLimits, RequestTracker, TrackedRequest
from baton.testing import RecordingObserver, eventually, run_bounded
from baton.testing.memory_runtime import MemoryContext


class TrackerHarness:
    """A request tracker with its gate, observer and fatal errors."""

    def __init__(self, limit: int = 4, request_timeout_s: float = 600.0) -> None:
        self.gate = Gate(limit)
        self.observer = RecordingObserver()
        self.fatal: list[BatonError] = []
        limits = RequestLimits(request_timeout_s=request_timeout_s)
        self.tracker = RequestTracker(self.gate, limits, self.observer, "aggregated", self.fatal.append)


def submit(tracked: TrackedRequest) -> None:
    tracked.lifecycle.advance(State.SUBMITTED)


def stream(tracked: TrackedRequest) -> None:
    submit(tracked)
    tracked.lifecycle.advance(State.STREAMING)


def nothing(tracked: TrackedRequest) -> None:
    pass


def test_a_successful_request_is_completed_and_leaves_the_gate() -> None:
    async def body() -> None:
        harness = TrackerHarness()
        with harness.tracker.track(MemoryContext("me"), 3) as tracked:
            assert harness.gate.in_flight == 1
            stream(tracked)
            tracked.completion_tokens = 5
            tracked.cached_tokens = 2
        assert harness.gate.in_flight == 0
        [record] = harness.observer.records
        assert record.request_id.startswith("me.")
        assert (record.role, record.state, record.error_code) == ("aggregated", State.COMPLETED, None)
        assert (record.prompt_tokens, record.cached_tokens, record.completion_tokens) == (3, 2, 5)
        assert record.duration_s >= 0
        assert record.first_output_s is None

    run_bounded(body())


@pytest.mark.parametrize(
    ("error", "before", "state"),
    [
        (InvalidRequest("bad"), nothing, State.REFUSED),
        (Unsupported("bad"), nothing, State.REFUSED),
        (Overloaded("full"), nothing, State.REFUSED),
        (InvalidRequest("bad"), submit, State.FAILED),
        (EngineFailed("broken"), nothing, State.FAILED),
        (EngineFailed("broken"), stream, State.FAILED),
        (Draining("leaving"), stream, State.FAILED),
        (EngineDead("dead"), submit, State.FAILED),
        (KeyError("a bug"), stream, State.FAILED),
        (Cancelled("cancelled"), nothing, State.CANCELLED),
        (Cancelled("cancelled"), stream, State.CANCELLED),
        (asyncio.CancelledError(), submit, State.CANCELLED),
        (GeneratorExit(), stream, State.CANCELLED),
        (DeadlineExceeded("late"), nothing, State.EXPIRED),
        (DeadlineExceeded("late"), stream, State.EXPIRED),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, BaseException) else getattr(value, "__name__", value),
)
def test_every_error_sets_its_terminal_state_and_is_raised(
    error: BaseException, before: Callable[[TrackedRequest], None], state: State
) -> None:
    async def body() -> None:
        harness = TrackerHarness()

        def request() -> None:
            with harness.tracker.track(MemoryContext(), 1) as tracked:
                before(tracked)
                raise error

        with pytest.raises(type(error)) as raised:
            request()
        assert raised.value is error
        [record] = harness.observer.records
        assert record.state is state
        assert record.error_code == (error.code if isinstance(error, BatonError) else type(error).__name__)
        assert harness.gate.in_flight == 0

    run_bounded(body())


def test_only_errors_of_scope_worker_are_fatal() -> None:
    async def body() -> None:
        harness = TrackerHarness()
        for error in (EngineFailed("mine alone"), EngineDead("all of us")):
            with pytest.raises(BatonError), harness.tracker.track(MemoryContext(), 1):
                raise error
        assert [error.code for error in harness.fatal] == ["engine_dead"]

    run_bounded(body())


@pytest.mark.parametrize(
    ("close", "error"),
    [(Gate.pause, Paused), (Gate.drain, Draining), (None, Overloaded)],
    ids=["pause", "drain", "full"],
)
def test_a_request_that_the_gate_refuses_is_recorded_and_never_runs(
    close: Callable[[Gate], None] | None, error: type[BatonError]
) -> None:
    async def body() -> None:
        harness = TrackerHarness(limit=1)
        with harness.tracker.track(MemoryContext(), 1) as tracked:
            if close is not None:
                close(harness.gate)
            with pytest.raises(error), harness.tracker.track(MemoryContext(), 1):
                pytest.fail("it was admitted")
            assert harness.gate.in_flight == 1
            stream(tracked)
        assert [record.state for record in harness.observer.records] == [State.REFUSED, State.COMPLETED]

    run_bounded(body())


def test_cancellation_by_the_client_fires_the_scope() -> None:
    async def body() -> None:
        harness = TrackerHarness()
        context = MemoryContext()
        with harness.tracker.track(context, 1) as tracked:
            tracked.scope.check()
            context.cancel()
            with pytest.raises(Cancelled):
                tracked.scope.check()
            stream(tracked)

    run_bounded(body())


def test_cancellation_before_admission_fires_the_scope_at_once() -> None:
    async def body() -> None:
        harness = TrackerHarness()
        context = MemoryContext()
        context.cancel()
        with pytest.raises(Cancelled), harness.tracker.track(context, 1) as tracked:
            tracked.scope.check()

    run_bounded(body())


def test_the_deadline_fires_the_scope() -> None:
    async def body() -> None:
        harness = TrackerHarness(request_timeout_s=0.01)
        with harness.tracker.track(MemoryContext(), 1) as tracked:
            await eventually(lambda: tracked.scope.error is not None)
            with pytest.raises(DeadlineExceeded, match=r"0\.01 s"):
                tracked.scope.check()
            stream(tracked)

    run_bounded(body())


def test_nothing_fires_after_the_end() -> None:
    async def body() -> None:
        harness = TrackerHarness(request_timeout_s=0.02)
        context = MemoryContext()
        with harness.tracker.track(context, 1) as tracked:
            stream(tracked)
        context.cancel()
        await asyncio.sleep(0.04)
        assert tracked.scope.error is None

    run_bounded(body())


def test_two_attempts_of_one_request_have_two_ids() -> None:
    async def body() -> None:
        harness = TrackerHarness()
        context = MemoryContext("same")
        with harness.tracker.track(context, 1) as first, harness.tracker.track(context, 1) as second:
            assert first.request_id != second.request_id
            stream(first)
            stream(second)

    run_bounded(body())


@pytest.mark.parametrize(
    ("header", "trace_id"),
    [
        ("00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01", "0af7651916cd43dd8448eb211c80319c"),
        ("not a trace", None),
        ("", None),
    ],
)
def test_the_record_carries_the_trace_id(header: str, trace_id: str | None) -> None:
    async def body() -> None:
        harness = TrackerHarness()
        with harness.tracker.track(MemoryContext(trace_headers={"traceparent": header}), 1) as tracked:
            stream(tracked)
        assert harness.observer.records[0].trace_id == trace_id

    run_bounded(body())
