"""The system server: what it answers before, while and after a worker serves."""

import asyncio
import socket
import threading
from typing import Any

import msgspec
import pytest
from prometheus_client.parser import text_string_to_metric_families

from baton.control.http.server import SystemServer
from baton.errors import ConfigError, EngineFailed
from baton.ports.engine import EngineInfo
from baton.protocol.events import LoadSnapshot
from baton.protocol.outputs import TokenDelta
from baton.testing import ScriptedEngine, eventually, run_bounded
from baton.testing.fakes import SCRIPTED_INFO, Script
from tests.unit.control.operated import DONE, EVERYTHING, WELL, House, living


class SlowEngine(ScriptedEngine):
    """One that starts when it is told to."""

    def __init__(self, *scripts: Script, **options: Any) -> None:
        super().__init__(*scripts, **options)
        self.go = asyncio.Event()

    async def start(self) -> EngineInfo:
        await self.go.wait()
        return await super().start()


class TalkativeEngine(ScriptedEngine):
    """One with metrics of its own, or trouble with them."""

    text = "# HELP steps_total Steps\n# TYPE steps_total counter\nsteps_total 3\nbaton_in_flight 99\n"
    problem: Exception | None = None

    def metrics(self) -> str:
        assert threading.current_thread() is not threading.main_thread(), "it may read files"
        if self.problem is not None:
            raise self.problem
        return self.text


def test_a_server_lives_before_there_is_a_worker() -> None:
    async def body() -> None:
        house = House(SlowEngine(WELL, capabilities=EVERYTHING))
        subject, house.server.subject = house.server.subject, None
        await house.server.start()
        assert (await house.http("GET", "/live")).status == 200
        health = await house.http("GET", "/health")
        assert (health.status, health.body["state"], health.body["ready"]) == (503, "starting", False)
        assert (await house.http("GET", "/metrics")).body == ""
        refused = await house.order("pause")
        assert (refused.status, refused.body["error"]["code"]) == (503, "starting")
        house.server.subject = subject
        house.stop.set()
        await house.running
        await house.server.aclose()

    run_bounded(body())


def test_health_follows_the_worker_from_start_to_stop() -> None:
    slow: Script = [TokenDelta([1])]

    async def body() -> None:
        engine = SlowEngine(WELL, slow, capabilities=EVERYTHING, control=[DONE, DONE])
        house = House(engine, drain_timeout_s=0.3)
        await house.server.start()

        async def health() -> tuple[int, str]:
            reply = await house.http("GET", "/health")
            assert (reply.body["engine"], reply.body["role"]) == ("echo", "aggregated")
            return reply.status, reply.body["state"]

        assert await health() == (503, "starting")
        assert "baton_healthy 0.0" in (await house.http("GET", "/metrics")).body
        assert (await house.order("status", method="GET")).status == 503
        engine.go.set()
        await house.ready.wait()
        assert await health() == (200, "serving")
        assert (await house.http("GET", "/health")).body["model"] == "scripted"
        await house.ok("pause")
        assert await health() == (503, "paused")
        assert (await house.http("GET", "/live")).status == 200
        await house.ok("continue")
        assert await health() == (200, "serving")
        call = asyncio.create_task(house.call())
        await eventually(lambda: house.worker.gate.in_flight == 1)
        house.stop.set()
        await eventually(lambda: not house.endpoint.registered)
        reply = await house.http("GET", "/health")
        assert (reply.status, reply.body["state"], reply.body["in_flight"]) == (503, "draining", 1)
        await asyncio.wait([call])
        await house.running
        assert await health() == (503, "draining")
        assert (await house.http("GET", "/live")).status == 200
        await house.server.aclose()
        with pytest.raises(OSError):
            await house.http("GET", "/live")

    run_bounded(body())


def test_a_worker_whose_canary_fails_is_ill() -> None:
    async def body() -> None:
        async with living(canary_interval_s=0.01) as house:
            house.engine.scripts = [[EngineFailed("failed")]]
            await eventually(lambda: not house.serves())
            reply = await house.http("GET", "/health")
            assert (reply.status, reply.body["state"]) == (503, "unhealthy")
            house.engine.scripts = [WELL]
            await eventually(house.serves)
            assert (await house.http("GET", "/health")).status == 200

    run_bounded(body())


def test_a_taken_port_is_a_mistake_of_who_chose_it() -> None:
    async def body() -> None:
        with socket.create_server(("127.0.0.1", 0)) as other:
            port = other.getsockname()[1]
            with pytest.raises(ConfigError, match=rf"{port}.*--system-port"):
                await SystemServer("127.0.0.1", port, accepts_commands=False).start()
        with pytest.raises(ConfigError, match="--system-host"):
            await SystemServer("192.0.2.1", 0, accepts_commands=False).start()
        with pytest.raises(ConfigError, match="--system-host"):
            await SystemServer("no such host", 0, accepts_commands=False).start()

    run_bounded(body())


def test_any_free_port_is_told_and_closing_may_be_repeated() -> None:
    async def body() -> None:
        server = SystemServer("127.0.0.1", 0, accepts_commands=False)
        await server.aclose()
        await server.start()
        assert server.port > 0
        assert server.url == f"http://127.0.0.1:{server.port}"
        await server.aclose()
        await server.aclose()

    run_bounded(body())


def test_a_call_that_hangs_does_not_hold_up_the_end() -> None:
    async def body() -> None:
        house = House(ScriptedEngine(WELL, capabilities=EVERYTHING, control=[asyncio.Event()]))
        await house.server.start()
        await house.ready.wait()
        order = asyncio.create_task(house.order("cache/clear"))
        await eventually(lambda: bool(house.engine.verbs))
        async with asyncio.timeout(5):
            await house.server.aclose()
        await asyncio.wait([order])
        house.stop.set()
        await house.running

    run_bounded(body())


# Metrics


def metrics_house(**settings: Any) -> tuple[House, TalkativeEngine]:
    engine = TalkativeEngine(WELL, capabilities=EVERYTHING)
    return House(engine, **settings), engine


async def families(house: House) -> list[str]:
    reply = await house.http("GET", "/metrics")
    assert reply.status == 200
    assert reply.headers["Content-Type"].startswith("text/plain; version=0.0.4")
    return [family.name for family in text_string_to_metric_families(reply.body)]


def test_metrics_are_those_of_worker_and_engine_and_no_name_comes_twice() -> None:
    async def body() -> None:
        house, _ = metrics_house()
        await house.server.start()
        await house.ready.wait()
        names = await families(house)
        assert {"baton_requests", "steps"} <= set(names)
        assert len(names) == len(set(names))
        assert "99" not in (await house.http("GET", "/metrics")).body
        house.stop.set()
        await house.running
        await house.server.aclose()

    run_bounded(body())


def test_an_engine_that_cannot_tell_its_metrics_costs_only_those() -> None:
    async def body() -> None:
        house, engine = metrics_house()
        engine.problem = OSError("no file")
        await house.server.start()
        await house.ready.wait()
        assert "baton_requests" in await families(house)
        engine.problem = None
        assert "steps" in await families(house)
        house.stop.set()
        await house.running
        await house.server.aclose()

    run_bounded(body())


# A node that follows


def test_a_node_that_is_not_the_leader_lives_and_reads_and_is_found_by_nobody() -> None:
    info: EngineInfo = msgspec.structs.replace(SCRIPTED_INFO, leader=False)

    async def body() -> None:
        engine = ScriptedEngine(WELL, capabilities=EVERYTHING, info=info)
        engine.readings_to_give = [LoadSnapshot(2, 1, 5, 10)]
        house = House(engine)
        await house.server.start()
        await house.ready.wait()
        assert house.runtime.endpoints == {}
        assert engine.submitted == []
        health = await house.http("GET", "/health")
        assert (health.status, health.body["state"]) == (200, "serving")
        assert (await house.http("GET", "/live")).status == 200
        await asyncio.sleep(0.01)
        assert "baton_engine_running 2.0" in (await house.http("GET", "/metrics")).body
        assert "leader" in await house.refused("pause", None, 501, "unsupported")
        house.stop.set()
        await house.running
        assert (await house.http("GET", "/health")).status == 503
        await house.server.aclose()

    run_bounded(body())
