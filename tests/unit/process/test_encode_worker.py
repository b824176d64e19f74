"""An encode worker and one that computes, in one process and over real rooms: found, used, and everything freed."""

import asyncio
import base64
import time
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
from baton.errors import ConfigError, InvalidRequest, PeerLost, Unsupported
from baton.media.images import probe_image
from baton.ports.engine import Capabilities, Encoded, EncodeWork, EngineInfo
from baton.process.roles import path_of, role_of
from baton.process.worker import Worker
from baton.testing import eventually, run_bounded
from baton.testing.memory_runtime import MemoryEndpoint, MemoryRuntime

IMAGE = "data:image/png;base64," + base64.b64encode(probe_image().data).decode()
REQUEST = {"token_ids": [104, 105, 258], "multi_modal_data": {"image_url": [{"Url": IMAGE}]}}


class CountedEcho(EchoEngine):
    """Counts what it encodes."""

    def __init__(self) -> None:
        super().__init__(EchoOptions(media=True))
        self.encoded = 0
        self.probes = 0

    async def encode(self, work: EncodeWork) -> Encoded:
        is_probe = work.request_id.startswith("canary")
        self.probes += is_probe
        self.encoded += not is_probe
        return await super().encode(work)


@asynccontextmanager
async def running_worker(
    runtime: MemoryRuntime, engine: EchoEngine, role: str, **settings: Any
) -> AsyncIterator[MemoryEndpoint]:
    async with running_worker_process(runtime, engine, role, **settings) as (_, endpoint):
        yield endpoint


@asynccontextmanager
async def running_worker_process(
    runtime: MemoryRuntime, engine: EchoEngine, role: str, **settings: Any
) -> AsyncIterator[tuple[Worker, MemoryEndpoint]]:
    stop, ready = asyncio.Event(), asyncio.Event()
    configured = msgspec.structs.replace(Settings(role=role), **settings)  # type: ignore[arg-type]
    worker = Worker(configured, engine, runtime)
    running = asyncio.create_task(worker.run(stop, ready.set))
    await asyncio.wait([running, asyncio.create_task(ready.wait())], return_when=asyncio.FIRST_COMPLETED)
    if running.done():
        running.result()
    try:
        [endpoint] = runtime.endpoints[path_of(configured, role)]
        yield worker, endpoint
    finally:
        stop.set()
        await running


async def call(runtime: MemoryRuntime, path: str, request: dict[str, Any]) -> list[dict[str, Any]]:
    client = await runtime.client(path)
    async with aclosing(client.call(request)) as replies:
        return [reply async for reply in replies]


def text(replies: list[dict[str, Any]]) -> str:
    return bytes(token for reply in replies for token in reply["token_ids"]).decode()


def value(worker: Worker, metric: str) -> float:
    """Return a line of the worker's own metrics."""
    return float(next(line.split()[-1] for line in worker.observed.render().splitlines() if line.startswith(metric)))


PINNED = 'baton_media_cache_items{use="pinned"}'


@pytest.mark.process
def test_d16_media_are_encoded_by_one_worker_used_by_another_and_then_freed() -> None:
    async def body() -> None:
        runtime, engine, computing = MemoryRuntime(), CountedEcho(), CountedEcho()
        media = MediaOptions(encoders=True)
        async with (
            running_worker_process(runtime, engine, "encode") as (encoder, _),
            running_worker(runtime, computing, "aggregated", media=media),
        ):
            [encoded] = await call(runtime, "baton.encode.generate", REQUEST)
            assert encoded["finish_reason"] == "stop"
            described = encoded["encoder_result"]["media"]
            assert (described["dtype"], described["size"], described["items"][0]["nbytes"]) == ("float32", 4, 64)
            assert described["expires_at"] > time.time()
            assert value(encoder, PINNED) == 1
            # As the frontend does it: the same request, with the encoder's result beside the URLs.
            again = {**REQUEST, "encoder_result": encoded["encoder_result"], "stop_conditions": {"max_tokens": 18}}
            assert text(await call(runtime, "baton.worker.generate", again)) == "hi[64x64 4e991fd1]"
            await eventually(lambda: value(encoder, PINNED) == 0)
            assert text(await call(runtime, "baton.worker.generate", again)) == "hi[64x64 4e991fd1]", "it has the rows"
            assert (engine.encoded, computing.encoded) == (1, 0)

    run_bounded(body())


def test_d14_an_encode_worker_does_not_wait_for_ever_for_a_reader() -> None:
    async def body() -> None:
        runtime = MemoryRuntime()
        kv = KvTransferOptions(claim_timeout_s=0.05)
        async with running_worker_process(runtime, CountedEcho(), "encode", kv=kv) as (encoder, _):
            [encoded] = await call(runtime, "baton.encode.generate", REQUEST)
            await eventually(lambda: value(encoder, PINNED) == 0)
            late = {**REQUEST, "encoder_result": encoded["encoder_result"]}
            never = MediaOptions(encoders=True, local_encoding="never")
            async with running_worker(runtime, CountedEcho(), "aggregated", media=never):
                with pytest.raises(PeerLost):
                    await call(runtime, "baton.worker.generate", late)

    run_bounded(body())


@pytest.mark.process
@pytest.mark.slow
def test_a_worker_that_can_encode_does_so_when_the_rows_of_an_encode_worker_are_lost() -> None:
    async def body() -> None:
        runtime, computing = MemoryRuntime(), CountedEcho()
        async with running_worker(encoding := MemoryRuntime(), CountedEcho(), "encode"):
            [encoded] = await call(encoding, "baton.encode.generate", REQUEST)
        async with running_worker(runtime, computing, "aggregated", media=MediaOptions(encoders=True)):
            late = {**REQUEST, "encoder_result": encoded["encoder_result"]}
            assert text(await call(runtime, "baton.worker.generate", late)).startswith("hi[64x64 ")
            assert computing.encoded == 1

    run_bounded(body())


@pytest.mark.process
@pytest.mark.slow
def test_rows_of_another_model_are_refused_before_memory_is_touched() -> None:
    async def body() -> None:
        runtime = MemoryRuntime()
        never = MediaOptions(encoders=True, local_encoding="never")
        async with (
            running_worker(runtime, CountedEcho(), "encode"),
            running_worker_process(runtime, CountedEcho(), "aggregated", media=never) as (worker, _),
        ):
            [encoded] = await call(runtime, "baton.encode.generate", REQUEST)
            for field, other in (("model", "another"), ("dtype", "bfloat16"), ("size", 8)):
                media = {**encoded["encoder_result"]["media"], field: other}
                result = {**encoded["encoder_result"], "media": media}
                with pytest.raises(PeerLost, match=f"{field} is .* here and {other} there"):
                    await call(runtime, "baton.worker.generate", {**REQUEST, "encoder_result": result})
            assert value(worker, "baton_media_cache_bytes") == 0

    run_bounded(body())


def test_without_an_encode_worker_a_request_is_encoded_here_or_refused() -> None:
    async def body() -> None:
        for media, expected in ((MediaOptions(encoders=True), None), (MediaOptions(), None)):
            runtime = MemoryRuntime()
            async with running_worker(runtime, CountedEcho(), "aggregated", media=media):
                assert text(await call(runtime, "baton.worker.generate", REQUEST)).startswith("hi[64x64 ")
                assert expected is None
        runtime = MemoryRuntime()
        never = MediaOptions(encoders=True, local_encoding="never")
        async with running_worker(runtime, CountedEcho(), "aggregated", media=never):
            with pytest.raises(PeerLost, match="no encode worker has encoded"):
                await call(runtime, "baton.worker.generate", REQUEST)
            broken = {**REQUEST, "multi_modal_data": {"image_url": ["data:image/png;base64,AAAA"]}}
            with pytest.raises(InvalidRequest, match="not an image"):
                await call(runtime, "baton.worker.generate", broken)
        runtime = MemoryRuntime()
        async with running_worker(runtime, CountedEcho(), "aggregated", media=MediaOptions(local_encoding="never")):
            with pytest.raises(Unsupported, match="text only"):
                await call(runtime, "baton.worker.generate", REQUEST)

    run_bounded(body())


def test_d16_a_draining_encode_worker_waits_for_its_leases() -> None:
    async def body() -> None:
        runtime = MemoryRuntime()
        kv = KvTransferOptions(claim_timeout_s=0.2)
        async with running_worker_process(runtime, CountedEcho(), "encode", kv=kv) as (encoder, _):
            await call(runtime, "baton.encode.generate", REQUEST)
            assert value(encoder, PINNED) == 1
        assert value(encoder, PINNED) == 0

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
        for media, needs in (
            (MediaOptions(encoders=True, local_encoding="never"), (("encode",),)),
            (MediaOptions(encoders=True), (("encode",), ())),
            (MediaOptions(), ()),
        ):
            engine = EchoEngine(EchoOptions(media=True))
            async with running_worker(MemoryRuntime(), engine, "aggregated", media=media) as endpoint:
                assert endpoint.card is not None
                assert endpoint.card.needs == needs

    run_bounded(body())


def test_media_are_fetched_under_the_workers_policy() -> None:
    async def body() -> None:
        runtime = MemoryRuntime()
        async with running_worker(runtime, EchoEngine(EchoOptions(media=True)), "aggregated"):
            assert text(await call(runtime, "baton.worker.generate", REQUEST)).startswith("hi[64x64 ")
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
