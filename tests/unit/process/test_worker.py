"""A whole worker in one process: start, serve, canary and watchdog, drain, and the error it ends with."""

import asyncio
import gc
import socket
from collections.abc import AsyncIterator
from contextlib import aclosing, asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest

from baton.config.settings import Settings
from baton.engines.echo import EchoEngine, EchoOptions
from baton.engines.registry import prepare_model
from baton.errors import (
    BatonError,
    ConfigError,
    Draining,
    EngineDead,
    EngineFailed,
    EngineStalled,
    InvalidRequest,
    Overloaded,
    PeerLost,
)
from baton.ports.engine import Capabilities, Engine, EngineInfo
from baton.process.worker import Worker
from baton.protocol.commands import Continue, Outcome, Pause
from baton.protocol.outputs import Finished, FinishReason, TokenDelta
from baton.testing import Script, ScriptedEngine, eventually, run_bounded
from baton.testing.memory_runtime import MemoryClient, MemoryEndpoint, MemoryRuntime

PATH = "baton.worker.generate"
ONE_TOKEN: Script = [TokenDelta([1]), Finished(FinishReason.LENGTH)]
PAUSED, CONTINUED = Outcome(message="paused", paused=True), Outcome(message="continued", paused=False)


class WorkerHarness:
    """A worker on the in-memory runtime."""

    def __init__(self, engine: Engine, **settings: Any) -> None:
        self.engine = engine
        self.runtime = MemoryRuntime()
        self.stop = asyncio.Event()
        self.ready = asyncio.Event()
        self.worker = Worker(msgspec.structs.replace(Settings(), **settings), engine, self.runtime)

    async def run(self) -> None:
        await self.worker.run(self.stop, self.ready.set)

    @property
    def endpoint(self) -> MemoryEndpoint:
        [endpoint] = self.runtime.endpoints[PATH]
        return endpoint

    async def client(self) -> MemoryClient:
        return await self.runtime.client(PATH)

    async def call(self, text: str = "hello", **options: Any) -> list[dict[str, Any]]:
        request: dict[str, Any] = {"token_ids": list(text.encode()), "stop_conditions": options}
        async with aclosing((await self.client()).call(request)) as replies:
            return [reply async for reply in replies]

    def metric(self, name: str) -> float:
        [line] = [line for line in self.worker.observed.render().splitlines() if line.startswith(name)]
        return float(line.split()[-1])


@asynccontextmanager
async def running_worker(engine: Engine, **settings: Any) -> AsyncIterator[WorkerHarness]:
    """Run a worker until the end of the block; it must end without an error."""
    harness = WorkerHarness(engine, **settings)
    running = asyncio.create_task(harness.run())
    await asyncio.wait([running, asyncio.create_task(harness.ready.wait())], return_when=asyncio.FIRST_COMPLETED)
    try:
        yield harness
    finally:
        harness.stop.set()
        await running


async def failure_of(harness: WorkerHarness) -> BatonError:
    """Run a worker until it fails, and return the error."""
    with pytest.raises(BatonError) as failure:
        await harness.run()
    assert not harness.worker.health().ready
    with pytest.raises(PeerLost):
        await harness.call()
    return failure.value


def tokens_of(replies: list[dict[str, Any]]) -> bytes:
    return bytes(token for reply in replies for token in reply["token_ids"])


def test_a_worker_serves_the_model_that_it_registers() -> None:
    async def body() -> None:
        async with running_worker(EchoEngine(EchoOptions(context=64, blocks=32, max_running=3))) as harness:
            assert harness.worker.health().ready
            card = harness.endpoint.card
            assert card is not None
            assert (card.name, card.model_input, card.context_length) == ("echo", "tokens", 64)
            assert (card.total_blocks, card.max_running, card.block_size) == (32, 3, 16)
            replies = await harness.call("hello")
            assert tokens_of(replies) == b"hello"
            assert replies[-1]["finish_reason"] == "eos"
            assert replies[-1]["completion_usage"]["total_tokens"] == 10
        assert not harness.worker.health().ready

    run_bounded(body())


def test_a_worker_with_text_input_serves_text() -> None:
    async def body() -> None:
        async with running_worker(EchoEngine(), model_input="text") as harness:
            assert harness.endpoint.card is not None
            assert harness.endpoint.card.model_input == "text"
            client = await harness.client()
            replies = [reply async for reply in client.call({"model": "echo", "prompt": "hello"})]
            assert replies[0]["object"] == "text_completion"

    run_bounded(body())


def test_a_bad_request_never_harms_a_worker() -> None:
    async def body() -> None:
        async with running_worker(EchoEngine(EchoOptions(context=64, faults=True))) as harness:
            for prompt in ([], [300], [1] * 64, "x", None):
                with pytest.raises(InvalidRequest):
                    await anext((await harness.client()).call({"token_ids": prompt}))
            with pytest.raises(InvalidRequest):
                await harness.call("[[refuse]]")
            with pytest.raises(EngineFailed):
                await harness.call("[[fail:3]]")
            assert tokens_of(await harness.call("fine")) == b"fine"

    run_bounded(body())


def test_more_requests_than_the_limit_are_refused() -> None:
    async def body() -> None:
        async with running_worker(EchoEngine(EchoOptions(pace_ms=5)), max_in_flight=1, drain_timeout_s=0.01) as harness:
            async with aclosing((await harness.client()).call({"token_ids": [1] * 1000})) as first:
                await anext(first)
                with pytest.raises(Overloaded):
                    await harness.call()
            await eventually(lambda: harness.worker.gate.in_flight == 0)
            assert tokens_of(await harness.call("ok")) == b"ok"

    run_bounded(body())


def test_a_client_that_disconnects_frees_every_block() -> None:
    async def body() -> None:
        async with running_worker(EchoEngine(EchoOptions(pace_ms=1))) as harness:
            async with aclosing((await harness.client()).call({"token_ids": [1] * 4000})) as replies:
                await anext(replies)
                await eventually(lambda: harness.metric('baton_engine_kv_blocks{dp_rank="0",use="used"}') > 0)
                assert harness.metric("baton_requests_in_flight") == 1
            await eventually(lambda: harness.metric('baton_engine_kv_blocks{dp_rank="0",use="used"}') == 0)
            await eventually(lambda: harness.metric("baton_requests_in_flight") == 0)

    run_bounded(body())


# Starting


def test_a_worker_is_registered_only_after_its_first_probe() -> None:
    async def body() -> None:
        computed = asyncio.Event()
        engine = ScriptedEngine([computed, TokenDelta([1]), Finished(FinishReason.LENGTH)])
        harness = WorkerHarness(engine)
        running = asyncio.create_task(harness.run())
        await eventually(lambda: len(engine.submitted) == 1)
        assert harness.endpoint.card is None
        assert not harness.ready.is_set()
        computed.set()
        await harness.ready.wait()
        assert harness.endpoint.card is not None
        harness.stop.set()
        await running

    run_bounded(body())


def test_a_worker_whose_first_probe_fails_is_never_registered() -> None:
    async def body() -> None:
        harness = WorkerHarness(ScriptedEngine([EngineFailed("broken")]))
        error = await failure_of(harness)
        assert isinstance(error, EngineDead)
        assert "broken" in error.message
        assert harness.endpoint.card is None
        assert not harness.ready.is_set()

    run_bounded(body())


def test_an_engine_that_dies_at_the_first_probe_is_reported_once(caplog: pytest.LogCaptureFixture) -> None:
    async def body() -> None:
        error = await failure_of(WorkerHarness(ScriptedEngine([EngineDead("out of memory")])))
        assert "out of memory" in error.message

    run_bounded(body())
    gc.collect()
    assert "never retrieved" not in caplog.text


@pytest.mark.parametrize("error", [ConfigError("no such model"), EngineDead("no memory")])
def test_an_engine_that_cannot_start_ends_the_worker_with_its_error(error: BatonError) -> None:
    async def body() -> None:
        harness = WorkerHarness(ScriptedEngine(start_error=error))
        with pytest.raises(type(error), match=error.message):
            await harness.run()
        assert not harness.ready.is_set()

    run_bounded(body())


class SlowEngine(ScriptedEngine):
    async def start(self) -> EngineInfo:
        await asyncio.sleep(3600)
        return await super().start()


def test_a_start_that_takes_too_long_ends_the_worker() -> None:
    async def body() -> None:
        harness = WorkerHarness(SlowEngine(), start_timeout_s=0.05)
        with pytest.raises(EngineDead, match="start took longer"):
            await harness.run()

    run_bounded(body())


def test_an_unknown_engine_is_refused_with_the_known_ones() -> None:
    with pytest.raises(ConfigError, match=r"'warp'.*echo"):
        prepare_model(msgspec.structs.replace(Settings(), engine="warp"))


@pytest.mark.parametrize("model", ["no/such/directory", "."])
def test_a_path_that_is_no_model_directory_is_refused(model: str, tmp_path: Path) -> None:
    path = str(tmp_path / model)
    with pytest.raises(ConfigError, match="model directory"):
        prepare_model(msgspec.structs.replace(Settings(), engine="echo", model=path))


# Draining


def test_running_requests_finish_when_the_worker_is_stopped() -> None:
    async def body() -> None:
        async with running_worker(EchoEngine(EchoOptions(pace_ms=5))) as harness:
            answer = asyncio.create_task(harness.call("a" * 60))
            await eventually(lambda: harness.worker.gate.in_flight == 1)
            harness.stop.set()
            await eventually(lambda: not harness.endpoint.registered)
            assert not harness.worker.health().ready
            with pytest.raises(PeerLost):
                await harness.call()
            assert tokens_of(await answer) == b"a" * 60

    run_bounded(body())


def test_requests_that_outlast_the_drain_get_a_retryable_error() -> None:
    async def body() -> None:
        async with running_worker(EchoEngine(EchoOptions(pace_ms=5)), drain_timeout_s=0.05) as harness:
            answer = asyncio.create_task(harness.call("a" * 10_000))
            await eventually(lambda: harness.worker.gate.in_flight == 1)
            harness.stop.set()
            with pytest.raises(Draining):
                await answer

    run_bounded(body())


def test_a_worker_sends_heartbeats_while_it_drains(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def body(supervisor: socket.socket) -> None:
        def beats() -> int:
            count = 0
            while True:
                try:
                    count += supervisor.recv(4096) == b"WATCHDOG=1"
                except BlockingIOError:
                    return count

        async with running_worker(EchoEngine(EchoOptions(pace_ms=5)), drain_timeout_s=0.5) as harness:
            answer = asyncio.create_task(harness.call("a" * 10_000))
            await eventually(lambda: harness.worker.gate.in_flight == 1)
            await asyncio.sleep(0.1)
            assert beats() > 0
            harness.stop.set()
            await eventually(lambda: not harness.endpoint.registered)
            beats()
            await asyncio.sleep(0.2)
            assert beats() > 0
            with pytest.raises(Draining):
                await answer

    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_NONBLOCK) as supervisor:
        supervisor.bind(str(tmp_path / "n.sock"))
        monkeypatch.setenv("NOTIFY_SOCKET", str(tmp_path / "n.sock"))
        monkeypatch.setenv("WATCHDOG_USEC", "40000")
        run_bounded(body(supervisor))


# Failing


def test_a_dead_engine_fails_its_requests_and_ends_the_worker() -> None:
    async def body() -> None:
        harness = WorkerHarness(EchoEngine(EchoOptions(pace_ms=5, faults=True)))
        ending = asyncio.create_task(failure_of(harness))
        await harness.ready.wait()
        other = asyncio.create_task(harness.call("a" * 10_000))
        await eventually(lambda: harness.worker.gate.in_flight == 1)
        with pytest.raises(EngineDead):
            await harness.call("[[die:2]]")
        with pytest.raises(EngineDead):
            await other
        assert isinstance(await ending, EngineDead)

    run_bounded(body())


def test_a_stalled_engine_fails_its_requests_with_a_retryable_error_and_ends_the_worker() -> None:
    async def body() -> None:
        harness = WorkerHarness(EchoEngine(EchoOptions(pace_ms=5, faults=True)), stall_timeout_s=0.2)
        ending = asyncio.create_task(failure_of(harness))
        await harness.ready.wait()
        other = asyncio.create_task(harness.call("a" * 10_000))
        await eventually(lambda: harness.worker.gate.in_flight == 1)
        for stuck in (asyncio.create_task(harness.call("[[stall:2]]")), other):
            with pytest.raises(EngineStalled) as failure:
                await stuck
            assert failure.value.retryable
        assert isinstance(await ending, EngineStalled)
        assert harness.worker.gate.in_flight == 0

    run_bounded(body())


def test_a_failing_canary_deregisters_the_worker_until_it_succeeds() -> None:
    async def body() -> None:
        engine = ScriptedEngine(ONE_TOKEN)
        async with running_worker(engine, canary_interval_s=0.01) as harness:
            await eventually(lambda: len(engine.submitted) > 3)
            assert harness.endpoint.registered
            engine.scripts = [[EngineFailed("failed")]]
            await eventually(lambda: not harness.endpoint.registered)
            assert not harness.worker.health().ready
            assert harness.metric("baton_healthy") == 0
            with pytest.raises(PeerLost):
                await harness.call()
            engine.scripts = [ONE_TOKEN]
            await eventually(lambda: harness.worker.health().ready)
            assert harness.endpoint.registered
            assert tokens_of(await harness.call()) == b"\x01"

    run_bounded(body())


def test_a_worker_whose_canary_never_recovers_ends() -> None:
    async def body() -> None:
        engine = ScriptedEngine(ONE_TOKEN)
        harness = WorkerHarness(engine, canary_interval_s=0.01, stall_timeout_s=0.1)
        ending = asyncio.create_task(failure_of(harness))
        await harness.ready.wait()
        engine.scripts = [[EngineFailed("failed")]]
        assert isinstance(await ending, EngineStalled)

    run_bounded(body())


def test_probes_are_not_refused_by_a_full_worker() -> None:
    async def body() -> None:
        async with running_worker(
            EchoEngine(EchoOptions(pace_ms=1)), max_in_flight=1, canary_interval_s=0.01, drain_timeout_s=0.01
        ) as harness:
            answer = asyncio.create_task(harness.call("a" * 200))
            await eventually(lambda: harness.worker.gate.in_flight == 1)
            await asyncio.sleep(0.1)
            assert harness.endpoint.registered
            assert tokens_of(await answer) == b"a" * 200

    run_bounded(body())


def test_a_stall_ends_the_drain() -> None:
    async def body() -> None:
        harness = WorkerHarness(EchoEngine(EchoOptions(faults=True)), stall_timeout_s=0.2, drain_timeout_s=3600.0)
        ending = asyncio.create_task(failure_of(harness))
        await harness.ready.wait()
        stuck = asyncio.create_task(harness.call("[[stall]]"))
        await eventually(lambda: harness.worker.gate.in_flight == 1)
        harness.stop.set()
        with pytest.raises(EngineStalled):
            await stuck
        assert isinstance(await ending, EngineStalled)

    run_bounded(body())


def test_a_worker_that_discovery_has_lost_registers_again_and_a_paused_one_does_not() -> None:
    async def body() -> None:
        can = Capabilities(pause_modes=frozenset({"keep"}))
        engine = ScriptedEngine(ONE_TOKEN, capabilities=can, control=[PAUSED, CONTINUED])
        harness = WorkerHarness(engine, canary_interval_s=0.05)
        running = asyncio.create_task(harness.run())
        await harness.ready.wait()
        controller = harness.worker.control()
        assert controller is not None
        assert (await controller.execute(Pause())).paused
        assert not harness.endpoint.is_registered
        await asyncio.sleep(0.3)
        assert not (await controller.execute(Continue())).paused
        await asyncio.sleep(0.3)
        assert not running.done()
        harness.endpoint.registered = False
        await eventually(lambda: harness.endpoint.registered)
        assert harness.worker.health().ready
        harness.stop.set()
        await running

    run_bounded(body())


def test_a_worker_that_cannot_register_again_finishes_its_requests_and_ends() -> None:
    async def body() -> None:
        more = asyncio.Event()
        harness = WorkerHarness(ScriptedEngine(ONE_TOKEN, [more, *ONE_TOKEN]), canary_interval_s=0.02)
        ending = asyncio.create_task(failure_of(harness))
        await harness.ready.wait()
        call = asyncio.create_task(harness.call("Hello"))
        await eventually(lambda: harness.worker.gate.in_flight == 1)
        harness.runtime.can_restore = False
        harness.endpoint.registered = False
        await eventually(lambda: harness.worker.health().state == "draining")
        assert not call.done()
        more.set()
        assert await call
        error = await ending
        assert isinstance(error, EngineDead)
        assert "discovery has lost this worker" in error.message

    run_bounded(body())
