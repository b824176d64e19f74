"""A supervised process is tracked from the moment that it exists."""

import asyncio
from pathlib import Path

import pytest

from baton.testing import run_bounded
from baton.topology.process import Process


@pytest.mark.process
def test_cancelled_start_keeps_track_of_the_process(tmp_path: Path) -> None:
    async def body() -> None:
        process = Process("one", "--version", {}, tmp_path, tmp_path / "one.log")
        try:
            for turns in range(6):
                starting = asyncio.create_task(process.start(10))
                for _ in range(turns + 1):
                    await asyncio.sleep(0)
                starting.cancel()
                await asyncio.gather(starting, return_exceptions=True)
                assert await process.wait() == 0, "the process is tracked and can be awaited"
        finally:
            process.close()

    run_bounded(body(), 60)
