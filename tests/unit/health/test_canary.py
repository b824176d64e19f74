"""The canary: an idle worker is probed, a busy one is not, and each change is reported once."""

import asyncio
from collections.abc import Awaitable, Callable

import pytest

from baton.errors import EngineFailed, EngineStalled
from baton.health.canary import Canary, try_probe
from baton.testing import eventually, run_bounded


class ProbedWorker:
    """A worker whose probe answers, fails or hangs."""

    def __init__(self) -> None:
        self.probes = 0
        self.busy = False
        self.suspended = False
        self.answer: Callable[[], Awaitable[None]] = self.succeed
        self.changes: list[bool] = []

    async def succeed(self) -> None:
        pass

    async def fail(self) -> None:
        raise EngineFailed("no")

    async def hang(self) -> None:
        await asyncio.sleep(3600)

    async def probe(self) -> None:
        self.probes += 1
        await self.answer()

    async def record(self, healthy: bool) -> None:
        self.changes.append(healthy)

    def canary(self, give_up_s: float = 3600.0) -> Canary:
        return Canary(self.probe, lambda: self.busy, self.record, 0.005, 0.02, give_up_s, lambda: self.suspended)


def test_a_probe_that_answers_has_no_problem() -> None:
    assert run_bounded(try_probe(ProbedWorker().succeed, 1.0)) is None


def test_a_failed_probe_returns_the_error() -> None:
    assert run_bounded(try_probe(ProbedWorker().fail, 1.0)) == "engine_failed: no"


def test_a_probe_that_hangs_fails_after_its_timeout() -> None:
    assert run_bounded(try_probe(ProbedWorker().hang, 0.01)) == "no answer within 0.01 s"


@pytest.mark.parametrize("problem", ["fail", "hang"])
def test_a_failure_and_a_recovery_are_reported_once_each(problem: str) -> None:
    async def body() -> None:
        worker = ProbedWorker()
        canary = worker.canary()
        running = asyncio.create_task(canary.run())
        await eventually(lambda: worker.probes > 2)
        assert canary.healthy
        worker.answer = getattr(worker, problem)
        await eventually(lambda: not canary.healthy)
        probes = worker.probes
        await eventually(lambda: worker.probes > probes + 2)
        worker.answer = worker.succeed
        await eventually(lambda: canary.healthy)
        probes = worker.probes
        await eventually(lambda: worker.probes > probes + 2)
        running.cancel()
        assert worker.changes == [False, True]

    run_bounded(body())


def test_a_busy_worker_is_not_probed_unless_it_is_unhealthy() -> None:
    async def body() -> None:
        worker = ProbedWorker()
        worker.busy = True
        canary = worker.canary()
        running = asyncio.create_task(canary.run())
        await asyncio.sleep(0.05)
        assert worker.probes == 0
        worker.busy = False
        worker.answer = worker.fail
        await eventually(lambda: not canary.healthy)
        worker.busy = True
        worker.answer = worker.succeed
        await eventually(lambda: canary.healthy)
        running.cancel()

    run_bounded(body())


def test_probes_that_fail_for_too_long_end_the_worker() -> None:
    async def body() -> None:
        worker = ProbedWorker()
        worker.answer = worker.hang
        with pytest.raises(EngineStalled, match="no answer within"):
            await worker.canary(give_up_s=0.1).run()
        assert worker.changes == [False]

    run_bounded(body())


def test_one_success_restarts_the_time_until_giving_up() -> None:
    async def body() -> None:
        worker = ProbedWorker()
        canary = worker.canary(give_up_s=0.2)
        running = asyncio.create_task(canary.run())
        for _ in range(4):
            worker.answer = worker.fail
            await eventually(lambda: not canary.healthy)
            await asyncio.sleep(0.08)
            worker.answer = worker.succeed
            await eventually(lambda: canary.healthy)
        assert not running.done()
        running.cancel()

    run_bounded(body())


def test_a_suspended_worker_is_not_probed() -> None:
    async def body() -> None:
        worker = ProbedWorker()
        worker.answer = worker.fail
        worker.suspended = True
        running = asyncio.create_task(worker.canary(give_up_s=0.01).run())
        await asyncio.sleep(0.1)
        assert worker.probes == 0
        assert not running.done()
        worker.suspended = False
        with pytest.raises(EngineStalled):
            await running

    run_bounded(body())


def test_a_probe_that_fails_while_suspended_is_ignored() -> None:
    async def body() -> None:
        worker = ProbedWorker()
        worker.answer = worker.hang
        running = asyncio.create_task(worker.canary().run())
        await eventually(lambda: worker.probes == 1)
        worker.suspended = True
        await asyncio.sleep(0.1)
        assert worker.changes == []
        running.cancel()

    run_bounded(body())
