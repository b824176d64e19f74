"""The cancel scope: one reason, the first, reaches everything that hangs on it."""

import asyncio
import gc
import warnings

import pytest

from baton.errors import BatonError, Cancelled, DeadlineExceeded, EngineFailed
from baton.request.cancel_scope import CancelScope
from baton.testing import run_bounded


def test_the_first_reason_wins() -> None:
    scope = CancelScope()
    heard: list[BatonError] = []
    scope.on_fire(heard.append)
    scope.fire(Cancelled("first"))
    scope.fire(EngineFailed("second"))
    assert [error.message for error in heard] == ["first"]
    with pytest.raises(Cancelled, match="first"):
        scope.check()


def test_who_comes_after_the_reason_hears_it_at_once() -> None:
    scope = CancelScope()
    scope.fire(Cancelled("gone"))
    heard: list[BatonError] = []
    scope.on_fire(heard.append)
    assert heard == [scope.error]


def test_a_closed_scope_does_not_fire() -> None:
    scope = CancelScope()
    heard: list[BatonError] = []
    scope.on_fire(heard.append)
    scope.close()
    scope.fire(Cancelled("late"))
    scope.check()
    assert (heard, scope.error) == ([], None)


def test_a_deadline_fires_after_its_time() -> None:
    async def body() -> None:
        scope = CancelScope()
        fired = asyncio.Event()
        scope.on_fire(lambda error: fired.set())
        scope.fire_after(0.01, DeadlineExceeded("too long"))
        scope.check()
        await fired.wait()
        with pytest.raises(DeadlineExceeded):
            scope.check()

    run_bounded(body())


def test_closing_takes_the_deadline_back() -> None:
    async def body() -> None:
        scope = CancelScope()
        scope.fire_after(0.01, DeadlineExceeded("too long"))
        scope.close()
        await asyncio.sleep(0.03)
        assert scope.error is None

    run_bounded(body())


def test_wait_returns_what_it_waited_for() -> None:
    async def body() -> None:
        scope = CancelScope()
        assert await scope.wait(asyncio.sleep(0, "done")) == "done"
        with pytest.raises(EngineFailed):
            await scope.wait(fail())
        scope.check()

    async def fail() -> None:
        raise EngineFailed("mine")

    run_bounded(body())


def test_firing_cancels_what_is_waited_for_and_raises_the_reason() -> None:
    async def body() -> None:
        scope = CancelScope()
        ended = asyncio.Event()

        async def work() -> None:
            try:
                await asyncio.sleep(3600)
            finally:
                ended.set()

        asyncio.get_running_loop().call_later(0.01, scope.fire, Cancelled("gone"))
        with pytest.raises(Cancelled, match="gone"):
            await scope.wait(work())
        assert ended.is_set()

    run_bounded(body())


def test_cancelling_the_waiting_task_cancels_what_it_waits_for() -> None:
    async def body() -> None:
        scope = CancelScope()
        ended = asyncio.Event()

        async def work() -> None:
            try:
                await asyncio.sleep(3600)
            finally:
                ended.set()

        waiting = asyncio.create_task(scope.wait(work()))
        await asyncio.sleep(0.01)
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        await ended.wait()
        assert scope.error is None

    run_bounded(body())


def test_cancellation_of_the_task_is_not_hidden_by_the_scope() -> None:
    async def body() -> None:
        scope = CancelScope()
        waiting = asyncio.create_task(scope.wait(asyncio.sleep(3600)))
        await asyncio.sleep(0.01)
        scope.fire(Cancelled("gone"))
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting

    run_bounded(body())


def test_a_scope_that_has_fired_starts_nothing_and_leaves_nothing_behind() -> None:
    async def body() -> None:
        scope = CancelScope()
        scope.fire(Cancelled("gone"))
        started: list[int] = []

        async def work() -> None:
            started.append(1)

        with pytest.raises(Cancelled):
            await scope.wait(work())
        assert started == []

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        run_bounded(body())
        gc.collect()
    assert [str(warning.message) for warning in caught] == []
