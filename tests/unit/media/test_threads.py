"""A pool of threads for blocking work."""

import asyncio
import threading

import pytest

from baton.media.threads import ThreadPool
from baton.testing import eventually, run_bounded


def test_results_and_errors_reach_the_caller() -> None:
    async def body() -> None:
        pool = ThreadPool("test", 2)
        assert await pool.run(pow, 2, 5) == 32
        with pytest.raises(ZeroDivisionError):
            await pool.run(divmod, 1, 0)
        assert await pool.run(threading.current_thread) is not threading.current_thread()
        pool.close()
        pool.close()
        with pytest.raises(RuntimeError, match="have been ended"):
            pool.submit(pow, 2, 5)

    run_bounded(body())


def test_no_more_than_its_threads_work_at_a_time() -> None:
    async def body() -> None:
        pool = ThreadPool("test", 2)
        go, begun = threading.Event(), []

        def work(number: int) -> int:
            begun.append(number)
            go.wait(10)
            return number

        running = [pool.submit(work, number) for number in range(4)]
        await eventually(lambda: len(begun) == 2)
        running[2].cancel()
        go.set()
        assert [await running[0], await running[1], await running[3]] == [0, 1, 3]
        assert begun == [0, 1, 3] or begun == [1, 0, 3], "what was cancelled before it began is not done"
        pool.close()

    run_bounded(body())


def test_idle_threads_are_used_again() -> None:
    async def body() -> None:
        pool = ThreadPool("test", 8)
        used = set()
        for _ in range(20):
            used.add(await pool.run(threading.get_ident))
            await asyncio.sleep(0)
        assert len(used) < 8
        pool.close()

    run_bounded(body())
