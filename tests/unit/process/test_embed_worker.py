"""A worker whose engine embeds: it takes its role by itself, announces it, and probes itself in it."""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import aclosing, asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest

from baton.config.settings import Settings
from baton.engines.echo import EchoEngine
from baton.engines.registry import build_engine, embeds, prepare_model
from baton.errors import ConfigError, EngineFailed, InvalidRequest
from baton.process.worker import Worker
from baton.testing import eventually, run_bounded
from baton.testing.memory_runtime import MemoryEndpoint, MemoryRuntime
from tests.unit.handlers.embed_fakes import INFO, VOCABULARY, CountingEngine, write_layout, write_tokenizer

PATH = "baton.worker.generate"


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    config = {"model_type": "bert", "vocab_size": len(VOCABULARY), "max_position_embeddings": 40}
    (tmp_path / "config.json").write_text(json.dumps(config))
    write_tokenizer(tmp_path)
    write_layout(tmp_path, "mean_tokens")
    return tmp_path


class Embedder(CountingEngine):
    def __init__(self, directory: Path) -> None:
        super().__init__(info=msgspec.structs.replace(INFO, model_dir=str(directory)))


@asynccontextmanager
async def running_worker(engine: CountingEngine, **settings: Any) -> AsyncIterator[tuple[Worker, MemoryRuntime]]:
    runtime, stop, ready = MemoryRuntime(), asyncio.Event(), asyncio.Event()
    worker = Worker(msgspec.structs.replace(Settings(), **settings), engine, runtime)
    running = asyncio.create_task(worker.run(stop, ready.set))
    await asyncio.wait([running, asyncio.create_task(ready.wait())], return_when=asyncio.FIRST_COMPLETED)
    try:
        yield worker, runtime
    finally:
        stop.set()
        await running


async def call(runtime: MemoryRuntime, **body: Any) -> dict[str, Any]:
    client = await runtime.client(PATH)
    async with aclosing(client.call({"model": "counter", **body})) as replies:
        [reply] = [reply async for reply in replies]
        return reply


def endpoint_of(runtime: MemoryRuntime) -> MemoryEndpoint:
    [endpoint] = runtime.endpoints[PATH]
    return endpoint


def test_an_embed_worker_registers_its_surface_and_embeds(directory: Path) -> None:
    async def body() -> None:
        async with running_worker(Embedder(directory)) as (worker, runtime):
            card = endpoint_of(runtime).card
            assert card is not None
            assert (card.surfaces, card.model_input, card.name) == (frozenset({"embeddings"}), "text", "counter")
            reply = await call(runtime, input=["the cat", "a dog"])
            assert [entry["index"] for entry in reply["data"]] == [0, 1]
            assert reply["usage"] == {"prompt_tokens": 8, "total_tokens": 8}
            assert await call(runtime, input=[[2, 4, 5, 3], [2, 8, 11, 3]]) == reply
            for wrong in ([], "", ["a", 1], None):
                with pytest.raises(InvalidRequest, match="input"):
                    await call(runtime, input=wrong)
            [line] = [
                line
                for line in worker.observed.render().splitlines()
                if line.startswith('baton_requests_total{role="embed",state="completed"}')
            ]
            assert float(line.split()[-1]) == 2

    run_bounded(body())


def test_a_failing_canary_deregisters_the_worker_until_it_recovers(directory: Path) -> None:
    async def body() -> None:
        engine = Embedder(directory)
        async with running_worker(engine, canary_interval_s=0.01) as (_, runtime):
            await eventually(lambda: len(engine.embedded) > 2)
            assert {work.inputs for work in engine.embedded} == {((1,),)}
            assert endpoint_of(runtime).registered
            engine.error = EngineFailed("failed")
            await eventually(lambda: not endpoint_of(runtime).registered)
            engine.error = None
            await eventually(lambda: endpoint_of(runtime).registered)

    run_bounded(body())


@pytest.mark.parametrize("role", ["aggregated", "embed"])
def test_a_role_that_the_engine_cannot_serve_is_refused(directory: Path, role: str) -> None:
    async def body() -> None:
        engine = Embedder(directory) if role == "aggregated" else EchoEngine()
        with pytest.raises(ConfigError, match=role):
            Worker(msgspec.structs.replace(Settings(), role=role), engine, MemoryRuntime())

    run_bounded(body())


# From settings to an engine


def test_preparing_a_model_is_idempotent(directory: Path) -> None:
    prepared = prepare_model(msgspec.structs.replace(Settings(), engine="echo", model=str(directory)))
    assert (prepared.model, prepared.name) == (str(directory), directory.name)
    assert prepare_model(prepared) == prepared
    named = prepare_model(msgspec.structs.replace(Settings(), engine="echo", model=str(directory), name="mine"))
    assert named.name == "mine"
    assert prepare_model(msgspec.structs.replace(Settings(), engine="echo")).name == "echo"


@pytest.mark.torch
def test_the_torch_engine_embeds_with_encoder_models(directory: Path) -> None:
    pytest.importorskip("torch")
    pytest.importorskip("transformers")
    (directory / "model.safetensors").touch()
    prepared = prepare_model(msgspec.structs.replace(Settings(), engine="torch", model=str(directory)))
    assert embeds(prepared)

    async def body() -> None:
        capabilities = build_engine(prepared).capabilities
        assert (capabilities.generate, capabilities.embeddings) == (False, True)

    run_bounded(body())
