"""KV that TensorRT-LLM moves by itself: two adapters over doubles of one world, and what passes between them."""

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
from baton.errors import Cancelled, InvalidRequest, PeerLost, Unsupported
from baton.ports.engine import HandoffStyle, Work
from baton.protocol.handoff import Bootstrap, Consume, LocalProbe, PrefillResult, Produce
from baton.protocol.ids import new_request_id
from baton.protocol.outputs import Finished, FinishReason, HandoffReady, TokenDelta
from baton.protocol.requests import OutputOptions, Sampling, StopConditions
from baton.testing import eventually, run_bounded, running
from baton.testing.engine_session import Session, read_to_the_end
from tests.doubles.trtllm import World, make_library

VERSIONS = ["1.2.1", "1.3.0rc22", "1.3.0rc25"]
ARGUMENTS = (
    "--max_batch_size=4",
    "--max_seq_len=4096",
    "--kv_cache_config.tokens_per_block=16",
    "--kv_cache_config.max_tokens=8192",
)

pytestmark = pytest.mark.parametrize("version", VERSIONS)


def engine(version: str, world: World, part: str, *more: str) -> TrtllmEngine:
    library = make_library(version, world, CollectorRegistry())
    return TrtllmEngine(TrtllmOptions(poll_ms=20), (*ARGUMENTS, *more), MODEL_DIR, "double", part, library)


@asynccontextmanager
async def session(version: str, world: World, part: str, *more: str) -> AsyncIterator[Session]:
    made = engine(version, world, part, *more)
    async with running(made) as info:
        told = Session(made, info)
        listening = asyncio.create_task(told.listen())
        await eventually(lambda: told.used_blocks() is not None)
        yield told
    await listening


@asynccontextmanager
async def pair(version: str, world: World, *more: str) -> AsyncIterator[tuple[Session, Session]]:
    async with session(version, world, "prefill", *more) as prefill, session(version, world, "decode") as decode:
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
    """Do a prefill; return what reaches the decode, through JSON as on the wire."""
    stream = prefill.engine.submit(work(PROMPT, 1, Produce(), **changes))
    outputs = []
    while read := await stream.read():
        outputs += read
    first, delta, end = outputs
    assert isinstance(first, HandoffReady)
    assert isinstance(delta, TokenDelta)
    assert isinstance(end, Finished)
    assert end.reason is FinishReason.LENGTH
    return PrefillResult(disaggregated_params=json.loads(json.dumps(first.params)))


def test_an_answer_from_elsewhere_is_the_answer_of_one_engine(version: str) -> None:
    async def body() -> None:
        async with pair(version, World()) as (prefill, decode), session(version, World(), "whole") as whole:
            alone = await read_to_the_end(whole.engine.submit(work(PROMPT)))
            for _ in range(3):
                result = await produce(prefill)
                answer = await read_to_the_end(decode.engine.submit(work(PROMPT, 12, Consume(source=result))))
                assert answer.tokens == alone.tokens
            await decode.as_at_the_start(5)
            await eventually(lambda: not prefill.busy())

    run_bounded(body())


def test_d05_log_probabilities_of_the_first_token_cross_as_json(version: str) -> None:
    async def body() -> None:
        async with pair(version, World()) as (prefill, decode), session(version, World(), "whole") as whole:
            asked = {"output": OutputOptions(logprobs=2)}
            result = await produce(prefill, **asked)
            told = result.disaggregated_params.get("first_gen_log_probs")
            if version == "1.2.1":
                assert told is None
            else:
                ((first, second),) = told
                assert {first["rank"], second["rank"]} == {1, 2}
                assert set(first) == {"token_id", "logprob", "rank"}
            stream = decode.engine.submit(work(PROMPT, 12, Consume(source=result), **asked))
            alone = whole.engine.submit(work(PROMPT, **asked))
            assert await scores(stream) == pytest.approx(await scores(alone))

    run_bounded(body())


def test_it_is_the_handed_over_kv_that_is_gone_on_from(version: str) -> None:
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
def test_a_result_that_makes_no_sense_is_refused_by_name(version: str, change: dict[str, object], names: str) -> None:
    async def body() -> None:
        async with pair(version, World()) as (prefill, decode):
            params = (await produce(prefill)).disaggregated_params | {"worker_id": 5} | change
            with pytest.raises(InvalidRequest, match=names):
                decode.engine.submit(work(PROMPT, 4, Consume(source=PrefillResult(disaggregated_params=params))))
            assert decode.busy() == 0

    run_bounded(body())


def test_what_was_given_is_not_changed(version: str) -> None:
    async def body() -> None:
        async with pair(version, World()) as (prefill, decode):
            result = await produce(prefill)
            before = json.dumps(result.disaggregated_params)
            asked = work(PROMPT, 4, Consume(source=result))
            copy = msgspec.structs.asdict(asked)
            await read_to_the_end(decode.engine.submit(asked))
            assert json.dumps(result.disaggregated_params) == before
            assert msgspec.structs.asdict(asked) == copy

    run_bounded(body())


@pytest.mark.parametrize("phase", ["at once", "on its way", "decoding"])
def test_d10_abort_waits_for_the_kv_and_has_one_reader(version: str, phase: str) -> None:
    async def body() -> None:
        world = World(transfer_steps=40)
        async with pair(version, world) as (prefill, decode):
            result = await produce(prefill)
            asked = work(PROMPT, 2000, Consume(source=result))
            stream = decode.engine.submit(asked)
            if phase == "on its way":
                await eventually(lambda: decode.engine.progress().running > 0)
            if phase == "decoding":
                assert await stream.read()
            aborting = asyncio.create_task(decode.engine.abort(asked.request_id))
            with pytest.raises(Cancelled):
                await asyncio.wait_for(read_to_the_end(stream), 0.03)  # the client does not wait for the engine
            await asyncio.gather(aborting, decode.engine.abort(asked.request_id))
            await decode.as_at_the_start(5)
            assert (world.aborted_early, world.blocks_leaked) == (0, 0)

    run_bounded(body())


def test_the_double_does_lose_blocks_when_kv_on_its_way_is_aborted(version: str) -> None:
    """So that the test before can fail."""

    async def body() -> None:
        world = World(transfer_steps=40)
        library = make_library(version, world, CollectorRegistry())
        made: list[Any] = []
        spied = msgspec.structs.replace(library, llm=lambda **given: made.append(library.llm(**given)) or made[0])
        decode = TrtllmEngine(TrtllmOptions(), ARGUMENTS, MODEL_DIR, "double", "decode", spied)
        async with session(version, world, "prefill") as prefill, running(decode):
            result = await produce(prefill)
            asked = work(PROMPT, 50, Consume(source=result))
            assert decode._calls is not None
            raw = made[0].generate_async(**decode._calls.fields(asked))
            await asyncio.sleep(0.01)
            raw.abort()
            async for _ in raw:
                pass
            assert world.blocks_leaked > 0

    run_bounded(body())


def test_kv_that_nobody_takes_is_given_up_after_its_time(version: str) -> None:
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
                asked = work(PROMPT, 1, Produce())
                stream = prefill.engine.submit(asked)
                if wait:
                    await read_to_the_end(stream)
                await asyncio.gather(*(prefill.engine.abort(asked.request_id) for _ in range(2)))
                if not wait:
                    with pytest.raises(Cancelled):
                        await read_to_the_end(stream)
            assert prefill.busy() == 0
            assert (await produce(prefill)).disaggregated_params

    run_bounded(body())


@pytest.mark.parametrize("part", ["prefill", "decode"])
def test_a_trial_does_one_token_alone_and_leaves_nothing(version: str, part: str) -> None:
    async def body() -> None:
        async with session(version, World(), part) as alone:
            for _ in range(5):
                outputs = []
                stream = alone.engine.submit(work((1,), 1, LocalProbe()))
                while read := await stream.read():
                    outputs += read
                assert not [output for output in outputs if isinstance(output, HandoffReady)]
            await eventually(lambda: not alone.busy())

    run_bounded(body())


def test_a_decode_can_compute_a_prompt_itself(version: str) -> None:
    async def body() -> None:
        async with session(version, World(), "decode") as decode, session(version, World(), "whole") as whole:
            assert not decode.engine.capabilities.needs_kv
            assert decode.engine.capabilities.handoff is HandoffStyle.LATE
            here = await read_to_the_end(decode.engine.submit(work(PROMPT)))
            assert here.tokens == (await read_to_the_end(whole.engine.submit(work(PROMPT)))).tokens

    run_bounded(body())


def test_what_cannot_be_handed_over_is_refused(version: str) -> None:
    async def body() -> None:
        early = Consume(source=Bootstrap(host="elsewhere", port=1, room=1))
        async with pair(version, World()) as (prefill, decode), session(version, World(), "whole") as whole:
            with pytest.raises(InvalidRequest, match="one token"):
                prefill.engine.submit(work(PROMPT, 2, Produce()))
            with pytest.raises(InvalidRequest, match="one choice"):
                prefill.engine.submit(work(PROMPT, 1, Produce(), sampling=Sampling(n=2)))
            with pytest.raises(Unsupported, match="bootstrap_info"):
                decode.engine.submit(work(PROMPT, 2, early))
            with pytest.raises(Unsupported, match="handoff"):
                whole.engine.submit(work(PROMPT, 1, Produce()))
            result = await produce(prefill)
            with pytest.raises(Unsupported, match="n:"):
                decode.engine.submit(work(PROMPT, 2, Consume(source=result), sampling=Sampling(n=2)))
            await eventually(lambda: not prefill.busy() + decode.busy() + whole.busy())

    run_bounded(body())


async def scores(stream: Any) -> list[float]:
    found: list[float] = []
    while outputs := await stream.read():
        for output in outputs:
            if isinstance(output, TokenDelta):
                assert output.logprobs is not None
                found += output.logprobs.chosen
    return found
