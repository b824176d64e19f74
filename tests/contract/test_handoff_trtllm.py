"""KV handoff that TensorRT-LLM does by itself: two adapters over doubles in one world, and their wire format."""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import msgspec
import pytest
from prometheus_client import CollectorRegistry

from baton.config.engines import TrtllmOptions
from baton.engines.echo.engine import MODEL_DIR
from baton.engines.trtllm.adapter import TrtllmEngine
from baton.engines.trtllm.cli_args import read_arguments
from baton.engines.trtllm.generate_args import GenerateArgs
from baton.engines.trtllm.launch import make_llm
from baton.engines.trtllm.llm_args import RequestType, plan_arguments
from baton.engines.trtllm.loras import Loras
from baton.engines.trtllm.params import Model
from baton.errors import Cancelled, InvalidRequest, PeerLost, Unsupported
from baton.models.defaults import SamplingDefaults
from baton.ports.engine import HandoffStyle, Work
from baton.protocol.codec import encode_chunk
from baton.protocol.handoff import Bootstrap, Consume, LocalProbe, PrefillResult, Produce
from baton.protocol.ids import new_request_id
from baton.protocol.outputs import Finished, FinishReason, HandoffReady, TokenDelta, Usage
from baton.protocol.requests import GenerateRequest, OutputOptions, Sampling, StopConditions
from baton.testing import eventually, run_bounded, running
from baton.testing.engine_session import Session, read_to_the_end
from tests.doubles.trtllm import World, make_library
from tests.unit.handlers.handoff_fakes import Harness

VERSIONS = ["1.2.1", "1.3.0rc22", "1.3.0rc25"]
ARGUMENTS = (
    "--max_batch_size=4",
    "--max_seq_len=4096",
    "--kv_cache_config.tokens_per_block=16",
    "--kv_cache_config.max_tokens=8192",
)

pytestmark = pytest.mark.parametrize("version", VERSIONS)


def engine(version: str, world: World, request_type: RequestType | None, *more: str) -> TrtllmEngine:
    library = make_library(version, world, CollectorRegistry())
    return TrtllmEngine(TrtllmOptions(poll_ms=20), (*ARGUMENTS, *more), MODEL_DIR, "double", request_type, library)


@asynccontextmanager
async def session(
    version: str, world: World, request_type: RequestType | None = None, *more: str
) -> AsyncIterator[Session]:
    started = engine(version, world, request_type, *more)
    async with running(started) as info:
        opened = Session(started, info)
        listening = asyncio.create_task(opened.listen())
        await eventually(lambda: opened.used_blocks() is not None)
        yield opened
    await listening


@asynccontextmanager
async def pair(version: str, world: World, *more: str) -> AsyncIterator[tuple[Session, Session]]:
    async with (
        session(version, world, "context_only", *more) as prefill,
        session(version, world, "generation_only", *more) as decode,
    ):
        yield prefill, decode


def work(prompt: tuple[int, ...], tokens: int = 12, handoff: Any = None, **changes: Any) -> Work:
    fields = {
        "request_id": new_request_id("handoff"),
        "token_ids": prompt,
        "max_tokens": tokens,
        "stop": StopConditions(ignore_eos=True),
        "sampling": Sampling(temperature=0.0),
        "eos_token_ids": (257,),
        "handoff": handoff,
    }
    return Work(**(fields | changes))


PROMPT = tuple(range(1, 71))


async def produce(prefill: Session, **changes: Any) -> PrefillResult:
    """Compute a prefill; return its result for the decode, through JSON as on the wire."""
    stream = prefill.engine.submit(work(PROMPT, 1, Produce(), **changes))
    outputs = []
    while read := await stream.read():
        outputs += read
    _, first, delta, end = outputs
    assert isinstance(first, HandoffReady)
    assert isinstance(delta, TokenDelta)
    assert isinstance(end, Finished)
    assert end.reason is FinishReason.LENGTH
    return PrefillResult(disaggregated_params=json.loads(json.dumps(first.params)))


def test_prefill_and_decode_generate_the_same_tokens_as_one_engine(version: str) -> None:
    async def body() -> None:
        async with pair(version, World()) as (prefill, decode), session(version, World()) as whole:
            alone = await read_to_the_end(whole.engine.submit(work(PROMPT)))
            for _ in range(3):
                result = await produce(prefill)
                answer = await read_to_the_end(decode.engine.submit(work(PROMPT, 12, Consume(source=result))))
                assert answer.tokens == alone.tokens
            await decode.as_at_the_start(5)
            await eventually(lambda: not prefill.busy())

    run_bounded(body())


def test_the_python_transceiver_hands_kv_off_by_endpoint_and_id(version: str) -> None:
    if version == "1.2.1":
        pytest.skip("it has the C++ transceiver only")

    async def body() -> None:
        runtime = "--cache_transceiver_config.transceiver_runtime=PYTHON"
        async with pair(version, World(), runtime) as (prefill, decode), session(version, World()) as whole:
            alone = await read_to_the_end(whole.engine.submit(work(PROMPT)))
            result = await produce(prefill)
            params = result.disaggregated_params
            assert "opaque_state" not in params
            assert {"ctx_info_endpoint", "ctx_dp_rank", "disagg_request_id"} <= params.keys()
            answer = await read_to_the_end(decode.engine.submit(work(PROMPT, 12, Consume(source=result))))
            assert answer.tokens == alone.tokens
            nowhere = {key: value for key, value in params.items() if key != "ctx_info_endpoint"}
            with pytest.raises(InvalidRequest, match="opaque_state or ctx_info_endpoint"):
                decode.engine.submit(work(PROMPT, 4, Consume(source=PrefillResult(disaggregated_params=nowhere))))

    run_bounded(body())


def test_the_usage_of_a_decode_counts_what_the_prefill_had_cached(version: str) -> None:
    async def body() -> None:
        async with pair(version, World()) as (prefill, decode):
            await produce(prefill)
            stop, sampling = StopConditions(max_tokens=4, ignore_eos=True), Sampling(temperature=0.0)
            request = GenerateRequest(token_ids=PROMPT, stop=stop, sampling=sampling)
            there, here = Harness(prefill.engine, info=prefill.info), Harness(decode.engine, info=decode.info)
            handed = [encode_chunk(chunk) async for chunk in there.prefill.generate(request, there.context)]
            [params] = [chunk["disaggregated_params"] for chunk in handed if "disaggregated_params" in chunk]
            details = handed[-1]["completion_usage"]["prompt_tokens_details"]
            assert details == {"cached_tokens": 64}
            result = PrefillResult(disaggregated_params=params, prompt_tokens_details=details)
            consuming = msgspec.structs.replace(request, prefill_result=result)
            chunks = [chunk async for chunk in here.decode.generate(consuming, here.context)]
            assert chunks[-1].usage == Usage(len(PROMPT), 4, cached_tokens=64)
            there.lease.end.set_result(None)

    run_bounded(body())


def test_d05_log_probabilities_of_the_first_token_are_handed_off(version: str) -> None:
    async def body() -> None:
        async with pair(version, World()) as (prefill, decode), session(version, World()) as whole:
            options = {"output": OutputOptions(logprobs=2)}
            result = await produce(prefill, **options)
            logprobs = result.disaggregated_params.get("first_gen_log_probs")
            if version == "1.2.1":
                assert logprobs is None
            else:
                ((first, second),) = logprobs
                assert {first["rank"], second["rank"]} == {1, 2}
                assert set(first) == {"token_id", "logprob", "rank"}
            stream = decode.engine.submit(work(PROMPT, 12, Consume(source=result), **options))
            alone = whole.engine.submit(work(PROMPT, **options))
            assert await scores(stream) == pytest.approx(await scores(alone))

    run_bounded(body())


def test_a_decode_continues_from_the_kv_of_its_parameters(version: str) -> None:
    async def body() -> None:
        async with pair(version, World()) as (prefill, decode):
            result = await produce(prefill)
            good = result.disaggregated_params
            wrong = [good | {"opaque_state": "AAAA"}, good | {"first_gen_tokens": [7]}]
            for params in wrong:
                consume = Consume(source=PrefillResult(disaggregated_params=params))
                with pytest.raises(PeerLost):
                    await read_to_the_end(decode.engine.submit(work(PROMPT, 4, consume)))
            result = await produce(prefill)
            assert await read_to_the_end(decode.engine.submit(work(PROMPT, 4, Consume(source=result))))
            await decode.as_at_the_start(5)

    run_bounded(body())


@pytest.mark.parametrize(
    ("change", "names"),
    [
        ({"opaque_state": "not base64!"}, "opaque_state"),
        ({"opaque_state": None}, "opaque_state"),
        ({"ctx_request_id": "seven"}, "ctx_request_id"),
        ({"no_such_field": 1}, "no_such_field"),
    ],
)
def test_wrong_handoff_parameters_are_refused_by_name(version: str, change: dict[str, object], names: str) -> None:
    async def body() -> None:
        async with pair(version, World()) as (prefill, decode):
            params = (await produce(prefill)).disaggregated_params | {"worker_id": 5} | change
            with pytest.raises(InvalidRequest, match=names):
                decode.engine.submit(work(PROMPT, 4, Consume(source=PrefillResult(disaggregated_params=params))))
            assert decode.busy() == 0

    run_bounded(body())


def test_submit_does_not_change_its_work(version: str) -> None:
    async def body() -> None:
        async with pair(version, World()) as (prefill, decode):
            result = await produce(prefill)
            before = json.dumps(result.disaggregated_params)
            request = work(PROMPT, 4, Consume(source=result))
            copy = msgspec.structs.asdict(request)
            await read_to_the_end(decode.engine.submit(request))
            assert json.dumps(result.disaggregated_params) == before
            assert msgspec.structs.asdict(request) == copy

    run_bounded(body())


@pytest.mark.parametrize("phase", ["at once", "in transfer", "decoding"])
def test_d10_abort_of_a_decode_waits_for_the_transfer_of_its_kv(version: str, phase: str) -> None:
    async def body() -> None:
        world = World(transfer_steps=40)
        async with pair(version, world) as (prefill, decode):
            result = await produce(prefill)
            request = work(PROMPT, 2000, Consume(source=result))
            stream = decode.engine.submit(request)
            if phase == "in transfer":
                await eventually(lambda: decode.engine.progress().running > 0)
            if phase == "decoding":
                assert await stream.read()
            aborting = asyncio.create_task(decode.engine.abort(request.request_id))
            with pytest.raises(Cancelled):
                await asyncio.wait_for(read_to_the_end(stream), 0.03)  # the client does not wait for the engine
            await asyncio.gather(aborting, decode.engine.abort(request.request_id))
            await decode.as_at_the_start(5)
            assert (world.aborted_early, world.blocks_leaked) == (0, 0)

    run_bounded(body())


def test_the_double_leaks_blocks_when_a_transfer_is_aborted(version: str) -> None:
    """So that the test before can fail."""

    async def body() -> None:
        world = World(transfer_steps=40)
        library = make_library(version, world, CollectorRegistry())
        options = TrtllmOptions()
        arguments = plan_arguments(options, read_arguments(ARGUMENTS), MODEL_DIR, "generation_only")
        llm: Any = make_llm(library, options, arguments)
        model = Model(vocab_size=258, defaults=SamplingDefaults())
        generate_args = GenerateArgs(library, model, Loras(), disaggregated=True, context=4096)
        async with session(version, world, "context_only") as prefill:
            result = await produce(prefill)
            raw = llm.generate_async(**generate_args.build(work(PROMPT, 50, Consume(source=result))))
            await asyncio.sleep(0.01)
            raw.abort()
            async for _ in raw:
                pass
            assert world.blocks_leaked > 0
        llm.shutdown()

    run_bounded(body())


def test_kv_that_is_not_read_is_freed_after_its_timeout(version: str) -> None:
    async def body() -> None:
        world = World()
        limit = "--cache_transceiver_config.kv_transfer_timeout_ms=200"
        async with pair(version, world, limit) as (prefill, decode):
            result = await produce(prefill)
            await asyncio.sleep(0.5)
            with pytest.raises(PeerLost):
                await read_to_the_end(decode.engine.submit(work(PROMPT, 4, Consume(source=result))))

    run_bounded(body())


def test_a_prefill_may_be_aborted_at_any_time(version: str) -> None:
    async def body() -> None:
        async with pair(version, World()) as (prefill, _):
            for wait in (False, True):
                request = work(PROMPT, 1, Produce())
                stream = prefill.engine.submit(request)
                if wait:
                    await read_to_the_end(stream)
                await asyncio.gather(*(prefill.engine.abort(request.request_id) for _ in range(2)))
                if not wait:
                    with pytest.raises(Cancelled):
                        await read_to_the_end(stream)
            assert prefill.busy() == 0
            assert (await produce(prefill)).disaggregated_params

    run_bounded(body())


@pytest.mark.parametrize("request_type", ["context_only", "generation_only"])
def test_a_probe_needs_no_peer_and_hands_nothing_off(version: str, request_type: RequestType) -> None:
    async def body() -> None:
        async with session(version, World(), request_type) as alone:
            for _ in range(5):
                outputs = []
                stream = alone.engine.submit(work((1,), 1, LocalProbe()))
                while read := await stream.read():
                    outputs += read
                assert not [output for output in outputs if isinstance(output, HandoffReady)]
            await eventually(lambda: not alone.busy())

    run_bounded(body())


def test_a_generation_only_engine_can_compute_a_prompt(version: str) -> None:
    async def body() -> None:
        async with session(version, World(), "generation_only") as decode, session(version, World()) as whole:
            assert not decode.engine.capabilities.needs_kv
            assert decode.engine.capabilities.handoff is HandoffStyle.LATE
            here = await read_to_the_end(decode.engine.submit(work(PROMPT)))
            assert here.tokens == (await read_to_the_end(whole.engine.submit(work(PROMPT)))).tokens

    run_bounded(body())


def test_work_that_cannot_be_handed_off_is_refused(version: str) -> None:
    async def body() -> None:
        early = Consume(source=Bootstrap(host="elsewhere", port=1, room=1))
        async with pair(version, World()) as (prefill, decode):
            with pytest.raises(InvalidRequest, match="one token"):
                prefill.engine.submit(work(PROMPT, 2, Produce()))
            with pytest.raises(InvalidRequest, match="one choice"):
                prefill.engine.submit(work(PROMPT, 1, Produce(), sampling=Sampling(n=2)))
            with pytest.raises(Unsupported, match="bootstrap_info"):
                decode.engine.submit(work(PROMPT, 2, early))
            result = await produce(prefill)
            with pytest.raises(Unsupported, match="n:"):
                decode.engine.submit(work(PROMPT, 2, Consume(source=result), sampling=Sampling(n=2)))
            await eventually(lambda: not prefill.busy() + decode.busy())

    run_bounded(body())


async def scores(stream: Any) -> list[float]:
    found: list[float] = []
    while outputs := await stream.read():
        for output in outputs:
            if isinstance(output, TokenDelta):
                assert output.logprobs is not None
                found += output.logprobs.chosen
    return found
