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
from baton.ports.engine import Capabilities, Encoded, EncodeWork, EngineInfo
from baton.process.roles import path_of, role_of
from baton.process.worker import Worker
from baton.protocol.ids import RequestId
from baton.testing import eventually, run_bounded
from baton.testing.memory_runtime import MemoryEndpoint, MemoryRuntime

IMAGE = "data:image/png;base64," + base64.b64encode(probe_image().data).decode()
REQUEST = {"token_ids": [104, 105], "multi_modal_data": {"image_url": [{"Url": IMAGE}]}}


class CountedEcho(EchoEngine):
    """Counts the encoded media that it holds."""

    def __init__(self) -> None:
        super().__init__(EchoOptions(media=True))
        self.held: set[RequestId] = set()
        self.probes = 0

    async def encode(self, work: EncodeWork) -> Encoded:
        encoded = await super().encode(work)
        self.held.add(work.request_id)
        self.probes += work.request_id.startswith("canary")
        return encoded

    async def abort(self, request_id: RequestId) -> None:
        self.held.discard(request_id)
        await super().abort(request_id)


@asynccontextmanager
async def running_worker(
    runtime: MemoryRuntime, engine: EchoEngine, role: str, **settings: Any
) -> AsyncIterator[MemoryEndpoint]:
    stop, ready = asyncio.Event(), asyncio.Event()
    configured = msgspec.structs.replace(Settings(role=role), **settings)  # type: ignore[arg-type]
    worker = Worker(configured, engine, runtime)
    running = asyncio.create_task(worker.run(stop, ready.set))
    await asyncio.wait([running, asyncio.create_task(ready.wait())], return_when=asyncio.FIRST_COMPLETED)
    if running.done():
        running.result()
    try:
        [endpoint] = runtime.endpoints[path_of(configured, role)]
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
            running_worker(runtime, engine, "encode"),
            running_worker(
                runtime, EchoEngine(EchoOptions(media=True)), "aggregated", media=MediaOptions(encoders=True)
            ),
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
        async with running_worker(runtime, engine, "encode", kv=KvTransferOptions(claim_timeout_s=0.05)):
            [encoded] = await call(runtime, "baton.encode.generate", REQUEST)
            await eventually(lambda: not engine.held)
            reader = EchoEngine(EchoOptions(media=True))
            async with running_worker(runtime, reader, "aggregated", media=MediaOptions(encoders=True)):
                late = {**REQUEST, "encoder_result": encoded["encoder_result"]}
                # The encode worker remembers for 0.05 s why: a slow machine gets to know only that they are lost.
                with pytest.raises(PeerLost, match="media that an encode worker held for this request are lost"):
                    await call(runtime, "baton.worker.generate", late)

    run_bounded(body())


def test_d16_a_draining_encode_worker_waits_for_its_leases() -> None:
    async def body() -> None:
        runtime, engine = MemoryRuntime(), CountedEcho()
        async with running_worker(runtime, engine, "encode", kv=KvTransferOptions(claim_timeout_s=0.2)):
            await call(runtime, "baton.encode.generate", REQUEST)
            assert len(engine.held) == 1
        assert engine.held == set()

    run_bounded(body())


def test_an_encode_worker_registers_its_type_and_probes_its_engine() -> None:
    async def body() -> None:
        runtime, engine = MemoryRuntime(), CountedEcho()
        async with running_worker(runtime, engine, "encode") as endpoint:
            card = endpoint.card
            assert card is not None
            assert card.worker_type == "encode"
            assert card.surfaces == frozenset(), "no client's request is sent to it"
            assert card.needs == (("aggregated",), ("prefill", "decode"))
            assert card.model_input == "tokens"
            assert not card.kv_events
            assert engine.probes == 1
            assert engine.held == set()

    run_bounded(body())


class WithoutTokenizer(CountedEcho):
    """An encoder whose model directory has no tokenizer."""

    async def start(self) -> EngineInfo:
        return msgspec.structs.replace(await super().start(), model_dir="/nonexistent")


def test_a_worker_whose_model_has_no_image_prompt_is_not_probed_and_says_so_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def body() -> None:
        engine = WithoutTokenizer()
        async with running_worker(MemoryRuntime(), engine, "encode"):
            assert engine.probes == 0

    run_bounded(body())
    [record] = [record for record in caplog.records if "is not probed" in record.message]
    assert record.levelname == "WARNING"
    assert "/nonexistent" in record.message


def test_a_worker_with_media_encoders_registers_that_need() -> None:
    async def body() -> None:
        for encoders, needs in ((True, (("encode",),)), (False, ())):
            engine = EchoEngine(EchoOptions(media=True))
            async with running_worker(
                MemoryRuntime(), engine, "aggregated", media=MediaOptions(encoders=encoders)
            ) as endpoint:
                assert endpoint.card is not None
                assert endpoint.card.needs == needs

    run_bounded(body())


def test_media_are_fetched_under_the_workers_policy() -> None:
    async def body() -> None:
        runtime = MemoryRuntime()
        async with running_worker(runtime, EchoEngine(EchoOptions(media=True)), "aggregated"):
            request = {**REQUEST, "stop_conditions": {"max_tokens": 9}}
            assert text(await call(runtime, "baton.worker.generate", request)) == "hi[64x64]"
            internal = {"token_ids": [1], "multi_modal_data": {"image_url": ["http://127.0.0.1:1/"]}}
            with pytest.raises(InvalidRequest, match=r"multi_modal_data\.image_url\[0\]: .*not public"):
                await call(runtime, "baton.worker.generate", internal)

    run_bounded(body())


def test_only_an_engine_that_encodes_serves_the_role() -> None:
    with pytest.raises(ConfigError, match="role encode"):
        role_of(Settings(role="encode"), Capabilities())
    with pytest.raises(ConfigError, match="--media-encoders"):
        role_of(Settings(media=MediaOptions(encoders=True)), Capabilities())
    with pytest.raises(ConfigError, match="role aggregated"):
        role_of(Settings(role="aggregated"), Capabilities(generate=False, media_encoding=True))
    assert role_of(Settings(role="encode"), Capabilities(media_encoding=True)) == "encode"


def test_encode_workers_require_token_input() -> None:
    with pytest.raises(ConfigError, match="--model-input text"):
        load({"role": "encode", "model_input": "text"}, {}, None)


def test_the_encode_role_builds_the_tensorrt_llm_encoder(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: object())
    engine = build_engine(Settings(engine="trtllm", role="encode", model="somewhere", name="model"))
    assert isinstance(engine, TrtllmEncoder)
