"""The watchdog: work without progress is a stall; no work, or any progress, is none."""

import asyncio

import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton.engines.echo import EchoEngine, EchoOptions
from baton.errors import EngineStalled
from baton.health.watchdog import StallClock, watch
from baton.ports.engine import Progress, Work
from baton.protocol.ids import RequestId
from baton.testing import ScriptedEngine, run_bounded, running


def test_work_without_progress_is_a_stall_after_the_timeout() -> None:
    clock = StallClock(10.0)
    assert clock.stalled_for(Progress(5, 1, 0), 100.0) is None
    assert clock.stalled_for(Progress(5, 1, 0), 109.9) is None
    assert clock.stalled_for(Progress(5, 1, 0), 110.0) == 10.0


def test_a_waiting_request_counts_as_work() -> None:
    clock = StallClock(10.0)
    clock.stalled_for(Progress(5, 0, 1), 100.0)
    assert clock.stalled_for(Progress(5, 0, 1), 111.0) == 11.0


def test_an_idle_engine_never_stalls_and_work_after_idleness_starts_a_new_count() -> None:
    clock = StallClock(10.0)
    for now in range(0, 1000, 50):
        assert clock.stalled_for(Progress(5, 0, 0), float(now)) is None
    assert clock.stalled_for(Progress(5, 1, 0), 955.0) is None
    assert clock.stalled_for(Progress(5, 1, 0), 961.0) == 11.0


@given(st.lists(st.tuples(st.integers(0, 2), st.integers(0, 2), st.integers(0, 2), st.floats(0, 8)), max_size=40))
def test_a_stall_is_reported_exactly_when_no_step_was_made_for_that_long(
    polls: list[tuple[int, int, int, float]],
) -> None:
    clock = StallClock(10.0)
    steps, now, since = 0, 0.0, None
    for grown, run, wait, passed in polls:
        steps += grown
        now += passed
        busy = run + wait > 0
        if grown or not busy or since is None:
            since = now
        stalled_s = clock.stalled_for(Progress(steps, run, wait), now)
        assert stalled_s == (now - since if busy and now - since >= 10.0 else None)


def test_watch_raises_for_a_stalled_engine() -> None:
    async def body() -> None:
        engine = EchoEngine(EchoOptions(faults=True))
        async with running(engine):
            prompt = tuple(b"[[stall]]")
            stream = engine.submit(Work(request_id=RequestId("r"), token_ids=prompt, max_tokens=9))
            with pytest.raises(EngineStalled, match="1 running and 0 waiting"):
                await watch(engine, 0.1)
            await engine.abort(RequestId("r"))
            assert stream.ended

    run_bounded(body())


def test_watch_ignores_idle_and_progressing_engines() -> None:
    async def body() -> None:
        idle = ScriptedEngine()
        async with running(idle):
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(watch(idle, 0.05), 0.3)
        progressing = EchoEngine(EchoOptions(pace_ms=5))
        async with running(progressing):
            progressing.submit(Work(request_id=RequestId("r"), token_ids=(1,) * 5000, max_tokens=5000))
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(watch(progressing, 0.5), 1.0)

    run_bounded(body())


def test_watch_ignores_a_suspended_engine() -> None:
    async def body() -> None:
        engine = EchoEngine(EchoOptions(faults=True))
        async with running(engine):
            engine.submit(Work(request_id=RequestId("r"), token_ids=tuple(b"[[stall]]"), max_tokens=9))
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(watch(engine, 0.05, lambda: True), 0.3)
            await engine.abort(RequestId("r"))

    run_bounded(body())
