"""The supervision of processes ends with the supervisor and not before, and restarts crash loops ever later."""

import asyncio
from collections.abc import Coroutine
from typing import Any

import pytest

from baton.errors import EngineDead
from baton.testing import run_bounded
from baton.topology.supervision import Keepers, RestartBackoff


def test_supervision_that_fails_is_an_error_of_the_supervisor() -> None:
    async def fails() -> None:
        raise RuntimeError("out of order")

    async def body() -> None:
        lasting = asyncio.Event()
        with pytest.raises(EngineDead, match="out of order"):
            await keeping(waits(lasting), fails()).run_until(asyncio.Event())
        assert lasting.is_set(), "the others are cancelled"

    run_bounded(body())


def test_supervision_that_returns_is_an_error_too() -> None:
    async def returns() -> None:
        pass

    async def body() -> None:
        with pytest.raises(EngineDead):
            await keeping(returns()).run_until(asyncio.Event())

    run_bounded(body())


def test_supervision_ends_when_the_supervisor_stops() -> None:
    async def body() -> None:
        lasting, stop = asyncio.Event(), asyncio.Event()
        stop.set()
        await keeping(waits(lasting)).run_until(stop)
        assert lasting.is_set()

    run_bounded(body())


def test_supervision_of_a_process_that_is_removed_ends_and_is_no_error() -> None:
    async def body() -> None:
        removed, lasting, stop = asyncio.Event(), asyncio.Event(), asyncio.Event()
        keepers = keeping(waits(lasting))
        keepers.add("removed", waits(removed))
        running = asyncio.create_task(keepers.run_until(stop))
        await asyncio.sleep(0)
        await keepers.remove("removed")
        await keepers.remove("removed")
        assert removed.is_set()
        assert not running.done()
        assert not lasting.is_set()
        stop.set()
        await running

    run_bounded(body())


def keeping(*work: Coroutine[Any, Any, None]) -> Keepers:
    keepers = Keepers()
    for number, each in enumerate(work):
        keepers.add(str(number), each)
    return keepers


async def waits(ended: asyncio.Event) -> None:
    try:
        await asyncio.Event().wait()
    finally:
        ended.set()


def test_back_off_grows_with_every_exit_up_to_its_maximum() -> None:
    backoff = RestartBackoff()
    assert [backoff.next_delay_s(now) for now in range(7)] == [0.5, 1.0, 2.0, 4.0, 8.0, 15.0, 15.0]


def test_back_off_remembers_a_process_that_exits_soon_after_a_long_start() -> None:
    backoff = RestartBackoff()
    assert [backoff.next_delay_s(60.0 * number) for number in range(5)] == [0.5, 1.0, 2.0, 4.0, 8.0]


def test_back_off_forgets_exits_of_long_ago() -> None:
    backoff = RestartBackoff()
    for number in range(5):
        backoff.next_delay_s(float(number))
    assert backoff.next_delay_s(10_000.0) == 0.5


def test_supervision_that_is_added_while_the_others_end_does_not_begin() -> None:
    async def body() -> None:
        stop, begun = asyncio.Event(), asyncio.Event()
        keepers = Keepers()

        async def adds_another_at_its_end() -> None:
            try:
                await asyncio.Event().wait()
            finally:
                keepers.add("late", begins(begun))

        keepers.add("first", adds_another_at_its_end())
        running = asyncio.create_task(keepers.run_until(stop))
        await asyncio.sleep(0)
        stop.set()
        await running
        await asyncio.sleep(0.01)
        assert not begun.is_set()

    run_bounded(body())


async def begins(begun: asyncio.Event) -> None:
    begun.set()
    await asyncio.Event().wait()
