"""The canary: an idle worker is asked, a busy one is not, and changes are told once."""

import asyncio
from collections.abc import Awaitable, Callable

import pytest

from baton.errors import EngineFailed, EngineStalled
from baton.health.canary import Canary, try_probe
from baton.testing import eventually, run_bounded


class Patient:
    """What is probed: answers, fails or hangs as it is told."""

    def __init__(self) -> None:
        self.probes = 0
        self.busy = False
        self.suspended = False
        self.answer: Callable[[], Awaitable[None]] = self.well
        self.changes: list[tuple[bool, str]] = []

    async def well(self) -> None:
        pass

    async def ill(self) -> None:
        raise EngineFailed("no")

    async def stuck(self) -> None:
        await asyncio.sleep(3600)

    async def probe(self) -> None:
        self.probes += 1
        await self.answer()

    async def note(self, healthy: bool, problem: str) -> None:
        self.changes.append((healthy, problem))

    def canary(self, give_up_s: float = 3600.0) -> Canary:
        return Canary(self.probe, lambda: self.busy, self.note, 0.005, 0.02, give_up_s, lambda: self.suspended)


def test_a_probe_that_answers_has_no_problem() -> None:
    assert run_bounded(try_probe(Patient().well, 1.0)) is None


def test_a_probe_that_fails_tells_why() -> None:
    assert run_bounded(try_probe(Patient().ill, 1.0)) == "engine_failed: no"


def test_a_probe_that_hangs_is_a_problem_after_its_time() -> None:
    assert run_bounded(try_probe(Patient().stuck, 0.01)) == "no answer within 0.01 s"


@pytest.mark.parametrize("illness", ["ill", "stuck"])
def test_an_illness_and_a_recovery_are_told_once_each(illness: str) -> None:
    async def body() -> None:
        patient = Patient()
        canary = patient.canary()
        running = asyncio.create_task(canary.run())
        await eventually(lambda: patient.probes > 2)
        assert canary.healthy
        patient.answer = getattr(patient, illness)
        await eventually(lambda: not canary.healthy)
        probes = patient.probes
        await eventually(lambda: patient.probes > probes + 2)
        patient.answer = patient.well
        await eventually(lambda: canary.healthy)
        probes = patient.probes
        await eventually(lambda: patient.probes > probes + 2)
        running.cancel()
        assert [healthy for healthy, _ in patient.changes] == [False, True]
        assert patient.changes[0][1] != ""

    run_bounded(body())


def test_a_busy_worker_is_not_probed_unless_it_is_ill() -> None:
    async def body() -> None:
        patient = Patient()
        patient.busy = True
        canary = patient.canary()
        running = asyncio.create_task(canary.run())
        await asyncio.sleep(0.05)
        assert patient.probes == 0
        patient.busy = False
        patient.answer = patient.ill
        await eventually(lambda: not canary.healthy)
        patient.busy = True
        patient.answer = patient.well
        await eventually(lambda: canary.healthy)
        running.cancel()

    run_bounded(body())


def test_a_worker_that_never_answers_again_is_given_up() -> None:
    async def body() -> None:
        patient = Patient()
        patient.answer = patient.stuck
        with pytest.raises(EngineStalled, match="no answer within"):
            await patient.canary(give_up_s=0.1).run()
        assert [healthy for healthy, _ in patient.changes] == [False]

    run_bounded(body())


def test_one_answer_starts_the_patience_anew() -> None:
    async def body() -> None:
        patient = Patient()
        canary = patient.canary(give_up_s=0.2)
        running = asyncio.create_task(canary.run())
        for _ in range(4):
            patient.answer = patient.ill
            await eventually(lambda: not canary.healthy)
            await asyncio.sleep(0.08)
            patient.answer = patient.well
            await eventually(lambda: canary.healthy)
        assert not running.done()
        running.cancel()

    run_bounded(body())


def test_one_that_is_excused_is_not_probed_and_not_given_up() -> None:
    async def body() -> None:
        patient = Patient()
        patient.answer = patient.ill
        patient.suspended = True
        running = asyncio.create_task(patient.canary(give_up_s=0.01).run())
        await asyncio.sleep(0.1)
        assert patient.probes == 0
        assert not running.done()
        patient.suspended = False
        with pytest.raises(EngineStalled):
            await running

    run_bounded(body())


def test_a_probe_during_which_it_is_excused_tells_nothing() -> None:
    async def body() -> None:
        patient = Patient()
        patient.answer = patient.stuck
        running = asyncio.create_task(patient.canary().run())
        await eventually(lambda: patient.probes == 1)
        patient.suspended = True
        await asyncio.sleep(0.1)
        assert patient.changes == []
        running.cancel()

    run_bounded(body())
