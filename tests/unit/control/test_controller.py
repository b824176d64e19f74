"""Orders over a whole worker in one process: discovery, the engine, roll-back, and who is excused meanwhile."""

import asyncio
from typing import Any

import pytest

from baton.errors import BatonError, EngineDead, EngineFailed, EngineStalled, InvalidRequest, PeerLost, Unsupported
from baton.ports.engine import Capabilities
from baton.protocol.commands import (
    Command,
    Continue,
    Outcome,
    Pause,
    ReleaseMemory,
    ResumeMemory,
    SetWeightVersion,
    UpdateWeights,
)
from baton.protocol.outputs import Finished, FinishReason, TokenDelta
from baton.testing import ScriptedEngine, eventually, run_bounded
from baton.testing.fakes import Script
from tests.unit.control.operated import DONE, EVERYTHING, WELL, House, living

FROM_DISK = {"source": {"type": "disk", "path": "/m"}, "version": "2"}
JOIN = {"group": "g", "host": "127.0.0.1", "port": 1234, "rank": 1, "size": 2}
BOTH = {"tags": ["kv_cache", "weights"]}
KEEPS_OR_NOTHING = Capabilities(memory_tags=frozenset({"weights", "kv_cache"}), pause_modes=frozenset({"abort"}))


def released(*tags: str) -> Outcome:
    return Outcome(message="released", released=tags)


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("cache/clear", {}),
        ("profile/start", {"directory": "/tmp/p", "steps": 3}),
        ("profile/stop", {}),
        ("weights/update", FROM_DISK),
        ("weights/version", {"version": "7"}),
        ("weights/group/join", JOIN),
        ("weights/group/leave", {"group": "g"}),
        ("experts/record/start", {}),
        ("lora/load", {"name": "a", "path": "/a"}),
    ],
)
def test_most_orders_leave_the_worker_in_discovery(path: str, body: dict[str, Any]) -> None:
    async def main() -> None:
        at_it = asyncio.Event()
        async with living(at_it, DONE) as house:
            order = asyncio.create_task(house.ok(path, body))
            await eventually(lambda: len(house.engine.verbs) == 1)
            assert house.serves()
            at_it.set()
            await order
            assert house.serves()

    run_bounded(main())


# Pauses


@pytest.mark.parametrize(
    ("path", "body", "verbs", "end"),
    [
        ("pause", {"mode": "retract"}, 1, ("continue", {})),
        ("memory/release", {"tags": ["kv_cache"]}, 2, ("memory/resume", {"tags": ["kv_cache"]})),
    ],
)
def test_a_worker_is_out_of_discovery_before_its_engine_goes_quiet_and_back_after_it_works(
    path: str, body: dict[str, Any], verbs: int, end: tuple[str, dict[str, Any]]
) -> None:
    async def main() -> None:
        going, coming = asyncio.Event(), asyncio.Event()
        async with living(going, *[DONE] * verbs, coming, *[DONE] * verbs) as house:
            order = asyncio.create_task(house.ok(path, body))
            await eventually(lambda: len(house.engine.verbs) == 1)
            assert not house.serves()
            going.set()
            await order
            with pytest.raises(PeerLost):
                await house.call()
            order = asyncio.create_task(house.ok(*end))
            await eventually(lambda: len(house.engine.verbs) == verbs + 1)
            assert not house.serves()
            coming.set()
            await order
            assert house.serves()
            assert await house.call()

    run_bounded(main())


def test_a_request_that_was_on_its_way_to_a_paused_worker_is_told_to_go_elsewhere() -> None:
    async def main() -> None:
        async with living(DONE) as house:
            await house.ok("pause")
            house.endpoint.registered = True  # a frontend that has not heard of it yet
            with pytest.raises(BatonError) as refusal:
                await house.call()
            assert (refusal.value.code, refusal.value.retryable) == ("paused", True)

    run_bounded(main())


def test_d13_drain_lets_requests_finish() -> None:
    finish = asyncio.Event()
    slow: Script = [TokenDelta([1]), finish, Finished(FinishReason.LENGTH)]

    async def main() -> None:
        async with living(DONE, scripts=(WELL, slow)) as house:
            call = asyncio.create_task(house.call())
            await eventually(lambda: house.worker.gate.in_flight == 1)
            order = asyncio.create_task(house.ok("pause", {"mode": "drain"}))
            await eventually(lambda: not house.serves())
            assert house.engine.verbs == []
            finish.set()
            assert (await order)["paused"]
            assert len(await call) == 2
            assert house.engine.verbs == [Pause(mode="keep")]
            assert house.engine.aborted == []

    run_bounded(main())


def test_a_drain_that_takes_too_long_changes_nothing_and_says_how_many_still_run() -> None:
    stuck: Script = [TokenDelta([1])]

    async def main() -> None:
        async with living(scripts=(WELL, stuck), drain_timeout_s=0.01) as house:
            calls = [asyncio.create_task(house.call()) for _ in range(2)]
            await eventually(lambda: house.worker.gate.in_flight == 2)
            message = await house.refused("pause", {"mode": "drain", "timeout_s": 0.1}, 409, "conflict")
            assert "2 requests" in message
            assert house.serves()
            assert not (await house.status())["paused"]
            assert house.engine.verbs == []
            house.stop.set()
            await asyncio.wait(calls)

    run_bounded(main())


def test_requests_that_an_earlier_pause_keeps_cannot_be_waited_for() -> None:
    stuck: Script = [TokenDelta([1])]

    async def main() -> None:
        async with living(DONE, scripts=(WELL, stuck), drain_timeout_s=0.01) as house:
            call = asyncio.create_task(house.call())
            await eventually(lambda: house.worker.gate.in_flight == 1)
            await house.ok("pause")
            assert "continue first" in await house.refused("pause", {"mode": "drain"}, 409, "conflict")
            assert (await house.status())["paused"]
            house.stop.set()
            await asyncio.wait([call])

    run_bounded(main())


def test_a_drain_ends_with_the_worker() -> None:
    slow: Script = [TokenDelta([1]), 0.2, Finished(FinishReason.LENGTH)]

    async def main() -> None:
        async with living(DONE, scripts=(WELL, slow)) as house:
            call = asyncio.create_task(house.call())
            await eventually(lambda: house.worker.gate.in_flight == 1)
            order = asyncio.create_task(house.refused("pause", {"mode": "drain"}, 503, "draining"))
            await eventually(lambda: not house.endpoint.registered)
            house.stop.set()
            await order
            assert await call
            assert house.engine.verbs == []

    run_bounded(main())


def test_continue_without_a_pause_is_no_news_to_the_engine() -> None:
    async def main() -> None:
        async with living() as house:
            assert "nothing to do" in (await house.ok("continue"))["message"]
            assert house.engine.verbs == []

    run_bounded(main())


# Memory


def test_d13_staged_resume_comes_back_only_with_the_last_tag() -> None:
    async def main() -> None:
        async with living(*[DONE] * 6) as house:
            await house.ok("memory/release", BOTH)
            assert (await house.ok("memory/resume", {"tags": ["weights"]}))["released"] == ["kv_cache"]
            assert not house.serves()
            assert not any(isinstance(command, Continue) for command in house.engine.verbs)
            assert (await house.ok("memory/resume", {"tags": ["kv_cache"]}))["released"] == []
            assert house.serves()
            assert house.engine.verbs == [
                Pause(mode="retract"),
                ReleaseMemory(tags=("kv_cache", "weights")),
                ResumeMemory(tags=("weights",)),
                ResumeMemory(tags=("kv_cache",)),
                Continue(),
            ]

    run_bounded(main())


def test_a_worker_comes_back_only_when_all_is_resumed_and_nothing_is_paused() -> None:
    async def main() -> None:
        async with living(*[DONE] * 8) as house:
            await house.ok("memory/release", BOTH)
            await house.ok("pause")
            assert (await house.status())["released"] == ["kv_cache", "weights"]
            await house.ok("memory/resume", {"tags": ["weights"]})
            outcome = await house.ok("continue")
            assert "kv_cache" in outcome["message"]
            assert not any(isinstance(command, Continue) for command in house.engine.verbs)
            assert not house.serves()
            await house.ok("memory/resume", {"tags": ["kv_cache"]})
            assert house.serves()

    run_bounded(main())


def test_an_operators_pause_outlasts_a_release() -> None:
    async def main() -> None:
        async with living(*[DONE] * 6) as house:
            await house.ok("pause")
            await house.ok("memory/release", {"tags": ["weights"]})
            assert (await house.ok("memory/resume", {"tags": ["weights"]}))["paused"]
            assert not house.serves()
            await house.ok("continue")
            assert house.serves()

    run_bounded(main())


def test_what_is_done_already_is_well_and_says_so() -> None:
    async def main() -> None:
        async with living(*[DONE] * 4) as house:
            assert "nothing to do" in (await house.ok("memory/resume", BOTH))["message"]
            assert house.engine.verbs == []
            assert house.serves()
            await house.ok("memory/release", {"tags": ["weights", "weights"]})
            assert "nothing to do" in (await house.ok("memory/release", {"tags": ["weights"]}))["message"]
            assert house.engine.verbs == [Pause(mode="keep"), ReleaseMemory(tags=("weights",))]
            await house.ok("memory/resume", BOTH)
            assert house.engine.verbs[2:] == [ResumeMemory(tags=("weights",)), Continue()]
            assert house.serves()

    run_bounded(main())


@pytest.mark.parametrize("problem", [EngineFailed("disk full"), InvalidRequest("no"), ValueError("a bug")])
def test_d13_failed_release_leaves_the_worker_serving(problem: Exception) -> None:
    status, code = (400, "invalid_request") if isinstance(problem, InvalidRequest) else (500, "engine_failed")

    async def main() -> None:
        async with living(DONE, problem, DONE) as house:
            await house.refused("memory/release", BOTH, status, code)
            assert house.serves()
            assert [type(command) for command in house.engine.verbs] == [Pause, ReleaseMemory, Continue]
            stands = await house.status()
            assert (stands["paused"], stands["released"]) == (False, [])
            assert await house.call()

    run_bounded(main())


def test_a_worker_that_cannot_go_on_after_a_failed_release_ends() -> None:
    async def main() -> None:
        house = House(
            ScriptedEngine(WELL, capabilities=EVERYTHING, control=[DONE, EngineFailed("full"), EngineFailed("stuck")])
        )
        await house.server.start()
        await house.ready.wait()
        message = await house.refused("memory/release", BOTH, 503, "engine_dead")
        assert "full" in message
        assert "stuck" in message
        with pytest.raises(EngineDead):
            await house.running
        await house.server.aclose()

    run_bounded(main())


@pytest.mark.parametrize("problem", [EngineFailed("disk full"), InvalidRequest("no")])
def test_a_failed_pause_or_continue_leaves_the_worker_as_it_was(problem: BatonError) -> None:
    async def main() -> None:
        async with living(problem, DONE, problem, DONE) as house:
            await house.refused("pause", {}, problem.status, problem.code)
            assert house.serves()
            await house.ok("pause")
            await house.refused("continue", None, problem.status, problem.code)
            assert not house.serves()
            assert (await house.status())["paused"]
            await house.ok("continue")
            assert house.serves()

    run_bounded(main())


def test_a_resume_that_cannot_go_on_can_be_repeated() -> None:
    async def main() -> None:
        async with living(DONE, DONE, DONE, EngineFailed("not yet"), DONE) as house:
            await house.ok("memory/release", {"tags": ["weights"]})
            await house.refused("memory/resume", {"tags": ["weights"]}, 500, "engine_failed")
            assert not house.serves()
            assert (await house.status())["released"] == []
            await house.ok("memory/resume", {"tags": ["weights"]})
            assert house.serves()

    run_bounded(main())


def test_what_the_engine_says_goes_before_what_was_asked() -> None:
    async def main() -> None:
        async with living(DONE, released("weights")) as house:
            await house.ok("memory/release", BOTH)
            assert (await house.status())["released"] == ["weights"]

    run_bounded(main())


def test_an_engine_that_cannot_hold_requests_gives_memory_back_when_they_have_finished() -> None:
    finish = asyncio.Event()
    slow: Script = [TokenDelta([1]), finish, Finished(FinishReason.LENGTH)]

    async def main() -> None:
        async with living(DONE, DONE, can=KEEPS_OR_NOTHING, scripts=(WELL, slow)) as house:
            call = asyncio.create_task(house.call())
            await eventually(lambda: house.worker.gate.in_flight == 1)
            order = asyncio.create_task(house.ok("memory/release", {"tags": ["weights"]}))
            await eventually(lambda: not house.endpoint.registered)
            assert house.engine.verbs == []
            finish.set()
            await order
            assert await call
            assert house.engine.verbs == [ReleaseMemory(tags=("weights",))]
            await house.ok("memory/resume", {"tags": ["weights"]})
            assert house.serves()

    run_bounded(main())


# Weights


def test_d34_naming_a_weight_version_ends_no_request() -> None:
    finish = asyncio.Event()
    slow: Script = [TokenDelta([1]), finish, Finished(FinishReason.LENGTH)]

    async def main() -> None:
        async with living(DONE, scripts=(WELL, slow)) as house:
            call = asyncio.create_task(house.call())
            await eventually(lambda: house.worker.gate.in_flight == 1)
            assert (await house.ok("weights/version", {"version": "step-7"}))["weight_version"] == "step-7"
            assert house.engine.verbs == [SetWeightVersion(version="step-7")]
            assert house.engine.aborted == []
            assert house.serves()
            finish.set()
            assert len(await call) == 2

    run_bounded(main())


def test_a_version_can_be_told_and_set_on_an_engine_whose_weights_stay() -> None:
    async def main() -> None:
        async with living(can=Capabilities()) as house:
            told = await house.order("weights/version", method="GET")
            assert (told.status, told.body["weight_version"]) == (200, "initial")
            await house.ok("weights/version", {"version": "7"})
            assert house.engine.verbs == []
            assert (await house.order("weights/version", method="GET")).body["weight_version"] == "7"
            assert (await house.status())["weight_version"] == "7"

    run_bounded(main())


def test_a_version_can_be_set_where_the_engine_has_no_use_for_it() -> None:
    async def main() -> None:
        async with living(Unsupported("no")) as house:
            await house.ok("weights/version", {"version": "7"})
            assert (await house.status())["weight_version"] == "7"

    run_bounded(main())


def test_an_update_that_fails_leaves_the_version_as_it_was() -> None:
    async def main() -> None:
        async with living(DONE, EngineFailed("no such tensor")) as house:
            assert (await house.ok("weights/update", FROM_DISK))["weight_version"] == "2"
            await house.refused("weights/update", {**FROM_DISK, "version": "3"}, 500, "engine_failed")
            assert (await house.status())["weight_version"] == "2"

    run_bounded(main())


def test_weights_that_are_released_cannot_be_updated() -> None:
    async def main() -> None:
        async with living(DONE, DONE) as house:
            await house.ok("memory/release", {"tags": ["weights"]})
            assert "resume them" in await house.refused("weights/update", FROM_DISK, 409, "conflict")

    run_bounded(main())


# One at a time, in time


def test_orders_are_carried_out_one_at_a_time_and_status_answers_meanwhile() -> None:
    async def main() -> None:
        first = asyncio.Event()
        async with living(first, DONE, Outcome(message="second")) as house:
            controller = [asyncio.create_task(house.ok("weights/update", FROM_DISK))]
            await eventually(lambda: len(house.engine.verbs) == 1)
            controller.append(asyncio.create_task(house.ok("cache/clear")))
            await asyncio.sleep(0.02)
            assert len(house.engine.verbs) == 1
            assert (await house.status())["command"] == "update_weights"
            first.set()
            assert [reply["message"] for reply in await asyncio.gather(*controller)] == ["done", "second"]
            status = await house.status()
            assert (status["command"], status["weight_version"]) == (None, "2")

    run_bounded(main())


def test_an_idle_worker_is_neither_probed_nor_thought_stuck() -> None:
    stuck: Script = [TokenDelta([1])]

    async def main() -> None:
        async with living(
            DONE,
            DONE,
            scripts=(WELL, stuck, WELL),
            canary_interval_s=0.02,
            canary_timeout_s=0.02,
            stall_timeout_s=0.1,
            drain_timeout_s=0.01,
        ) as house:
            async with asyncio.timeout(5):
                await house.ok("pause")
                count = len(house.engine.submitted)
                await asyncio.sleep(0.4)
                assert len(house.engine.submitted) <= count + 1  # one may have been on its way
                assert not house.running.done()
                await house.ok("continue")
                await eventually(lambda: len(house.engine.submitted) > count + 1)
                await eventually(house.serves)

    run_bounded(main())


def test_an_engine_that_is_busy_with_an_order_is_not_probed() -> None:
    async def main() -> None:
        order = asyncio.Event()
        async with living(order, DONE, canary_interval_s=0.01, canary_timeout_s=0.01, stall_timeout_s=0.05) as house:
            doing = asyncio.create_task(house.ok("weights/update", FROM_DISK))
            await eventually(lambda: bool(house.engine.verbs))
            await asyncio.sleep(0.02)
            count = len(house.engine.submitted)
            await asyncio.sleep(0.2)
            assert len(house.engine.submitted) == count
            order.set()
            await doing
            await eventually(lambda: len(house.engine.submitted) > count)

    run_bounded(main())


@pytest.mark.parametrize(
    ("problem", "error", "words"),
    [(asyncio.Event(), EngineStalled, "within 0.05 s"), (EngineDead("gone"), EngineDead, "gone")],
)
def test_an_engine_that_is_stuck_or_dead_at_an_order_ends_the_worker(
    problem: asyncio.Event | EngineDead, error: type[BatonError], words: str
) -> None:
    async def main() -> None:
        house = House(ScriptedEngine(WELL, capabilities=EVERYTHING, control=[problem]), command_timeout_s=0.05)
        await house.server.start()
        await house.ready.wait()
        assert words in await house.refused("pause", None, 503, error.code)
        with pytest.raises(error):
            await house.running
        assert not house.serves()
        await house.server.aclose()

    run_bounded(main())


def test_orders_during_the_shutdown_are_refused() -> None:
    slow: Script = [TokenDelta([1]), 0.3, Finished(FinishReason.LENGTH)]

    async def main() -> None:
        async with living(DONE, scripts=(WELL, slow)) as house:
            call = asyncio.create_task(house.call())
            await eventually(lambda: house.worker.gate.in_flight == 1)
            house.stop.set()
            await eventually(lambda: not house.endpoint.registered)
            await house.refused("pause", None, 503, "draining")
            assert await call
        assert house.engine.verbs == []

    run_bounded(main())


def test_an_order_that_ends_during_the_shutdown_does_not_bring_the_worker_back() -> None:
    async def main() -> None:
        last = asyncio.Event()
        async with living(DONE, last, DONE, drain_timeout_s=0.01) as house:
            await house.ok("pause")
            order = asyncio.create_task(house.order("continue"))
            await eventually(lambda: len(house.engine.verbs) == 2)
            house.stop.set()
            await house.running
            last.set()
            await order
            assert not house.serves()

    run_bounded(main())


def test_verbs_reach_the_engine_as_they_were_asked_for() -> None:
    expected: list[Command] = [Pause(mode="abort"), Pause(mode="keep"), ReleaseMemory(tags=("weights",))]

    async def main() -> None:
        async with living(*[DONE] * 4) as house:
            await house.ok("pause", {"mode": "abort"})
            await house.ok("memory/release", {"tags": ["weights"]})
            assert house.engine.verbs == expected
            await house.ok("weights/version", {"version": "v"})
            assert not any(isinstance(command, UpdateWeights) for command in house.engine.verbs)

    run_bounded(main())
