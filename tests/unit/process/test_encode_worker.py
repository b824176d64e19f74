"""An encode worker and one that computes, in one process and over real rooms: found, used, and everything freed."""

import asyncio
import base64
from collections.abc import AsyncIterator
from contextlib import aclosing, asynccontextmanager
from typing import Any

import msgspec
import pytest

from baton.config.load import load
from baton.config.media import MediaOptions
from baton.config.settings import Settings
from baton.config.transfer import KvTransferOptions
from baton.engines.echo import EchoEngine, EchoOptions
from baton.engines.registry import build_engine
from baton.engines.trtllm.encoder import TrtllmEncoder
from baton.errors import ConfigError, InvalidRequest, PeerLost
from baton.media.images import probe_image
from baton.ports.engine import Capabilities, Encoded, EncodeWork
from baton.process.roles import path_of, role_of
from baton.process.worker import Worker
from baton.protocol.ids import RequestId
from baton.testing import eventually, run_bounded
from baton.testing.memory_runtime import MemoryEndpoint, MemoryRuntime

PICTURE = "data:image/png;base64," + base64.b64encode(probe_image().data).decode()
REQUEST = {"token_ids": [104, 105], "multi_modal_data": {"image_url": [{"Url": PICTURE}]}}


class CountedEcho(EchoEngine):
    """Tells what it holds encoded."""

    def __init__(self) -> None:
        super().__init__(EchoOptions(media=True))
        self.held: set[RequestId] = set()
        self.trials = 0

    async def encode(self, work: EncodeWork) -> Encoded:
        encoded = await super().encode(work)
        self.held.add(work.request_id)
        self.trials += work.request_id.startswith("canary")
        return encoded

    async def abort(self, request_id: RequestId) -> None:
        self.held.discard(request_id)
        await super().abort(request_id)


@asynccontextmanager
async def living(
    runtime: MemoryRuntime, engine: EchoEngine, role: str, **settings: Any
) -> AsyncIterator[MemoryEndpoint]:
    stop, ready = asyncio.Event(), asyncio.Event()
    told = msgspec.structs.replace(Settings(role=role), **settings)  # type: ignore[arg-type]
    worker = Worker(told, engine, runtime)
    running = asyncio.create_task(worker.run(stop, ready.set))
    await asyncio.wait([running, asyncio.create_task(ready.wait())], return_when=asyncio.FIRST_COMPLETED)
    if running.done():
        running.result()
    try:
        [endpoint] = runtime.endpoints[path_of(told, role)]
        yield endpoint
    finally:
        stop.set()
        await running


async def call(runtime: MemoryRuntime, path: str, request: dict[str, Any]) -> list[dict[str, Any]]:
    client = await runtime.client(path)
    async with aclosing(client.call(request)) as replies:
        return [reply async for reply in replies]


def text(replies: list[dict[str, Any]]) -> str:
    return bytes(token for reply in replies for token in reply["token_ids"]).decode()


def test_d16_media_are_encoded_by_one_worker_used_by_another_and_then_freed() -> None:
    async def body() -> None:
        runtime, engine = MemoryRuntime(), CountedEcho()
        async with (
            living(runtime, engine, "encode"),
            living(runtime, EchoEngine(EchoOptions(media=True)), "aggregated", media=MediaOptions(encoders=True)),
        ):
            [encoded] = await call(runtime, "baton.encode.generate", REQUEST)
            assert encoded["finish_reason"] == "stop"
            assert len(engine.held) == 1
            # As the frontend does it: the same request, with the encoder's result beside the URLs.
            again = {**REQUEST, "encoder_result": encoded["encoder_result"], "stop_conditions": {"max_tokens": 9}}
            assert text(await call(runtime, "baton.worker.generate", again)) == "hi[64x64]"
            await eventually(lambda: not engine.held)
            with pytest.raises(PeerLost):
                await call(runtime, "baton.worker.generate", again)

    run_bounded(body())


def test_d14_an_encode_worker_does_not_wait_for_ever_for_a_reader() -> None:
    async def body() -> None:
        runtime, engine = MemoryRuntime(), CountedEcho()
        async with living(runtime, engine, "encode", kv=KvTransferOptions(claim_timeout_s=0.05)):
            [encoded] = await call(runtime, "baton.encode.generate", REQUEST)
            await eventually(lambda: not engine.held)
            reader = EchoEngine(EchoOptions(media=True))
            async with living(runtime, reader, "aggregated", media=MediaOptions(encoders=True)):
                late = {**REQUEST, "encoder_result": encoded["encoder_result"]}
                with pytest.raises(PeerLost, match="no decode worker has claimed the KV"):
                    await call(runtime, "baton.worker.generate", late)

    run_bounded(body())


def test_d16_a_worker_that_leaves_waits_for_those_who_use_what_it_holds() -> None:
    async def body() -> None:
        runtime, engine = MemoryRuntime(), CountedEcho()
        async with living(runtime, engine, "encode", kv=KvTransferOptions(claim_timeout_s=0.2)):
            await call(runtime, "baton.encode.generate", REQUEST)
            assert len(engine.held) == 1
        assert engine.held == set()

    run_bounded(body())


def test_an_encode_worker_is_announced_as_one_and_probes_its_engine() -> None:
    async def body() -> None:
        runtime, engine = MemoryRuntime(), CountedEcho()
        async with living(runtime, engine, "encode") as endpoint:
            card = endpoint.card
            assert card is not None
            assert card.worker_type == "encode"
            assert card.surfaces == frozenset(), "no client's request is sent to it"
            assert card.needs == (("aggregated",), ("prefill", "decode"))
            assert card.model_input == "tokens"
            assert not card.kv_events
            assert engine.trials == 1
            assert engine.held == set()

    run_bounded(body())


def test_a_worker_that_wants_encoders_says_so() -> None:
    async def body() -> None:
        for encoders, needs in ((True, (("encode",),)), (False, ())):
            engine = EchoEngine(EchoOptions(media=True))
            async with living(MemoryRuntime(), engine, "aggregated", media=MediaOptions(encoders=encoders)) as endpoint:
                assert endpoint.card is not None
                assert endpoint.card.needs == needs

    run_bounded(body())


def test_media_are_fetched_under_the_workers_policy() -> None:
    async def body() -> None:
        runtime = MemoryRuntime()
        async with living(runtime, EchoEngine(EchoOptions(media=True)), "aggregated"):
            request = {**REQUEST, "stop_conditions": {"max_tokens": 9}}
            assert text(await call(runtime, "baton.worker.generate", request)) == "hi[64x64]"
            inside = {"token_ids": [1], "multi_modal_data": {"image_url": ["http://127.0.0.1:1/"]}}
            with pytest.raises(InvalidRequest, match=r"multi_modal_data\.image_url\[0\]: .*not public"):
                await call(runtime, "baton.worker.generate", inside)

    run_bounded(body())


def test_only_an_engine_that_encodes_fills_the_role() -> None:
    with pytest.raises(ConfigError, match="role encode"):
        role_of(Settings(role="encode"), Capabilities())
    with pytest.raises(ConfigError, match="--media-encoders"):
        role_of(Settings(media=MediaOptions(encoders=True)), Capabilities())
    with pytest.raises(ConfigError, match="role aggregated"):
        role_of(Settings(role="aggregated"), Capabilities(generate=False, media_encoding=True))
    assert role_of(Settings(role="encode"), Capabilities(media_encoding=True)) == "encode"


def test_encode_workers_take_tokens() -> None:
    with pytest.raises(ConfigError, match="--model-input text"):
        load({"role": "encode", "model_input": "text"}, {}, None)


def test_the_role_makes_tensorrt_llm_an_encoder(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: object())
    engine = build_engine(Settings(engine="trtllm", role="encode", model="somewhere", name="model"))
    assert isinstance(engine, TrtllmEncoder)
