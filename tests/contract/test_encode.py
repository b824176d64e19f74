"""Engines that encode media keep the rules of `EncodeEngine`; and rules of TensorRT-LLM's encoder."""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest
from prometheus_client import CollectorRegistry

from baton.config.engines import EchoOptions, TrtllmOptions
from baton.engines.echo.engine import MODEL_DIR, EchoEngine
from baton.engines.trtllm.adapter import TrtllmEngine
from baton.engines.trtllm.encoder import TrtllmEncoder
from baton.engines.trtllm.lifecycle import Timeouts
from baton.engines.trtllm.llm_args import RequestType
from baton.errors import Cancelled, ConfigError, EngineDead, EngineFailed, InvalidRequest, Unsupported
from baton.media.images import probe_image
from baton.ports.engine import EmbedEngine, EncodeEngine, EncodeWork, GenerateEngine, Work
from baton.protocol.commands import ListLoras
from baton.protocol.handoff import Consume, PrefillResult, Produce
from baton.protocol.ids import new_request_id
from baton.protocol.media import MediaFile, MediaHandles
from baton.protocol.outputs import HandoffReady, TokenDelta
from baton.protocol.requests import Sampling, StopConditions
from baton.testing import eventually, run_bounded, running
from baton.testing.encode_contract import HandlesContract, RowsContract
from baton.testing.engine_session import read_to_the_end
from tests.doubles.trtllm import World, make_library

VERSIONS = ["1.2.1", "1.3.0rc22", "1.3.0rc25"]
ARGUMENTS = (
    "--max_batch_size=4",
    "--max_seq_len=4096",
    "--kv_cache_config.tokens_per_block=16",
    "--kv_cache_config.max_tokens=8192",
)
PROMPT = (10, 20, 30)


class TestEchoEncodes(RowsContract):
    def make_engine(self) -> EncodeEngine:
        return EchoEngine(EchoOptions(media=True))


class TestTrtllmEncodes13(HandlesContract):
    version = "1.3.0rc22"

    def make_engine(self) -> EncodeEngine:
        self.world = World()
        return encoder(self.version, self.world)

    def held(self, engine: EncodeEngine) -> int | None:
        return self.world.media_held


class TestTrtllmEncodes12(TestTrtllmEncodes13):
    version = "1.2.1"


def encoder(version: str, world: World, *args: str, health_interval_s: float = 2.0) -> TrtllmEncoder:
    library = make_library(version, world, CollectorRegistry())
    timeouts = Timeouts(health_interval_s=health_interval_s)
    return TrtllmEncoder(TrtllmOptions(), args, MODEL_DIR, "double", library, timeouts)


def engine(version: str, world: World, request_type: RequestType | None = None) -> TrtllmEngine:
    library = make_library(version, world, CollectorRegistry())
    return TrtllmEngine(TrtllmOptions(poll_ms=20), ARGUMENTS, MODEL_DIR, "double", request_type, library)


def encode_work(first: int = 10, data: bytes | None = None) -> EncodeWork:
    picture = probe_image() if data is None else MediaFile(modality="image", data=data)
    return EncodeWork(request_id=new_request_id("encode"), token_ids=(first, *PROMPT[1:]), media=(picture,))


def work(params: dict[str, object] | None, tokens: int = 12, handoff: Any = None) -> Work:
    return Work(
        request_id=new_request_id("compute"),
        token_ids=PROMPT,
        media=() if params is None else (MediaHandles(params=json.loads(json.dumps(params))),),
        max_tokens=tokens,
        stop=StopConditions(ignore_eos=True),
        sampling=Sampling(temperature=0.0),
        eos_token_ids=(257,),
        handoff=handoff,
    )


async def tokens_of(generator: GenerateEngine, request: Work) -> list[int]:
    return (await read_to_the_end(generator.submit(request))).tokens[0]


@asynccontextmanager
async def encoded(version: str, world: World) -> AsyncIterator[tuple[TrtllmEncoder, dict[str, object]]]:
    started = encoder(version, world)
    async with running(started):
        request = encode_work()
        yield started, (await started.encode(request)).params
        await started.abort(request.request_id)


# The encoder


@pytest.mark.parametrize("version", VERSIONS)
def test_an_encoder_returns_handles_and_hashes(version: str) -> None:
    async def body() -> None:
        async with encoded(version, World()) as (_, params):
            [handle] = params["multimodal_embedding_handles"]  # type: ignore[misc]
            assert handle["tensor_size"] == [16, 8], "64 by 64 pixels in patches of 16 by 16"
            assert len(params["multimodal_hashes"][0]) == 8  # type: ignore[index]
            assert params["mrope_position_ids_handle"]
            assert params["mrope_position_deltas_handle"]

    run_bounded(body())


@pytest.mark.parametrize("late", [False, True])
def test_d16_embeddings_of_a_cancelled_call_are_freed(late: bool) -> None:
    """A shared tensor stays in its owner's memory until it is read: so it is read once, and dropped."""

    async def body() -> None:
        world = World()
        world.encodes_aborted = late  # the library encodes in spite of the abort
        tested = encoder("1.3.0rc22", world)
        async with running(tested):
            world.encode_gate.clear()
            call = asyncio.create_task(tested.encode(encode_work()))
            await eventually(lambda: tested.progress().running == 1)
            call.cancel()
            with pytest.raises(asyncio.CancelledError):
                await call
            world.encode_gate.set()
            await eventually(lambda: world.media_shared == 0 and not tested.progress().running)
            again = encode_work()
            await tested.encode(again)
            await eventually(lambda: world.media_held == 1)
            await tested.abort(again.request_id)
            assert world.media_held == 0

    run_bounded(body())


def test_abort_ends_a_waiting_and_a_running_call() -> None:
    async def body() -> None:
        world = World()
        tested = encoder("1.3.0rc22", world, "--max_batch_size=1")
        async with running(tested):
            world.encode_gate.clear()
            works = [encode_work(), encode_work()]
            calls = [asyncio.create_task(tested.encode(each)) for each in works]
            await eventually(lambda: tested.progress().running == 1 and tested.progress().waiting == 1)
            aborts = [asyncio.create_task(tested.abort(each.request_id)) for each in works]
            await asyncio.sleep(0)
            world.encode_gate.set()
            await asyncio.gather(*aborts)
            for call in calls:
                with pytest.raises(Cancelled):
                    await call
            assert world.media_shared == 0

    run_bounded(body())


def test_a_request_that_fails_leaves_the_encoder_running() -> None:
    async def body() -> None:
        world = World()
        world.fail_prompts = {99: "request"}
        tested = encoder("1.3.0rc22", world)
        async with running(tested):
            with pytest.raises(EngineFailed, match="the engine failed it"):
                await tested.encode(encode_work(first=99))
            with pytest.raises(InvalidRequest, match="there is no image to encode"):
                await tested.encode(msgspec.structs.replace(encode_work(), media=()))
            assert (await tested.encode(encode_work())).params

    run_bounded(body())


@pytest.mark.parametrize("version", VERSIONS)
def test_an_encoder_that_dies_ends_every_call(version: str) -> None:
    async def body() -> None:
        world = World()
        world.fail_prompts = {99: "die"}
        tested = encoder(version, world)
        async with running(tested):
            with pytest.raises(EngineDead):
                await tested.encode(encode_work(first=99))
            with pytest.raises(EngineDead):
                await tested.encode(encode_work())

    run_bounded(body())


def test_an_encoder_that_becomes_unhealthy_ends_its_calls() -> None:
    async def body() -> None:
        world = World()
        tested = encoder("1.3.0rc22", world, health_interval_s=0.02)
        async with running(tested):
            world.encode_gate.clear()
            call = asyncio.create_task(tested.encode(encode_work()))
            await eventually(lambda: tested.progress().running == 1)
            world.unhealthy = True
            with pytest.raises(EngineDead):
                await call

    run_bounded(body())


def test_arguments_that_contradict_an_encoder_are_refused() -> None:
    with pytest.raises(ConfigError, match="autodeploy"):
        TrtllmEncoder(TrtllmOptions(backend="_autodeploy"), (), MODEL_DIR, "double")
    with pytest.raises(ConfigError, match="mm_encoder_only"):
        TrtllmEncoder(TrtllmOptions(), ("--mm_encoder_only", "true"), MODEL_DIR, "double")
    with pytest.raises(ConfigError, match="no_such"):
        run_bounded(encoder("1.3.0rc22", World(), "--no_such", "1").start())
    with pytest.raises(ConfigError, match="GPU"):
        run_bounded(encoder("1.3.0rc22", World(gpus=0)).start())


def test_an_encoder_has_the_ability_to_encode_and_no_other() -> None:
    tested = encoder("1.3.0rc22", World())
    assert isinstance(tested, EncodeEngine)
    assert not isinstance(tested, GenerateEngine | EmbedEngine)


# The engine that computes the prompt


@pytest.mark.parametrize("version", VERSIONS)
def test_an_engine_computes_a_prompt_with_encoded_media(version: str) -> None:
    async def body() -> None:
        world = World()
        async with encoded(version, world) as (_, params), running(tested := engine(version, world)):
            assert tested.capabilities.media_handles
            seen = await tokens_of(tested, work(params))
            assert seen == await tokens_of(tested, work(params))
            assert seen != await tokens_of(tested, work(None)), "the image changes the output"

    run_bounded(body())


@pytest.mark.parametrize("version", VERSIONS)
def test_encoder_prefill_and_decode_generate_the_same_tokens_as_one_engine(version: str) -> None:
    async def body() -> None:
        world = World()
        async with (
            encoded(version, world) as (_, params),
            running(whole := engine(version, world)),
            running(prefill := engine(version, world, "context_only")),
            running(decode := engine(version, world, "generation_only")),
        ):
            expected = await tokens_of(whole, work(params))
            stream = prefill.submit(work(params, 1, Produce()))
            outputs: list[Any] = []
            while read := await stream.read():
                outputs += read
            [ready] = [each for each in outputs if isinstance(each, HandoffReady)]
            sent = json.loads(json.dumps(ready.params))
            assert "multimodal_embedding_handles" not in sent, "the decode's engine rejects them"
            assert len(sent["prompt_token_ids"]) == len(PROMPT) + 16
            assert sent["mrope_position_ids_handle"] == {"method_key": 2, "storage_handle": "positions"}
            source = PrefillResult(disaggregated_params=sent)
            # The decode gets the client's prompt and URLs; it continues from the prefill's prompt.
            assert expected == await tokens_of(decode, work(None, handoff=Consume(source=source)))
            assert any(isinstance(each, TokenDelta) for each in outputs)

    run_bounded(body())


def test_handles_of_freed_media_fail_only_their_request() -> None:
    async def body() -> None:
        world = World()
        async with running(tested := engine("1.3.0rc22", world)):
            async with encoded("1.3.0rc22", world) as (_, params):
                pass
            with pytest.raises((EngineFailed, InvalidRequest)):
                await tokens_of(tested, work(params))
            assert await tokens_of(tested, work(None))

    run_bounded(body())


@pytest.mark.parametrize(
    "params", [{}, {"multimodal_hashes": []}, {"multimodal_embedding_handles": 1}, {"sizes": ["1x1"]}]
)
def test_handles_of_another_engine_are_refused_by_name(params: dict[str, object]) -> None:
    async def body() -> None:
        async with running(tested := engine("1.3.0rc22", World())):
            with pytest.raises(InvalidRequest, match=r"encoder_result\.engine"):
                tested.submit(work(params))

    run_bounded(body())


def test_an_encoder_has_no_commands() -> None:
    with pytest.raises(Unsupported):
        run_bounded(encoder("1.3.0rc22", World()).execute(ListLoras()))


def test_autodeploy_reads_no_media_handles() -> None:
    tested = TrtllmEngine(TrtllmOptions(backend="_autodeploy"), ARGUMENTS, Path(MODEL_DIR), "double")
    assert not tested.capabilities.media_handles
