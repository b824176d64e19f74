"""The supervision of processes ends with the supervisor and not before, and restarts crash loops ever later."""

import asyncio

import pytest

from baton.errors import EngineDead
from baton.testing import run_bounded
from baton.topology.supervision import RestartBackoff, run_until


def test_supervision_that_fails_is_an_error_of_the_supervisor() -> None:
    async def fails() -> None:
        raise RuntimeError("out of order")

    async def body() -> None:
        lasting = asyncio.Event()
        with pytest.raises(EngineDead, match="out of order"):
            await run_until(asyncio.Event(), [waits(lasting), fails()])
        assert lasting.is_set(), "the others are cancelled"

    run_bounded(body())


def test_supervision_that_returns_is_an_error_too() -> None:
    async def returns() -> None:
        pass

    async def body() -> None:
        with pytest.raises(EngineDead):
            await run_until(asyncio.Event(), [returns()])

    run_bounded(body())


def test_supervision_ends_when_the_supervisor_stops() -> None:
    async def body() -> None:
        lasting, stop = asyncio.Event(), asyncio.Event()
        stop.set()
        await run_until(stop, [waits(lasting)])
        assert lasting.is_set()

    run_bounded(body())


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
