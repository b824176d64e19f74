"""The system server: its replies before, while and after a worker serves."""

import asyncio
import re
import socket
import threading
from typing import Any

import msgspec
import pytest
from prometheus_client.parser import text_string_to_metric_families

from baton.control.http.host_check import is_own_host
from baton.control.http.server import SystemServer
from baton.errors import ConfigError, EngineFailed
from baton.ports.engine import EngineInfo
from baton.protocol.events import LoadSnapshot
from baton.protocol.outputs import TokenDelta
from baton.testing import ScriptedEngine, eventually, run_bounded
from baton.testing.fakes import SCRIPTED_INFO, Script
from tests.unit.control.worker_harness import DONE, EVERYTHING, ONE_TOKEN, WorkerHarness, running_worker


class SlowEngine(ScriptedEngine):
    """An engine that starts when `go` is set."""

    def __init__(self, *scripts: Script, **options: Any) -> None:
        super().__init__(*scripts, **options)
        self.go = asyncio.Event()

    async def start(self) -> EngineInfo:
        await self.go.wait()
        return await super().start()


class EngineWithMetrics(ScriptedEngine):
    """An engine with metrics of its own, or a failure to read them."""

    text = "# HELP steps_total Steps\n# TYPE steps_total counter\nsteps_total 3\nbaton_requests_in_flight 99\n"
    problem: Exception | None = None

    def metrics(self) -> str:
        assert threading.current_thread() is not threading.main_thread(), "it may read files"
        if self.problem is not None:
            raise self.problem
        return self.text


def test_the_server_replies_before_there_is_a_worker() -> None:
    async def body() -> None:
        harness = WorkerHarness(SlowEngine(ONE_TOKEN, capabilities=EVERYTHING))
        subject, harness.server.subject = harness.server.subject, None
        await harness.server.start()
        assert (await harness.http("GET", "/live")).status == 200
        health = await harness.http("GET", "/health")
        assert (health.status, health.body["state"], health.body["ready"]) == (503, "starting", False)
        assert (await harness.http("GET", "/metrics")).body == ""
        refused = await harness.send("pause")
        assert (refused.status, refused.body["error"]["code"]) == (503, "starting")
        harness.server.subject = subject
        harness.stop.set()
        await harness.running
        await harness.server.aclose()

    run_bounded(body())


def test_health_follows_the_worker_from_start_to_stop() -> None:
    slow: Script = [TokenDelta([1])]

    async def body() -> None:
        engine = SlowEngine(ONE_TOKEN, slow, capabilities=EVERYTHING, control=[DONE, DONE])
        harness = WorkerHarness(engine, drain_timeout_s=0.3)
        await harness.server.start()

        async def health() -> tuple[int, str]:
            reply = await harness.http("GET", "/health")
            assert (reply.body["engine"], reply.body["role"]) == ("echo", "aggregated")
            return reply.status, reply.body["state"]

        assert await health() == (503, "starting")
        assert "baton_healthy 0.0" in (await harness.http("GET", "/metrics")).body
        assert (await harness.send("status", method="GET")).status == 503
        engine.go.set()
        await harness.ready.wait()
        assert await health() == (200, "serving")
        assert (await harness.http("GET", "/health")).body["model"] == "scripted"
        await harness.ok("pause")
        assert await health() == (503, "paused")
        assert (await harness.http("GET", "/live")).status == 200
        await harness.ok("continue")
        assert await health() == (200, "serving")
        call = asyncio.create_task(harness.call())
        await eventually(lambda: harness.worker.gate.in_flight == 1)
        harness.stop.set()
        await eventually(lambda: not harness.endpoint.registered)
        reply = await harness.http("GET", "/health")
        assert (reply.status, reply.body["state"], reply.body["in_flight"]) == (503, "draining", 1)
        await asyncio.wait([call])
        await harness.running
        assert await health() == (503, "draining")
        assert (await harness.http("GET", "/live")).status == 200
        await harness.server.aclose()
        with pytest.raises(OSError):
            await harness.http("GET", "/live")

    run_bounded(body())


def test_a_worker_whose_canary_fails_is_unhealthy() -> None:
    async def body() -> None:
        async with running_worker(canary_interval_s=0.01) as harness:
            harness.engine.scripts = [[EngineFailed("failed")]]
            await eventually(lambda: not harness.serves())
            reply = await harness.http("GET", "/health")
            assert (reply.status, reply.body["state"]) == (503, "unhealthy")
            harness.engine.scripts = [ONE_TOKEN]
            await eventually(harness.serves)
            assert (await harness.http("GET", "/health")).status == 200

    run_bounded(body())


def test_an_address_that_cannot_be_used_is_a_config_error() -> None:
    async def body() -> None:
        with socket.create_server(("127.0.0.1", 0)) as other:
            port = other.getsockname()[1]
            with pytest.raises(ConfigError, match=rf"{port}.*--system-port"):
                await SystemServer("127.0.0.1", port).start()
        with pytest.raises(ConfigError, match="--system-host"):
            await SystemServer("192.0.2.1", 0).start()
        with pytest.raises(ConfigError, match="--system-host"):
            await SystemServer("no such host", 0).start()

    run_bounded(body())


def test_the_chosen_port_is_known_and_closing_is_idempotent() -> None:
    async def body() -> None:
        server = SystemServer("127.0.0.1", 0)
        await server.aclose()
        await server.start()
        assert server.port > 0
        assert server.url == f"http://127.0.0.1:{server.port}"
        await server.aclose()
        await server.aclose()

    run_bounded(body())


def test_a_command_that_hangs_does_not_block_the_close() -> None:
    async def body() -> None:
        harness = WorkerHarness(ScriptedEngine(ONE_TOKEN, capabilities=EVERYTHING, control=[asyncio.Event()]))
        await harness.server.start()
        await harness.ready.wait()
        command = asyncio.create_task(harness.send("cache/clear"))
        await eventually(lambda: bool(harness.engine.commands))
        async with asyncio.timeout(5):
            await harness.server.aclose()
        await asyncio.wait([command])
        harness.stop.set()
        await harness.running

    run_bounded(body())


@pytest.mark.parametrize(
    ("host", "status"),
    [("localhost", 200), ("localhost:80", 200), ("127.0.0.1", 200), ("[::1]:9", 200), ("127.9.9.9", 200),
     ("evil.example", 403), ("evil.example:80", 403), ("192.0.2.1", 403), ("localhost.evil.example", 403)],
)  # fmt: skip
def test_on_loopback_requests_that_name_another_host_are_refused(host: str, status: int) -> None:
    async def body() -> None:
        async with running_worker() as harness:
            for path in ("/live", "/metrics", "/control/status"):
                reply = await harness.http("GET", path, headers={"Host": host})
                assert reply.status == status
                assert status == 200 or reply.body["error"]["code"] == "forbidden"

    run_bounded(body())


def test_elsewhere_a_server_is_reached_by_any_name() -> None:
    assert is_own_host("worker-0.pods.example:9090", "10.0.0.1", "0.0.0.0")
    assert is_own_host("worker-0.pods.example:9090", "::", "::")
    assert is_own_host("mine:9090", "127.0.0.1", "mine")
    assert is_own_host("", "127.0.0.1", "127.0.0.1")


# Metrics


def metrics_harness(**settings: Any) -> tuple[WorkerHarness, EngineWithMetrics]:
    engine = EngineWithMetrics(ONE_TOKEN, capabilities=EVERYTHING)
    return WorkerHarness(engine, **settings), engine


async def families(harness: WorkerHarness) -> list[str]:
    reply = await harness.http("GET", "/metrics")
    assert reply.status == 200
    assert reply.headers["Content-Type"].startswith("text/plain; version=0.0.4")
    return [family.name for family in text_string_to_metric_families(reply.body)]


def test_metrics_are_those_of_worker_and_engine_without_duplicates() -> None:
    async def body() -> None:
        harness, _ = metrics_harness()
        await harness.server.start()
        await harness.ready.wait()
        names = await families(harness)
        assert {"baton_requests", "steps"} <= set(names)
        assert len(names) == len(set(names))
        assert not re.search(r" 99(\.0)?$", (await harness.http("GET", "/metrics")).body, re.MULTILINE)
        harness.stop.set()
        await harness.running
        await harness.server.aclose()

    run_bounded(body())


def test_a_failure_of_the_engines_metrics_leaves_the_others() -> None:
    async def body() -> None:
        harness, engine = metrics_harness()
        engine.problem = OSError("no file")
        await harness.server.start()
        await harness.ready.wait()
        assert "baton_requests" in await families(harness)
        engine.problem = None
        assert "steps" in await families(harness)
        harness.stop.set()
        await harness.running
        await harness.server.aclose()

    run_bounded(body())


# Followers


def test_a_follower_is_healthy_and_not_in_discovery() -> None:
    info: EngineInfo = msgspec.structs.replace(SCRIPTED_INFO, leader=False)

    async def body() -> None:
        engine = ScriptedEngine(ONE_TOKEN, capabilities=EVERYTHING, info=info)
        engine.readings_to_give = [LoadSnapshot(2, 1, 5, 10)]
        harness = WorkerHarness(engine)
        await harness.server.start()
        await harness.ready.wait()
        assert harness.runtime.endpoints == {}
        assert engine.submitted == []
        health = await harness.http("GET", "/health")
        assert (health.status, health.body["state"]) == (200, "serving")
        assert (await harness.http("GET", "/live")).status == 200
        await asyncio.sleep(0.01)
        assert 'baton_engine_running_requests{dp_rank="0"} 2.0' in (await harness.http("GET", "/metrics")).body
        assert "leader" in await harness.refused("pause", None, 501, "unsupported")
        harness.stop.set()
        await harness.running
        assert (await harness.http("GET", "/health")).status == 503
        await harness.server.aclose()

    run_bounded(body())
