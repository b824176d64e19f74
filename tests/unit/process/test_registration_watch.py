"""A process that discovery has lost registers again, and retires only if it cannot."""

import asyncio

import pytest

from baton.errors import BatonError, PeerLost
from baton.process.registration_watch import RESTORE_TRIES, RegistrationWatch
from baton.testing import eventually, run_bounded


class Entry:
    """An entry in discovery, and what becomes of its process."""

    def __init__(self, failures: int = 0) -> None:
        self.lost = False
        self.failures = failures
        self.tries = 0
        self.retired: list[BatonError] = []

    async def restore(self) -> None:
        self.tries += 1
        if self.tries <= self.failures:
            raise PeerLost("no answer")
        self.lost = False

    def watch(self) -> RegistrationWatch:
        return RegistrationWatch(
            "worker", lambda: self.lost, self.restore, self.retired.append, interval_s=0.005, checks=2
        )


@pytest.mark.parametrize("failures", [0, RESTORE_TRIES - 1])
def test_a_lost_entry_is_restored_each_time(failures: int) -> None:
    async def body() -> None:
        entry = Entry(failures)
        watching = asyncio.create_task(entry.watch().run())
        for number in range(2):
            entry.lost = True
            await eventually(lambda: not entry.lost)
            assert entry.tries == failures + 1 + number
        assert not entry.retired
        assert not watching.done()
        watching.cancel()

    run_bounded(body())


def test_an_entry_that_cannot_be_restored_retires_the_process() -> None:
    async def body() -> None:
        entry = Entry(failures=RESTORE_TRIES)
        entry.lost = True
        await entry.watch().run()
        assert entry.tries == RESTORE_TRIES
        [error] = entry.retired
        assert "discovery has lost this worker" in error.message
        assert "no answer" in error.message

    run_bounded(body())


def test_an_entry_that_comes_back_by_itself_is_left_alone() -> None:
    async def body() -> None:
        entry = Entry()
        looks = iter([True, True, False])
        watch = RegistrationWatch(
            "worker", lambda: next(looks, False), entry.restore, entry.retired.append, interval_s=0.005, checks=2
        )
        watching = asyncio.create_task(watch.run())
        await eventually(lambda: next(looks, None) is None)
        assert entry.tries == 0
        watching.cancel()

    run_bounded(body())
