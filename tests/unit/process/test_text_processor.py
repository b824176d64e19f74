"""A process worker on a runtime without sockets: when it is found, how it is, how it leaves."""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import msgspec
import pytest

from baton.config.settings import Settings
from baton.engines.echo.engine import MODEL_DIR
from baton.errors import Cancelled, ConfigError, Draining, EngineDead, PeerLost
from baton.ports.runtime import Context, ModelCard, Wire
from baton.process.text_processor import TextProcessor
from baton.testing import eventually, run_bounded
from baton.testing.memory_runtime import MemoryEndpoint, MemoryRuntime

LANGUAGE = ModelCard(
    name="echo", directory="", context_length=77, block_size=8, total_blocks=1, max_running=1, worker_type="decode"
)
BODY: Wire = {"model": "echo", "prompt": "hello", "max_tokens": 3}


class LanguageWorkers:
    """A ModelClient whose workers answer "a", while there are any."""

    def __init__(self) -> None:
        self.found = asyncio.Event()
        self.answers = True
        self.held = asyncio.Event()
        self.held.set()
        self.closed = self.cancelled = False

    async def start(self) -> None: ...

    async def ready(self, timeout_s: float) -> ModelCard:
        try:
            await asyncio.wait_for(self.found.wait(), timeout_s)
        except TimeoutError:
            raise PeerLost("no language worker") from None
        return LANGUAGE

    async def call(self, request: Wire, parent: Context) -> AsyncGenerator[Wire, None]:
        if not self.answers:
            raise PeerLost("no language worker")
        usage = {"prompt_tokens": 5, "completion_tokens": 1}
        yield {"token_ids": [97], "completion_usage": usage}
        parent.on_cancel(self._cancel)
        await self.held.wait()
        if self.cancelled:
            raise Cancelled("the caller disconnected")
        yield {"token_ids": [], "finish_reason": "length"}

    def _cancel(self) -> None:
        self.cancelled = True
        self.held.set()

    def close(self) -> None:
        self.closed = True


class Stage:
    """A process worker, and language workers that appear when told to."""

    def __init__(self, **settings: Any) -> None:
        self.runtime = MemoryRuntime()
        self.workers = LanguageWorkers()
        base = Settings(role="process", model=str(MODEL_DIR), name="echo", drain_timeout_s=0.2, canary_interval_s=0.02)
        self.processor = TextProcessor(msgspec.structs.replace(base, **settings), self.runtime, self.workers)
        self.stop = asyncio.Event()
        self.ready = asyncio.Event()

    @property
    def endpoint(self) -> MemoryEndpoint:
        (endpoint,) = self.runtime.endpoints["baton.process.generate"]
        return endpoint

    async def ask(self) -> list[Wire]:
        client = await self.runtime.client("baton.process.generate")
        return [reply async for reply in client.call(BODY)]

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        task = asyncio.create_task(self.processor.run(self.stop, self.ready.set))
        try:
            self.workers.found.set()
            await asyncio.wait_for(self.ready.wait(), 10)
            yield
        finally:
            self.stop.set()
            await task


def test_it_is_found_when_there_are_language_workers_and_not_before() -> None:
    async def body() -> None:
        stage = Stage()
        task = asyncio.create_task(stage.processor.run(stage.stop, stage.ready.set))
        await asyncio.sleep(0.05)
        assert stage.processor.health().state == "starting"
        assert "baton.process.generate" not in stage.runtime.endpoints
        stage.workers.found.set()
        await stage.ready.wait()
        card = stage.endpoint.card
        assert card is not None
        assert (card.name, card.model_input, card.worker_type) == ("echo", "text", "aggregated")
        assert card.surfaces == {"chat", "completions"}
        assert (card.context_length, card.router) == (77, "round-robin")
        health = stage.processor.health()
        assert (health.state, health.role, health.ready) == ("serving", "process", True)
        stage.stop.set()
        await task
        assert stage.workers.closed

    run_bounded(body())


def test_without_language_workers_it_gives_up_in_time() -> None:
    async def body() -> None:
        stage = Stage(start_timeout_s=0.1)
        with pytest.raises(EngineDead, match="no language worker"):
            await stage.processor.run(stage.stop, stage.ready.set)

    run_bounded(body())


def test_requests_are_answered_and_counted() -> None:
    async def body() -> None:
        stage = Stage()
        async with stage.running():
            text, _, usage = await stage.ask()
            assert text["choices"][0]["text"] == "a"  # type: ignore[index]
            assert usage["usage"]["prompt_tokens"] == 5  # type: ignore[index]
            assert 'baton_requests_total{role="process",state="completed"} 1.0' in await stage.processor.metrics()

    run_bounded(body())


def test_it_leaves_discovery_while_no_language_worker_answers() -> None:
    async def body() -> None:
        stage = Stage()
        async with stage.running():
            stage.workers.answers = False
            await eventually(lambda: not stage.endpoint.registered)
            assert stage.processor.health().state == "unhealthy"
            stage.workers.answers = True
            await eventually(lambda: stage.endpoint.registered)
            await eventually(lambda: stage.processor.health().state == "serving")

    run_bounded(body())


def test_a_request_that_outlasts_the_drain_is_told_so_and_its_call_is_cancelled() -> None:
    async def body() -> None:
        stage = Stage()
        async with stage.running():
            stage.workers.held.clear()
            asking = asyncio.create_task(stage.ask())
            await eventually(lambda: stage.processor.gate.in_flight == 1)
            stage.stop.set()
            with pytest.raises(Draining, match="shutting down"):
                await asking
        assert stage.workers.cancelled
        assert not stage.endpoint.registered

    run_bounded(body())


def test_requests_cannot_name_the_language_worker() -> None:
    async def body() -> None:
        with pytest.raises(ConfigError, match="drop --router direct"):
            Stage(router="direct")

    run_bounded(body())
