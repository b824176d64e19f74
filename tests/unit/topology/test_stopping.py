"""A `baton serve` whose terminal is closed stops as after Ctrl-C."""

import asyncio
import os
import signal
from collections.abc import Iterator

import pytest

from baton.topology.stopping import stop_on_hangup


@pytest.fixture
def hangup() -> Iterator[None]:
    """Keep what this process does at SIGHUP."""
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    yield
    signal.signal(signal.SIGHUP, before)


@pytest.mark.usefixtures("hangup")
def test_a_closed_terminal_stops() -> None:
    async def body() -> None:
        stop = asyncio.Event()
        stop_on_hangup(stop)
        os.kill(os.getpid(), signal.SIGHUP)
        await asyncio.wait_for(stop.wait(), 5)

    asyncio.run(body())


@pytest.mark.usefixtures("hangup")
def test_a_hangup_that_is_ignored_stays_ignored() -> None:
    async def body() -> None:
        stop = asyncio.Event()
        signal.signal(signal.SIGHUP, signal.SIG_IGN)
        stop_on_hangup(stop)
        os.kill(os.getpid(), signal.SIGHUP)
        await asyncio.sleep(0.05)
        assert not stop.is_set()

    asyncio.run(body())
