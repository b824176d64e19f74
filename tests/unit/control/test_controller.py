"""Commands on a whole worker in one process: discovery, the engine, roll-back, canary and watchdog meanwhile."""

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
from tests.unit.control.worker_harness import DONE, EVERYTHING, ONE_TOKEN, WorkerHarness, running_worker

FROM_DISK = {"source": {"type": "disk", "path": "/m"}, "version": "2"}
JOIN = {"group": "g", "host": "127.0.0.1", "port": 1234, "rank": 1, "size": 2}
BOTH = {"tags": ["kv_cache", "weights"]}
ABORT_ONLY = Capabilities(memory_tags=frozenset({"weights", "kv_cache"}), pause_modes=frozenset({"abort"}))


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
def test_commands_that_stop_no_requests_leave_the_worker_registered(path: str, body: dict[str, Any]) -> None:
    async def main() -> None:
        proceed = asyncio.Event()
        async with running_worker(proceed, DONE) as harness:
            command = asyncio.create_task(harness.ok(path, body))
            await eventually(lambda: len(harness.engine.commands) == 1)
            assert harness.serves()
            proceed.set()
            await command
            assert harness.serves()

    run_bounded(main())


# Pauses


@pytest.mark.parametrize(
    ("path", "body", "calls", "end"),
    [
        ("pause", {"mode": "retract"}, 1, ("continue", {})),
        ("memory/release", {"tags": ["kv_cache"]}, 2, ("memory/resume", {"tags": ["kv_cache"]})),
    ],
)
def test_a_worker_deregisters_before_its_engine_pauses_and_registers_after_it_continues(
    path: str, body: dict[str, Any], calls: int, end: tuple[str, dict[str, Any]]
) -> None:
    async def main() -> None:
        pausing, continuing = asyncio.Event(), asyncio.Event()
        async with running_worker(pausing, *[DONE] * calls, continuing, *[DONE] * calls) as harness:
            command = asyncio.create_task(harness.ok(path, body))
            await eventually(lambda: len(harness.engine.commands) == 1)
            assert not harness.serves()
            pausing.set()
            await command
            with pytest.raises(PeerLost):
                await harness.call()
            command = asyncio.create_task(harness.ok(*end))
            await eventually(lambda: len(harness.engine.commands) == calls + 1)
            assert not harness.serves()
            continuing.set()
            await command
            assert harness.serves()
            assert await harness.call()

    run_bounded(main())


def test_a_request_that_reaches_a_paused_worker_gets_a_retryable_error() -> None:
    async def main() -> None:
        async with running_worker(DONE) as harness:
            await harness.ok("pause")
            harness.endpoint.registered = True  # a frontend that has a stale view of discovery
            with pytest.raises(BatonError) as refusal:
                await harness.call()
            assert (refusal.value.code, refusal.value.retryable) == ("paused", True)

    run_bounded(main())


def test_d13_drain_lets_requests_finish() -> None:
    finish = asyncio.Event()
    slow: Script = [TokenDelta([1]), finish, Finished(FinishReason.LENGTH)]

    async def main() -> None:
        async with running_worker(DONE, scripts=(ONE_TOKEN, slow)) as harness:
            call = asyncio.create_task(harness.call())
            await eventually(lambda: harness.worker.gate.in_flight == 1)
            command = asyncio.create_task(harness.ok("pause", {"mode": "drain"}))
            await eventually(lambda: not harness.serves())
            assert harness.engine.commands == []
            finish.set()
            assert (await command)["paused"]
            assert len(await call) == 2
            assert harness.engine.commands == [Pause(mode="keep")]
            assert harness.engine.aborted == []

    run_bounded(main())


def test_a_drain_that_times_out_changes_nothing_and_reports_how_many_requests_run() -> None:
    stuck: Script = [TokenDelta([1])]

    async def main() -> None:
        async with running_worker(scripts=(ONE_TOKEN, stuck), drain_timeout_s=0.01) as harness:
            calls = [asyncio.create_task(harness.call()) for _ in range(2)]
            await eventually(lambda: harness.worker.gate.in_flight == 2)
            message = await harness.refused("pause", {"mode": "drain", "timeout_s": 0.1}, 409, "conflict")
            assert "2 requests" in message
            assert harness.serves()
            assert not (await harness.status())["paused"]
            assert harness.engine.commands == []
            harness.stop.set()
            await asyncio.wait(calls)

    run_bounded(main())


def test_a_drain_of_requests_that_a_pause_keeps_is_a_conflict() -> None:
    stuck: Script = [TokenDelta([1])]

    async def main() -> None:
        async with running_worker(DONE, scripts=(ONE_TOKEN, stuck), drain_timeout_s=0.01) as harness:
            call = asyncio.create_task(harness.call())
            await eventually(lambda: harness.worker.gate.in_flight == 1)
            await harness.ok("pause")
            assert "continue first" in await harness.refused("pause", {"mode": "drain"}, 409, "conflict")
            assert (await harness.status())["paused"]
            harness.stop.set()
            await asyncio.wait([call])

    run_bounded(main())


def test_a_drain_ends_with_the_worker() -> None:
    slow: Script = [TokenDelta([1]), 0.2, Finished(FinishReason.LENGTH)]

    async def main() -> None:
        async with running_worker(DONE, scripts=(ONE_TOKEN, slow)) as harness:
            call = asyncio.create_task(harness.call())
            await eventually(lambda: harness.worker.gate.in_flight == 1)
            command = asyncio.create_task(harness.refused("pause", {"mode": "drain"}, 503, "draining"))
            await eventually(lambda: not harness.endpoint.registered)
            harness.stop.set()
            await command
            assert await call
            assert harness.engine.commands == []

    run_bounded(main())


def test_continue_without_a_pause_does_not_call_the_engine() -> None:
    async def main() -> None:
        async with running_worker() as harness:
            assert "nothing to do" in (await harness.ok("continue"))["message"]
            assert harness.engine.commands == []

    run_bounded(main())


# Memory


@pytest.mark.parametrize("body", [None, {}, {"tags": []}])
def test_memory_commands_without_tags_mean_all_of_them(body: object) -> None:
    async def main() -> None:
        async with running_worker(*[DONE] * 6) as harness:
            assert (await harness.ok("memory/release", body))["released"] == ["kv_cache", "weights"]
            assert "nothing to do" in (await harness.ok("memory/release", body))["message"]
            assert not harness.serves()
            await harness.ok("memory/resume", {"tags": ["weights"]})
            assert (await harness.ok("memory/resume", body))["released"] == []
            assert harness.serves()
            assert harness.engine.commands[1:4] == [
                ReleaseMemory(tags=("kv_cache", "weights")),
                ResumeMemory(tags=("weights",)),
                ResumeMemory(tags=("kv_cache",)),
            ]

    run_bounded(main())


def test_memory_commands_without_tags_are_refused_by_an_engine_that_releases_none() -> None:
    async def main() -> None:
        async with running_worker(can=Capabilities()) as harness:
            for path in ("memory/release", "memory/resume"):
                await harness.refused(path, {}, 501, "unsupported")

    run_bounded(main())


def test_d13_staged_resume_registers_only_with_the_last_tag() -> None:
    async def main() -> None:
        async with running_worker(*[DONE] * 6) as harness:
            await harness.ok("memory/release", BOTH)
            assert (await harness.ok("memory/resume", {"tags": ["weights"]}))["released"] == ["kv_cache"]
            assert not harness.serves()
            assert not any(isinstance(command, Continue) for command in harness.engine.commands)
            assert (await harness.ok("memory/resume", {"tags": ["kv_cache"]}))["released"] == []
            assert harness.serves()
            assert harness.engine.commands == [
                Pause(mode="retract"),
                ReleaseMemory(tags=("kv_cache", "weights")),
                ResumeMemory(tags=("weights",)),
                ResumeMemory(tags=("kv_cache",)),
                Continue(),
            ]

    run_bounded(main())


def test_a_worker_registers_only_when_all_memory_is_resumed_and_no_pause_holds() -> None:
    async def main() -> None:
        async with running_worker(*[DONE] * 8) as harness:
            await harness.ok("memory/release", BOTH)
            await harness.ok("pause")
            assert (await harness.status())["released"] == ["kv_cache", "weights"]
            await harness.ok("memory/resume", {"tags": ["weights"]})
            outcome = await harness.ok("continue")
            assert "kv_cache" in outcome["message"]
            assert not any(isinstance(command, Continue) for command in harness.engine.commands)
            assert not harness.serves()
            await harness.ok("memory/resume", {"tags": ["kv_cache"]})
            assert harness.serves()

    run_bounded(main())


def test_an_operators_pause_outlasts_a_release() -> None:
    async def main() -> None:
        async with running_worker(*[DONE] * 6) as harness:
            await harness.ok("pause")
            await harness.ok("memory/release", {"tags": ["weights"]})
            assert (await harness.ok("memory/resume", {"tags": ["weights"]}))["paused"]
            assert not harness.serves()
            await harness.ok("continue")
            assert harness.serves()

    run_bounded(main())


def test_a_repeated_release_or_resume_does_nothing_and_says_so() -> None:
    async def main() -> None:
        async with running_worker(*[DONE] * 4) as harness:
            assert "nothing to do" in (await harness.ok("memory/resume", BOTH))["message"]
            assert harness.engine.commands == []
            assert harness.serves()
            await harness.ok("memory/release", {"tags": ["weights", "weights"]})
            assert "nothing to do" in (await harness.ok("memory/release", {"tags": ["weights"]}))["message"]
            assert harness.engine.commands == [Pause(mode="keep"), ReleaseMemory(tags=("weights",))]
            await harness.ok("memory/resume", BOTH)
            assert harness.engine.commands[2:] == [ResumeMemory(tags=("weights",)), Continue()]
            assert harness.serves()

    run_bounded(main())


@pytest.mark.parametrize("problem", [EngineFailed("disk full"), InvalidRequest("no"), ValueError("a bug")])
def test_d13_failed_release_leaves_the_worker_serving(problem: Exception) -> None:
    http_status, code = (400, "invalid_request") if isinstance(problem, InvalidRequest) else (500, "engine_failed")

    async def main() -> None:
        async with running_worker(DONE, problem, DONE) as harness:
            await harness.refused("memory/release", BOTH, http_status, code)
            assert harness.serves()
            assert [type(command) for command in harness.engine.commands] == [Pause, ReleaseMemory, Continue]
            status = await harness.status()
            assert (status["paused"], status["released"]) == (False, [])
            assert await harness.call()

    run_bounded(main())


def test_a_worker_whose_engine_cannot_continue_after_a_failed_release_ends() -> None:
    async def main() -> None:
        harness = WorkerHarness(
            ScriptedEngine(
                ONE_TOKEN, capabilities=EVERYTHING, control=[DONE, EngineFailed("full"), EngineFailed("stuck")]
            )
        )
        await harness.server.start()
        await harness.ready.wait()
        message = await harness.refused("memory/release", BOTH, 503, "engine_dead")
        assert "full" in message
        assert "stuck" in message
        with pytest.raises(EngineDead):
            await harness.running
        await harness.server.aclose()

    run_bounded(main())


@pytest.mark.parametrize("problem", [EngineFailed("disk full"), InvalidRequest("no")])
def test_a_failed_pause_or_continue_changes_nothing(problem: BatonError) -> None:
    async def main() -> None:
        async with running_worker(problem, DONE, problem, DONE) as harness:
            await harness.refused("pause", {}, problem.status, problem.code)
            assert harness.serves()
            await harness.ok("pause")
            await harness.refused("continue", None, problem.status, problem.code)
            assert not harness.serves()
            assert (await harness.status())["paused"]
            await harness.ok("continue")
            assert harness.serves()

    run_bounded(main())


def test_a_resume_whose_continue_failed_can_be_repeated() -> None:
    async def main() -> None:
        async with running_worker(DONE, DONE, DONE, EngineFailed("not yet"), DONE) as harness:
            await harness.ok("memory/release", {"tags": ["weights"]})
            await harness.refused("memory/resume", {"tags": ["weights"]}, 500, "engine_failed")
            assert not harness.serves()
            assert (await harness.status())["released"] == []
            await harness.ok("memory/resume", {"tags": ["weights"]})
            assert harness.serves()

    run_bounded(main())


def test_the_engines_outcome_overrides_what_was_asked() -> None:
    async def main() -> None:
        async with running_worker(DONE, released("weights")) as harness:
            await harness.ok("memory/release", BOTH)
            assert (await harness.status())["released"] == ["weights"]

    run_bounded(main())


def test_an_engine_that_cannot_keep_requests_releases_memory_when_they_have_finished() -> None:
    finish = asyncio.Event()
    slow: Script = [TokenDelta([1]), finish, Finished(FinishReason.LENGTH)]

    async def main() -> None:
        async with running_worker(DONE, DONE, can=ABORT_ONLY, scripts=(ONE_TOKEN, slow)) as harness:
            call = asyncio.create_task(harness.call())
            await eventually(lambda: harness.worker.gate.in_flight == 1)
            command = asyncio.create_task(harness.ok("memory/release", {"tags": ["weights"]}))
            await eventually(lambda: not harness.endpoint.registered)
            assert harness.engine.commands == []
            finish.set()
            await command
            assert await call
            assert harness.engine.commands == [ReleaseMemory(tags=("weights",))]
            await harness.ok("memory/resume", {"tags": ["weights"]})
            assert harness.serves()

    run_bounded(main())


# Weights


def test_d34_naming_a_weight_version_ends_no_request() -> None:
    finish = asyncio.Event()
    slow: Script = [TokenDelta([1]), finish, Finished(FinishReason.LENGTH)]

    async def main() -> None:
        async with running_worker(DONE, scripts=(ONE_TOKEN, slow)) as harness:
            call = asyncio.create_task(harness.call())
            await eventually(lambda: harness.worker.gate.in_flight == 1)
            assert (await harness.ok("weights/version", {"version": "step-7"}))["weight_version"] == "step-7"
            assert harness.engine.commands == [SetWeightVersion(version="step-7")]
            assert harness.engine.aborted == []
            assert harness.serves()
            finish.set()
            assert len(await call) == 2

    run_bounded(main())


def test_a_version_can_be_read_and_set_on_an_engine_without_weight_updates() -> None:
    async def main() -> None:
        async with running_worker(can=Capabilities()) as harness:
            version = await harness.send("weights/version", method="GET")
            assert (version.status, version.body["weight_version"]) == (200, "initial")
            await harness.ok("weights/version", {"version": "7"})
            assert harness.engine.commands == []
            assert (await harness.send("weights/version", method="GET")).body["weight_version"] == "7"
            assert (await harness.status())["weight_version"] == "7"

    run_bounded(main())


def test_a_version_can_be_set_on_an_engine_that_does_not_support_versions() -> None:
    async def main() -> None:
        async with running_worker(Unsupported("no")) as harness:
            await harness.ok("weights/version", {"version": "7"})
            assert (await harness.status())["weight_version"] == "7"

    run_bounded(main())


def test_a_failed_update_leaves_the_version_unchanged() -> None:
    async def main() -> None:
        async with running_worker(DONE, EngineFailed("no such tensor")) as harness:
            assert (await harness.ok("weights/update", FROM_DISK))["weight_version"] == "2"
            await harness.refused("weights/update", {**FROM_DISK, "version": "3"}, 500, "engine_failed")
            assert (await harness.status())["weight_version"] == "2"

    run_bounded(main())


def test_released_weights_cannot_be_updated() -> None:
    async def main() -> None:
        async with running_worker(DONE, DONE) as harness:
            await harness.ok("memory/release", {"tags": ["weights"]})
            assert "resume them" in await harness.refused("weights/update", FROM_DISK, 409, "conflict")

    run_bounded(main())


# One at a time, within the timeout


def test_commands_are_executed_one_at_a_time_and_status_replies_meanwhile() -> None:
    async def main() -> None:
        first = asyncio.Event()
        async with running_worker(first, DONE, Outcome(message="second")) as harness:
            commands = [asyncio.create_task(harness.ok("weights/update", FROM_DISK))]
            await eventually(lambda: len(harness.engine.commands) == 1)
            commands.append(asyncio.create_task(harness.ok("cache/clear")))
            await asyncio.sleep(0.02)
            assert len(harness.engine.commands) == 1
            assert (await harness.status())["command"] == "update_weights"
            first.set()
            assert [reply["message"] for reply in await asyncio.gather(*commands)] == ["done", "second"]
            status = await harness.status()
            assert (status["command"], status["weight_version"]) == (None, "2")

    run_bounded(main())


def test_a_paused_worker_is_neither_probed_nor_stalled() -> None:
    stuck: Script = [TokenDelta([1])]

    async def main() -> None:
        async with running_worker(
            DONE,
            DONE,
            scripts=(ONE_TOKEN, stuck, ONE_TOKEN),
            canary_interval_s=0.02,
            canary_timeout_s=0.02,
            stall_timeout_s=0.1,
            drain_timeout_s=0.01,
        ) as harness:
            async with asyncio.timeout(5):
                await harness.ok("pause")
                count = len(harness.engine.submitted)
                await asyncio.sleep(0.4)
                assert len(harness.engine.submitted) <= count + 1  # one may have been in flight
                assert not harness.running.done()
                await harness.ok("continue")
                await eventually(lambda: len(harness.engine.submitted) > count + 1)
                await eventually(harness.serves)

    run_bounded(main())


def test_an_engine_that_executes_a_command_is_not_probed() -> None:
    async def main() -> None:
        proceed = asyncio.Event()
        async with running_worker(
            proceed, DONE, canary_interval_s=0.01, canary_timeout_s=0.01, stall_timeout_s=0.05
        ) as harness:
            command = asyncio.create_task(harness.ok("weights/update", FROM_DISK))
            await eventually(lambda: bool(harness.engine.commands))
            await asyncio.sleep(0.02)
            count = len(harness.engine.submitted)
            await asyncio.sleep(0.2)
            assert len(harness.engine.submitted) == count
            proceed.set()
            await command
            await eventually(lambda: len(harness.engine.submitted) > count)

    run_bounded(main())


@pytest.mark.parametrize(
    ("problem", "error", "message"),
    [(asyncio.Event(), EngineStalled, "within 0.05 s"), (EngineDead("gone"), EngineDead, "gone")],
)
def test_an_engine_that_stalls_or_dies_during_a_command_ends_the_worker(
    problem: asyncio.Event | EngineDead, error: type[BatonError], message: str
) -> None:
    async def main() -> None:
        harness = WorkerHarness(
            ScriptedEngine(ONE_TOKEN, capabilities=EVERYTHING, control=[problem]), command_timeout_s=0.05
        )
        await harness.server.start()
        await harness.ready.wait()
        assert message in await harness.refused("pause", None, 503, error.code)
        with pytest.raises(error):
            await harness.running
        assert not harness.serves()
        await harness.server.aclose()

    run_bounded(main())


def test_commands_during_the_shutdown_are_refused() -> None:
    slow: Script = [TokenDelta([1]), 0.3, Finished(FinishReason.LENGTH)]

    async def main() -> None:
        async with running_worker(DONE, scripts=(ONE_TOKEN, slow)) as harness:
            call = asyncio.create_task(harness.call())
            await eventually(lambda: harness.worker.gate.in_flight == 1)
            harness.stop.set()
            await eventually(lambda: not harness.endpoint.registered)
            await harness.refused("pause", None, 503, "draining")
            assert await call
        assert harness.engine.commands == []

    run_bounded(main())


def test_a_command_that_ends_during_the_shutdown_does_not_register_the_worker() -> None:
    async def main() -> None:
        proceed = asyncio.Event()
        async with running_worker(DONE, proceed, DONE, drain_timeout_s=0.01) as harness:
            await harness.ok("pause")
            command = asyncio.create_task(harness.send("continue"))
            await eventually(lambda: len(harness.engine.commands) == 2)
            harness.stop.set()
            await harness.running
            proceed.set()
            await command
            assert not harness.serves()

    run_bounded(main())


def test_an_engine_that_is_held_is_not_held_again() -> None:
    expected: list[Command] = [Pause(mode="abort"), ReleaseMemory(tags=("weights",))]

    async def main() -> None:
        async with running_worker(*[DONE] * 4) as harness:
            await harness.ok("pause", {"mode": "abort"})
            await harness.ok("memory/release", {"tags": ["weights"]})
            assert harness.engine.commands == expected
            await harness.ok("weights/version", {"version": "v"})
            assert not any(isinstance(command, UpdateWeights) for command in harness.engine.commands)

    run_bounded(main())
