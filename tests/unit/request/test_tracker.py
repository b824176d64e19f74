"""One request's account: admitted or refused, one terminal state, one record, whatever happens inside."""

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
from baton.request.tracker import Call, Desk, Limits
from baton.testing import RecordingObserver, eventually, run_bounded
from baton.testing.memory_runtime import MemoryContext


class Office:
    """A desk with all that stands around it."""

    def __init__(self, limit: int = 4, deadline_s: float = 600.0) -> None:
        self.gate = Gate(limit)
        self.observer = RecordingObserver()
        self.fatal: list[BatonError] = []
        limits = Limits(deadline_s=deadline_s)
        self.desk = Desk(self.gate, limits, self.observer, "aggregated", self.fatal.append)


def submit(call: Call) -> None:
    call.lifecycle.advance(State.SUBMITTED)


def stream(call: Call) -> None:
    submit(call)
    call.lifecycle.advance(State.STREAMING)


def nothing(call: Call) -> None:
    pass


def test_a_request_that_went_well_is_completed_and_counted_out() -> None:
    async def body() -> None:
        office = Office()
        with office.desk.open(MemoryContext("me"), 3) as call:
            assert office.gate.in_flight == 1
            stream(call)
            call.completion_tokens = 5
            call.cached_tokens = 2
        assert office.gate.in_flight == 0
        [record] = office.observer.records
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
        (Cancelled("gone"), nothing, State.CANCELLED),
        (Cancelled("gone"), stream, State.CANCELLED),
        (asyncio.CancelledError(), submit, State.CANCELLED),
        (GeneratorExit(), stream, State.CANCELLED),
        (DeadlineExceeded("late"), nothing, State.EXPIRED),
        (DeadlineExceeded("late"), stream, State.EXPIRED),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, BaseException) else getattr(value, "__name__", value),
)
def test_every_error_ends_in_its_state_and_is_raised_on(
    error: BaseException, before: Callable[[Call], None], state: State
) -> None:
    async def body() -> None:
        office = Office()

        def request() -> None:
            with office.desk.open(MemoryContext(), 1) as call:
                before(call)
                raise error

        with pytest.raises(type(error)) as raised:
            request()
        assert raised.value is error
        [record] = office.observer.records
        assert record.state is state
        assert record.error_code == (error.code if isinstance(error, BatonError) else type(error).__name__)
        assert office.gate.in_flight == 0

    run_bounded(body())


def test_only_errors_that_harm_the_worker_are_fatal() -> None:
    async def body() -> None:
        office = Office()
        for error in (EngineFailed("mine alone"), EngineDead("all of us")):
            with pytest.raises(BatonError), office.desk.open(MemoryContext(), 1):
                raise error
        assert [error.code for error in office.fatal] == ["engine_dead"]

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
        office = Office(limit=1)
        with office.desk.open(MemoryContext(), 1) as call:
            if close is not None:
                close(office.gate)
            with pytest.raises(error), office.desk.open(MemoryContext(), 1):
                pytest.fail("it was let in")
            assert office.gate.in_flight == 1
            stream(call)
        assert [record.state for record in office.observer.records] == [State.REFUSED, State.COMPLETED]

    run_bounded(body())


def test_a_client_that_leaves_fires_the_scope() -> None:
    async def body() -> None:
        office = Office()
        context = MemoryContext()
        with office.desk.open(context, 1) as call:
            call.scope.check()
            context.cancel()
            with pytest.raises(Cancelled):
                call.scope.check()
            stream(call)

    run_bounded(body())


def test_a_client_that_left_before_is_noticed_at_once() -> None:
    async def body() -> None:
        office = Office()
        context = MemoryContext()
        context.cancel()
        with pytest.raises(Cancelled), office.desk.open(context, 1) as call:
            call.scope.check()

    run_bounded(body())


def test_the_deadline_fires_the_scope() -> None:
    async def body() -> None:
        office = Office(deadline_s=0.01)
        with office.desk.open(MemoryContext(), 1) as call:
            await eventually(lambda: call.scope.error is not None)
            with pytest.raises(DeadlineExceeded, match=r"0\.01 s"):
                call.scope.check()
            stream(call)

    run_bounded(body())


def test_nothing_fires_after_the_end() -> None:
    async def body() -> None:
        office = Office(deadline_s=0.02)
        context = MemoryContext()
        with office.desk.open(context, 1) as call:
            stream(call)
        context.cancel()
        await asyncio.sleep(0.04)
        assert call.scope.error is None

    run_bounded(body())


def test_two_attempts_of_one_request_have_two_ids() -> None:
    async def body() -> None:
        office = Office()
        context = MemoryContext("same")
        with office.desk.open(context, 1) as first, office.desk.open(context, 1) as second:
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
        office = Office()
        with office.desk.open(MemoryContext(trace_headers={"traceparent": header}), 1) as call:
            stream(call)
        assert office.observer.records[0].trace_id == trace_id

    run_bounded(body())
