"""Control routes over a whole worker in one process: bodies, replies, discovery, and who is excused meanwhile."""

import asyncio
import base64
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

import msgspec
import pytest

from baton.config import Settings
from baton.errors import BatonError, EngineDead, EngineFailed, EngineStalled, InvalidRequest, PeerLost
from baton.ports.engine import Capabilities
from baton.protocol.control import FromTensors, Outcome, Pause, ReleaseMemory, UpdateWeights
from baton.protocol.outputs import Finished, FinishReason, TokenDelta
from baton.runtimes.memory import MemoryEndpoint, MemoryRuntime
from baton.testing import ScriptedEngine, eventually, run_bounded
from baton.testing.fakes import ControlStep, Script
from baton.worker import Worker

PATH = "baton.worker.generate"
WELL: Script = [TokenDelta([1]), Finished(FinishReason.LENGTH)]
EVERYTHING = Capabilities(
    memory_tags=frozenset({"kv_cache", "weights"}),
    weight_sources=frozenset({"disk", "tensors", "shared_memory", "group"}),
    pause_modes=frozenset({"abort", "retract", "keep"}),
    clear_cache=True,
    profile=True,
)
DONE = Outcome(message="done")
FROM_DISK = {"source": {"type": "disk", "path": "/m"}, "version": "2"}
OUTSIDE = {"type": "shared_memory", "segment": "../x", "tensors": []}
JOIN = {"group": "g", "host": "127.0.0.1", "port": 1234, "rank": 1, "size": 2}


class House:
    """A worker that runs, and its operator."""

    def __init__(self, engine: ScriptedEngine, **settings: Any) -> None:
        self.engine = engine
        self.runtime = MemoryRuntime()
        self.stop = asyncio.Event()
        self.ready = asyncio.Event()
        self.worker = Worker(msgspec.structs.replace(Settings(), **settings), engine, self.runtime)
        self.running: asyncio.Task[None] = asyncio.create_task(self.worker.run(self.stop, self.ready.set))

    @property
    def endpoint(self) -> MemoryEndpoint:
        [endpoint] = self.runtime.endpoints[PATH]
        return endpoint

    async def order(self, name: str, body: Any = None) -> dict[str, Any]:
        return await self.runtime.routes[f"control/{name}"]({} if body is None else body)

    async def ok(self, name: str, body: Any = None) -> dict[str, Any]:
        reply = await self.order(name, body)
        assert reply["status"] == "ok", reply
        return reply

    async def refused(self, name: str, body: Any = None, code: str = "invalid_request") -> str:
        reply = await self.order(name, body)
        assert (reply["status"], reply["code"]) == ("error", code), reply
        return str(reply["message"])

    async def call(self) -> list[Any]:
        client = await self.runtime.client(PATH)
        return [reply async for reply in client.call({"token_ids": [1]})]

    def serves(self) -> bool:
        return self.endpoint.listed and self.runtime.is_ready


@asynccontextmanager
async def living(
    *control: ControlStep, can: Capabilities = EVERYTHING, scripts: Sequence[Script] = (WELL,), **settings: Any
) -> AsyncIterator[House]:
    """Run a worker until the end of the block, and see that it ends well."""
    house = House(ScriptedEngine(*scripts, capabilities=can, control=control), **settings)
    await asyncio.wait([house.running, asyncio.create_task(house.ready.wait())], return_when=asyncio.FIRST_COMPLETED)
    try:
        yield house
    finally:
        house.stop.set()
        await house.running


@pytest.mark.parametrize(
    ("name", "body"),
    [
        ("clear_cache", {}),
        ("start_profile", {"directory": "/tmp/p", "steps": 3}),
        ("stop_profile", {}),
        ("update_weights", FROM_DISK),
        ("join_group", JOIN),
        ("leave_group", {"group": "g"}),
    ],
)
def test_most_orders_leave_the_worker_in_discovery(name: str, body: dict[str, Any]) -> None:
    async def main() -> None:
        at_it = asyncio.Event()
        async with living(at_it, DONE) as house:
            order = asyncio.create_task(house.ok(name, body))
            await eventually(lambda: len(house.engine.verbs) == 1)
            assert house.serves()
            at_it.set()
            assert (await order)["message"] == "done"
            assert house.serves()

    run_bounded(main())


@pytest.mark.parametrize(
    ("name", "body", "end"),
    [
        ("pause", {"mode": "retract"}, ("continue", {})),
        ("release_memory", {"tags": ["kv_cache"]}, ("resume_memory", {"tags": ["kv_cache"]})),
    ],
)
def test_a_worker_is_out_of_discovery_before_its_engine_goes_quiet_and_back_after_it_works(
    name: str, body: dict[str, Any], end: tuple[str, dict[str, Any]]
) -> None:
    async def main() -> None:
        going, coming = asyncio.Event(), asyncio.Event()
        async with living(going, DONE, coming, DONE) as house:
            order = asyncio.create_task(house.ok(name, body))
            await eventually(lambda: len(house.engine.verbs) == 1)
            assert not house.serves()
            going.set()
            await order
            with pytest.raises(PeerLost):
                await house.call()
            order = asyncio.create_task(house.ok(*end))
            await eventually(lambda: len(house.engine.verbs) == 2)
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
            house.endpoint.listed = True  # a frontend that has not heard of it yet
            with pytest.raises(BatonError) as refusal:
                await house.call()
            assert (refusal.value.code, refusal.value.retryable) == ("paused", True)

    run_bounded(main())


def test_a_worker_comes_back_only_when_all_is_resumed_and_nothing_is_paused() -> None:
    async def main() -> None:
        async with living(*[DONE] * 6) as house:
            await house.ok("release_memory", {"tags": ["kv_cache", "weights"]})
            await house.ok("pause")
            assert (await house.order("status"))["released"] == ["kv_cache", "weights"]
            await house.ok("resume_memory", {"tags": ["weights"]})
            assert not house.serves()
            assert (await house.order("status"))["released"] == ["kv_cache"]
            await house.ok("continue")
            assert not house.serves()
            await house.ok("resume_memory", {"tags": ["kv_cache"]})
            assert house.serves()

    run_bounded(main())


@pytest.mark.parametrize("problem", [EngineFailed("disk full"), InvalidRequest("no"), ValueError("a bug")])
def test_a_failed_order_leaves_the_worker_as_it_was(problem: Exception) -> None:
    async def main() -> None:
        async with living(problem, problem, DONE, problem) as house:
            for name, body in (("release_memory", {"tags": ["weights"]}), ("pause", {})):
                code = "invalid_request" if isinstance(problem, InvalidRequest) else "engine_failed"
                await house.refused(name, body, code)
                assert house.serves()
            await house.ok("pause")
            await house.refused("continue", code=code)
            assert not house.serves()
            status = await house.order("status")
            assert (status["paused"], status["released"]) == (True, [])

    run_bounded(main())


def test_what_the_engine_says_goes_before_what_was_asked() -> None:
    async def main() -> None:
        partly = Outcome(message="only one", released=("weights",), paused=False)
        async with living(partly) as house:
            await house.ok("release_memory", {"tags": ["kv_cache", "weights"]})
            assert (await house.order("status"))["released"] == ["weights"]

    run_bounded(main())


def test_orders_are_carried_out_one_at_a_time_and_status_answers_meanwhile() -> None:
    async def main() -> None:
        first = asyncio.Event()
        async with living(first, DONE, Outcome(message="second")) as house:
            orders = [asyncio.create_task(house.ok("update_weights", FROM_DISK))]
            await eventually(lambda: len(house.engine.verbs) == 1)
            orders.append(asyncio.create_task(house.ok("clear_cache")))
            await asyncio.sleep(0.02)
            assert len(house.engine.verbs) == 1
            assert (await house.ok("status"))["doing"] == "update_weights"
            first.set()
            assert [reply["message"] for reply in await asyncio.gather(*orders)] == ["done", "second"]
            status = await house.ok("status")
            assert (status["doing"], status["weight_version"]) == (None, "2")

    run_bounded(main())


def test_status_tells_everything_at_rest() -> None:
    async def main() -> None:
        async with living() as house:
            status = await house.ok("status")
            assert (status["weight_version"], status["paused"], status["released"]) == ("initial", False, [])
            assert (status["listed"], status["in_flight"], status["doing"]) == (True, 0, None)
            assert status["capabilities"]["memory_tags"] == ["kv_cache", "weights"]
            assert msgspec.json.encode(status)

    run_bounded(main())


@pytest.mark.parametrize(
    ("name", "body", "complaint"),
    [
        ("release_memory", {}, "tags"),
        ("release_memory", {"tags": []}, "tags"),
        ("release_memory", {"tags": "weights"}, "$.tags"),
        ("release_memory", {"tags": ["weights"], "tag": "x"}, "tag"),
        ("pause", {"mode": "gently"}, "$.mode"),
        ("pause", [], "object"),
        ("continue", {"mode": "keep"}, "mode"),
        ("start_profile", {"directory": "/p", "steps": 0}, "$.steps"),
        ("start_profile", {"directory": "/p", "steps": "3"}, "$.steps"),
        ("update_weights", {"source": {"type": "disk", "path": "/m"}}, "version"),
        ("update_weights", {"source": {"type": "url", "path": "/m"}, "version": "1"}, "$.source.type"),
        ("update_weights", {"source": {"path": "/m"}, "version": "1"}, "$.source"),
        ("update_weights", {"source": OUTSIDE, "version": "1"}, "$.source.segment"),
        ("join_group", {**JOIN, "rank": 0}, "$.rank"),
        ("join_group", {**JOIN, "timeout_s": 0}, "$.timeout_s"),
        ("leave_group", {"group": 3}, "$.group"),
    ],
)  # fmt: skip
def test_a_bad_body_is_refused_by_the_name_of_the_field(name: str, body: Any, complaint: str) -> None:
    async def main() -> None:
        async with living() as house:
            message = await house.refused(name, body)
            assert message.startswith(name)
            assert complaint in message
            assert not house.engine.verbs
            assert house.serves()

    run_bounded(main())


def test_bytes_come_as_base64() -> None:
    tensor = {"name": "a", "dtype": "float32", "shape": [1], "data": base64.b64encode(b"\0\0\x80?").decode()}
    body = {"source": {"type": "tensors", "tensors": [tensor]}, "version": "1"}

    async def main() -> None:
        async with living(DONE) as house:
            await house.ok("update_weights", body)
            [verb] = house.engine.verbs
            assert isinstance(verb, UpdateWeights)
            assert isinstance(verb.source, FromTensors)
            assert verb.source.tensors[0].data == b"\0\0\x80?"
            tensor["data"] = "%"
            assert "tensors[0].data" in await house.refused("update_weights", body)

    run_bounded(main())


@pytest.mark.parametrize(
    ("name", "body"),
    [
        ("release_memory", {"tags": ["weights"]}),
        ("resume_memory", {"tags": ["weights"]}),
        ("pause", {}),
        ("continue", {}),
        ("clear_cache", {}),
        ("start_profile", {"directory": "/p"}),
        ("stop_profile", {}),
        ("update_weights", FROM_DISK),
        ("join_group", JOIN),
        ("leave_group", {"group": "g"}),
    ],
)
def test_an_engine_is_asked_for_nothing_that_it_does_not_list(name: str, body: dict[str, Any]) -> None:
    async def main() -> None:
        async with living(can=Capabilities()) as house:
            await house.refused(name, body, "unsupported")
            assert not house.engine.verbs
            assert house.serves()

    run_bounded(main())


def test_a_tag_a_mode_and_a_source_that_are_not_listed_are_named() -> None:
    can = Capabilities(
        memory_tags=frozenset({"weights"}), pause_modes=frozenset({"keep"}), weight_sources=frozenset({"tensors"})
    )

    async def main() -> None:
        async with living(can=can) as house:
            message = await house.refused("release_memory", {"tags": ["weights", "kv_cache"]}, "unsupported")
            assert message == "tags: 'kv_cache' is no memory that can be released of this engine; it has weights"
            assert "keep" in await house.refused("pause", {"mode": "abort"}, "unsupported")
            assert "tensors" in await house.refused("update_weights", FROM_DISK, "unsupported")

    run_bounded(main())


def test_an_idle_worker_is_neither_probed_nor_thought_stuck() -> None:
    stuck: Script = [TokenDelta([1])]

    async def main() -> None:
        async with living(
            DONE, DONE, scripts=(WELL, stuck, WELL), canary_s=0.02, canary_timeout_s=0.02, stall_s=0.1, drain_s=0.01
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
        async with living(order, DONE, canary_s=0.01, canary_timeout_s=0.01, stall_s=0.05) as house:
            doing = asyncio.create_task(house.ok("update_weights", FROM_DISK))
            await eventually(lambda: bool(house.engine.verbs))
            await asyncio.sleep(0.02)
            count = len(house.engine.submitted)
            await asyncio.sleep(0.2)
            assert len(house.engine.submitted) == count
            order.set()
            await doing
            await eventually(lambda: len(house.engine.submitted) > count)

    run_bounded(main())


def test_an_engine_that_does_not_obey_in_time_is_stuck_and_the_worker_ends() -> None:
    async def main() -> None:
        house = House(ScriptedEngine(WELL, capabilities=EVERYTHING, control=[asyncio.Event()]), control_s=0.05)
        await house.ready.wait()
        assert "within 0.05 s" in await house.refused("release_memory", {"tags": ["weights"]}, "engine_stalled")
        with pytest.raises(EngineStalled):
            await house.running
        assert not house.serves()

    run_bounded(main())


def test_an_engine_that_dies_at_an_order_ends_the_worker() -> None:
    async def main() -> None:
        house = House(ScriptedEngine(WELL, capabilities=EVERYTHING, control=[EngineDead("gone")]))
        await house.ready.wait()
        await house.refused("pause", code="engine_dead")
        with pytest.raises(EngineDead):
            await house.running
        assert not house.serves()

    run_bounded(main())


def test_orders_during_the_shutdown_are_refused() -> None:
    slow: Script = [TokenDelta([1]), 0.3, Finished(FinishReason.LENGTH)]

    async def main() -> None:
        async with living(DONE, scripts=(WELL, slow)) as house:
            call = asyncio.create_task(house.call())
            await eventually(lambda: house.worker.gate.in_flight == 1)
            house.stop.set()
            await eventually(lambda: not house.endpoint.listed)
            await house.refused("pause", code="draining")
            assert await call
        assert house.engine.verbs == []

    run_bounded(main())


def test_an_order_that_ends_during_the_shutdown_does_not_bring_the_worker_back() -> None:
    async def main() -> None:
        last = asyncio.Event()
        async with living(DONE, last, DONE, drain_s=0.01) as house:
            await house.ok("pause")
            order = asyncio.create_task(house.order("continue"))
            await eventually(lambda: len(house.engine.verbs) == 2)
            house.stop.set()
            await house.running
            last.set()
            await order
            assert not house.serves()

    run_bounded(main())


@pytest.mark.parametrize(
    ("settings", "open_to"),
    [({}, True), ({"system_host": "0.0.0.0"}, False), ({"system_host": "0.0.0.0", "control": "on"}, True),
     ({"control": "off"}, False), ({"system_host": "::1"}, True)],
)  # fmt: skip
def test_orders_are_taken_from_this_machine_only_unless_told_otherwise(settings: dict[str, Any], open_to: bool) -> None:
    async def main() -> None:
        async with living(**settings) as house:
            assert ("control/pause" in house.runtime.routes) is open_to
            assert "live" in house.runtime.routes

    run_bounded(main())


def test_verbs_reach_the_engine_as_they_were_asked_for() -> None:
    async def main() -> None:
        async with living(DONE, DONE) as house:
            await house.ok("pause", {"mode": "abort"})
            await house.ok("release_memory", {"tags": ["weights"]})
            assert house.engine.verbs == [Pause(mode="abort"), ReleaseMemory(tags=("weights",))]

    run_bounded(main())
