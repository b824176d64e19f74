"""The cancel scope: the first error reaches every callback and every wait."""

import asyncio
import gc
import warnings

import pytest

from baton.errors import BatonError, Cancelled, DeadlineExceeded, EngineFailed
from baton.request.cancel_scope import CancelScope
from baton.testing import run_bounded


def test_the_first_error_wins() -> None:
    scope = CancelScope()
    errors: list[BatonError] = []
    scope.on_fire(errors.append)
    scope.fire(Cancelled("first"))
    scope.fire(EngineFailed("second"))
    assert [error.message for error in errors] == ["first"]
    with pytest.raises(Cancelled, match="first"):
        scope.check()


def test_a_callback_added_after_firing_runs_at_once() -> None:
    scope = CancelScope()
    scope.fire(Cancelled("cancelled"))
    errors: list[BatonError] = []
    scope.on_fire(errors.append)
    assert errors == [scope.error]


def test_a_closed_scope_does_not_fire() -> None:
    scope = CancelScope()
    errors: list[BatonError] = []
    scope.on_fire(errors.append)
    scope.close()
    scope.fire(Cancelled("late"))
    scope.check()
    assert (errors, scope.error) == ([], None)


def test_a_deadline_fires_after_its_delay() -> None:
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


def test_closing_cancels_the_deadline() -> None:
    async def body() -> None:
        scope = CancelScope()
        scope.fire_after(0.01, DeadlineExceeded("too long"))
        scope.close()
        await asyncio.sleep(0.03)
        assert scope.error is None

    run_bounded(body())


def test_wait_returns_the_result() -> None:
    async def body() -> None:
        scope = CancelScope()
        assert await scope.wait(asyncio.sleep(0, "done")) == "done"
        with pytest.raises(EngineFailed):
            await scope.wait(fail())
        scope.check()

    async def fail() -> None:
        raise EngineFailed("mine")

    run_bounded(body())


def test_firing_cancels_the_awaitable_and_raises_the_error() -> None:
    async def body() -> None:
        scope = CancelScope()
        ended = asyncio.Event()

        async def work() -> None:
            try:
                await asyncio.sleep(3600)
            finally:
                ended.set()

        asyncio.get_running_loop().call_later(0.01, scope.fire, Cancelled("cancelled"))
        with pytest.raises(Cancelled, match="cancelled"):
            await scope.wait(work())
        assert ended.is_set()

    run_bounded(body())


def test_cancelling_the_waiting_task_cancels_the_awaitable() -> None:
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
        scope.fire(Cancelled("cancelled"))
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting

    run_bounded(body())


def test_a_fired_scope_starts_no_awaitable_and_leaks_none() -> None:
    async def body() -> None:
        scope = CancelScope()
        scope.fire(Cancelled("cancelled"))
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
