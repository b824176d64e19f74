"""Engines that encode media keep the rules of `Engine.encode`; and what TensorRT-LLM's does beyond them."""

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
from baton.engines.trtllm import lifecycle
from baton.engines.trtllm.adapter import TrtllmEngine
from baton.engines.trtllm.encoder import TrtllmEncoder
from baton.errors import Cancelled, ConfigError, EngineDead, EngineFailed, InvalidRequest, Unsupported
from baton.media.images import probe_image
from baton.ports.engine import EmbedEngine, EncodeEngine, EncodeWork, GenerateEngine, Work
from baton.protocol.handoff import Consume, PrefillResult, Produce
from baton.protocol.ids import new_request_id
from baton.protocol.media import MediaFile, MediaHandles
from baton.protocol.outputs import HandoffReady, TokenDelta
from baton.protocol.requests import Sampling, StopConditions
from baton.testing import eventually, run_bounded, running
from baton.testing.encode_contract import EncodeContract
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


class TestEchoEncodes(EncodeContract):
    def make_engine(self) -> EncodeEngine:
        return EchoEngine(EchoOptions(media=True))


class TestTrtllmEncodes13(EncodeContract):
    version = "1.3.0rc22"

    def make_engine(self) -> EncodeEngine:
        self.world = World()
        return encoder(self.version, self.world)

    def held(self, engine: EncodeEngine) -> int | None:
        return self.world.media_held


class TestTrtllmEncodes12(TestTrtllmEncodes13):
    version = "1.2.1"


def encoder(version: str, world: World, *args: str) -> TrtllmEncoder:
    library = make_library(version, world, CollectorRegistry())
    return TrtllmEncoder(TrtllmOptions(), args, MODEL_DIR, "double", library)


def engine(version: str, world: World, part: str) -> TrtllmEngine:
    library = make_library(version, world, CollectorRegistry())
    return TrtllmEngine(TrtllmOptions(poll_ms=20), ARGUMENTS, MODEL_DIR, "double", part, library)


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


async def tokens_of(made: GenerateEngine, asked: Work) -> list[int]:
    return (await read_to_the_end(made.submit(asked))).tokens[0]


@asynccontextmanager
async def encoded(version: str, world: World) -> AsyncIterator[tuple[TrtllmEncoder, dict[str, object]]]:
    made = encoder(version, world)
    async with running(made):
        asked = encode_work()
        yield made, (await made.encode(asked)).params
        await made.abort(asked.request_id)


# The encoder


@pytest.mark.parametrize("version", VERSIONS)
def test_an_encoder_tells_handles_hashes_and_the_prompt(version: str) -> None:
    async def body() -> None:
        async with encoded(version, World()) as (_, params):
            assert params["prompt"] == bytes(PROMPT).decode()
            [handle] = params["multimodal_embedding_handles"]  # type: ignore[misc]
            assert handle["tensor_size"] == [16, 8], "64 by 64 pixels in pieces of 16 by 16"
            assert len(params["multimodal_hashes"][0]) == 8  # type: ignore[index]
            assert params["mrope_position_ids_handle"]
            assert params["mrope_position_deltas_handle"]

    run_bounded(body())


@pytest.mark.parametrize("late", [False, True])
def test_d16_what_a_cancelled_call_has_made_is_freed_although_nobody_read_it(late: bool) -> None:
    """A shared tensor that nobody ever reads stays in its owner's memory: so it is read once, and dropped."""

    async def body() -> None:
        world = World()
        world.encodes_aborted = late  # the library made it all the same
        made = encoder("1.3.0rc22", world)
        async with running(made):
            world.encode_gate.clear()
            call = asyncio.create_task(made.encode(encode_work()))
            await eventually(lambda: made.progress().running == 1)
            call.cancel()
            with pytest.raises(asyncio.CancelledError):
                await call
            world.encode_gate.set()
            await eventually(lambda: world.media_shared == 0 and not made.progress().running)
            again = encode_work()
            await made.encode(again)
            assert world.media_held == 1
            await made.abort(again.request_id)
            assert world.media_held == 0

    run_bounded(body())


def test_an_abort_ends_a_call_that_waits_and_one_that_runs() -> None:
    async def body() -> None:
        world = World()
        made = encoder("1.3.0rc22", world, "--max_batch_size=1")
        async with running(made):
            world.encode_gate.clear()
            works = [encode_work(), encode_work()]
            calls = [asyncio.create_task(made.encode(each)) for each in works]
            await eventually(lambda: made.progress().running == 1 and made.progress().waiting == 1)
            aborts = [asyncio.create_task(made.abort(each.request_id)) for each in works]
            await asyncio.sleep(0)
            world.encode_gate.set()
            await asyncio.gather(*aborts)
            for call in calls:
                with pytest.raises(Cancelled):
                    await call
            assert world.media_shared == 0

    run_bounded(body())


def test_a_request_that_the_encoder_fails_harms_no_other() -> None:
    async def body() -> None:
        world = World()
        world.fail_prompts = {99: "request"}
        made = encoder("1.3.0rc22", world)
        async with running(made):
            with pytest.raises(EngineFailed, match="the engine failed it"):
                await made.encode(encode_work(first=99))
            with pytest.raises(InvalidRequest, match="cannot encode it: there is no image"):
                await made.encode(msgspec.structs.replace(encode_work(), media=()))
            assert (await made.encode(encode_work())).params

    run_bounded(body())


@pytest.mark.parametrize("version", VERSIONS)
def test_an_encoder_that_dies_ends_every_call(version: str) -> None:
    async def body() -> None:
        world = World()
        world.fail_prompts = {99: "die"}
        made = encoder(version, world)
        async with running(made):
            with pytest.raises(EngineDead):
                await made.encode(encode_work(first=99))
            with pytest.raises(EngineDead):
                await made.encode(encode_work())

    run_bounded(body())


def test_an_encoder_that_falls_ill_is_noticed_without_a_request(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lifecycle, "HEALTH_EVERY_S", 0.02)

    async def body() -> None:
        world = World()
        made = encoder("1.3.0rc22", world)
        async with running(made):
            world.encode_gate.clear()
            call = asyncio.create_task(made.encode(encode_work()))
            await eventually(lambda: made.progress().running == 1)
            world.ill = True
            with pytest.raises(EngineDead):
                await call

    run_bounded(body())


def test_an_encoder_takes_no_arguments_that_contradict_it() -> None:
    with pytest.raises(ConfigError, match="autodeploy"):
        TrtllmEncoder(TrtllmOptions(backend="_autodeploy"), (), MODEL_DIR, "double")
    with pytest.raises(ConfigError, match="mm_encoder_only"):
        TrtllmEncoder(TrtllmOptions(), ("--mm_encoder_only", "true"), MODEL_DIR, "double")
    with pytest.raises(ConfigError, match="no_such"):
        run_bounded(encoder("1.3.0rc22", World(), "--no_such", "1").start())
    with pytest.raises(ConfigError, match="GPU"):
        run_bounded(encoder("1.3.0rc22", World(gpus=0)).start())


def test_an_encoder_has_the_ability_to_encode_and_no_other() -> None:
    made = encoder("1.3.0rc22", World())
    assert isinstance(made, EncodeEngine)
    assert not isinstance(made, GenerateEngine | EmbedEngine)


# Whoever computes the prompt


@pytest.mark.parametrize("version", VERSIONS)
def test_a_whole_engine_computes_with_what_an_encoder_holds(version: str) -> None:
    async def body() -> None:
        world = World()
        async with encoded(version, world) as (_, params), running(made := engine(version, world, "whole")):
            assert made.capabilities.media_handles
            seen = await tokens_of(made, work(params))
            assert seen == await tokens_of(made, work(params))
            assert seen != await tokens_of(made, work(None)), "the image made a difference"

    run_bounded(body())


@pytest.mark.parametrize("version", VERSIONS)
def test_encoder_prefill_and_decode_agree_with_one_engine(version: str) -> None:
    async def body() -> None:
        world = World()
        parts = [engine(version, world, part) for part in ("whole", "prefill", "decode")]
        async with (
            encoded(version, world) as (_, params),
            running(parts[0]),
            running(parts[1]),
            running(parts[2]),
        ):
            whole = await tokens_of(parts[0], work(params))
            stream = parts[1].submit(work(params, 1, Produce()))
            outputs: list[Any] = []
            while read := await stream.read():
                outputs += read
            [ready] = [each for each in outputs if isinstance(each, HandoffReady)]
            sent = json.loads(json.dumps(ready.params))
            assert "multimodal_embedding_handles" not in sent, "the decode's engine refuses them"
            assert len(sent["prompt_token_ids"]) == len(PROMPT) + 16
            assert sent["mrope_position_ids_handle"] == {"method_key": 2, "storage_handle": "positions"}
            source = PrefillResult(disaggregated_params=sent)
            # The decode is sent the client's prompt and URLs; it goes on from the prefill's.
            assert whole == await tokens_of(parts[2], work(None, handoff=Consume(source=source)))
            assert any(isinstance(each, TokenDelta) for each in outputs)

    run_bounded(body())


def test_handles_that_are_gone_fail_the_request_and_nothing_else() -> None:
    async def body() -> None:
        world = World()
        async with running(made := engine("1.3.0rc22", world, "whole")):
            async with encoded("1.3.0rc22", world) as (_, params):
                pass
            with pytest.raises((EngineFailed, InvalidRequest)):
                await tokens_of(made, work(params))
            assert await tokens_of(made, work(None))

    run_bounded(body())


@pytest.mark.parametrize(
    "params", [{}, {"prompt": "x"}, {"prompt": "x", "multimodal_embedding_handles": 1}, {"sizes": ["1x1"]}]
)
def test_handles_of_another_engine_are_refused_by_name(params: dict[str, object]) -> None:
    async def body() -> None:
        async with running(made := engine("1.3.0rc22", World(), "whole")):
            with pytest.raises(InvalidRequest, match=r"encoder_result\.engine"):
                made.submit(work(params))

    run_bounded(body())


def test_a_file_is_not_taken_where_encode_workers_do_that() -> None:
    async def body() -> None:
        async with running(made := engine("1.3.0rc22", World(), "whole")):
            asked = msgspec.structs.replace(work(None), media=(MediaFile(modality="image", data=b""),))
            with pytest.raises(Unsupported, match="encode workers"):
                made.submit(asked)

    run_bounded(body())


def test_autodeploy_says_that_it_does_not_read_handles() -> None:
    made = TrtllmEngine(TrtllmOptions(backend="_autodeploy"), ARGUMENTS, Path(MODEL_DIR), "double", "whole")
    assert not made.capabilities.media_handles
