"""Engines that move KV themselves: their rooms carry the address, the confirmation and the errors."""

import asyncio
from collections.abc import AsyncGenerator

import msgspec
import pytest

from baton.errors import BatonError, Cancelled, EngineFailed, PeerLost, Unsupported
from baton.handlers.tickets import params_of
from baton.ports.engine import Capabilities, HandoffStyle
from baton.protocol.handoff import Bootstrap, Consume, PrefillResult, Produce, Ticket
from baton.protocol.lifecycle import State
from baton.protocol.outputs import Chunk, Finished, FinishReason, HandoffReady, TokenDelta, Usage
from baton.protocol.requests import GenerateRequest, Routing, StopConditions
from baton.testing import ScriptedEngine, eventually, run_bounded
from baton.testing.fakes import SCRIPTED_INFO, Script
from tests.unit.handlers.handoff_fakes import FakeProducer, Harness

BOOTSTRAP = Bootstrap(host="10.0.0.1", port=4000, room=5, handoff_id=bytes(range(16)))
TICKET = Ticket(host="10.0.0.1", port=4000, room=5, secret=bytes(range(16)))
EARLY = msgspec.structs.replace(SCRIPTED_INFO, handoff_host="10.0.0.9", handoff_port=8998)
LATE = SCRIPTED_INFO
ONE: Script = [TokenDelta([9]), Finished(FinishReason.LENGTH)]
OPAQUE = {"opaque_state": "AAEC", "ctx_request_id": 7}


def request(bootstrap: Bootstrap | None = BOOTSTRAP, late: dict[str, object] | None = None) -> GenerateRequest:
    result = PrefillResult(disaggregated_params=late) if late is not None else None
    stop = StopConditions(max_tokens=10)
    return GenerateRequest(token_ids=(1, 2, 3), stop=stop, bootstrap=bootstrap, prefill_result=result)


async def collect(chunks: AsyncGenerator[Chunk, None]) -> list[Chunk]:
    return [chunk async for chunk in chunks]


def test_an_early_prefill_passes_its_engine_the_bootstrap_address() -> None:
    async def body() -> None:
        harness = Harness(ScriptedEngine(ONE), info=EARLY)
        reading = asyncio.create_task(collect(harness.prefill.generate(request(), harness.context)))
        await eventually(lambda: bool(harness.producer.leases))
        [work] = harness.engine.submitted
        assert work.handoff == Produce(bootstrap=Bootstrap(host="10.0.0.9", port=8998, room=5))
        await asyncio.sleep(0.05)
        assert not reading.done(), "the request lasts until decode has the KV"
        harness.lease.end.set_result(None)
        assert (await reading)[0].disaggregated_params == {}
        assert harness.ended() is State.COMPLETED

    run_bounded(body())


def test_a_prefill_without_a_room_chooses_one_and_sends_it_before_anything_else() -> None:
    """Behind a router the frontend cannot know the worker. It passes what the first chunk says to decode."""

    async def body() -> None:
        harness = Harness(ScriptedEngine([asyncio.Event()]), info=EARLY)
        chunks = harness.prefill.generate(request(None), harness.context)
        first = await anext(chunks)
        [work] = harness.engine.submitted
        [(ticket, _)] = harness.producer.offers
        assert work.handoff == Produce(bootstrap=Bootstrap(host="10.0.0.9", port=8998, room=ticket.room))
        assert (ticket.host, ticket.port, len(ticket.secret)) == ("127.0.0.1", 4000, 16)
        place = msgspec.convert(first.disaggregated_params, Bootstrap)
        # The frontend adds an id of its own, which the prefill worker never gets to know.
        promoted = msgspec.structs.replace(place, handoff_id=bytes(16))
        decode = Harness(ScriptedEngine(ONE), info=EARLY)
        reading = asyncio.create_task(collect(decode.decode.generate(request(promoted), decode.context)))
        await eventually(lambda: bool(decode.consumer.claims))
        assert decode.consumer.tickets == [ticket]
        decode.claim.accepted.set_result(("10.0.0.9", 8998))
        await reading
        harness.lease.end.set_result(None)
        await chunks.aclose()

    run_bounded(body())


def test_a_room_chosen_by_prefill_names_a_data_parallel_rank() -> None:
    async def body() -> None:
        engine = ScriptedEngine([asyncio.Event()], capabilities=Capabilities(handoff=HandoffStyle.EARLY, dp_size=4))
        for rank in (None, 0, 3):
            harness = Harness(engine, info=EARLY)
            routed = msgspec.structs.replace(request(None), routing=Routing(dp_rank=rank))
            chunks = harness.prefill.generate(routed, harness.context)
            await anext(chunks)
            [(ticket, _)] = harness.producer.offers
            assert engine.submitted[-1].dp_rank == ticket.room % 4
            assert rank in (None, ticket.room % 4)
            await chunks.aclose()

    run_bounded(body())


def test_d15_a_failed_prefill_fails_its_lease() -> None:
    async def body() -> None:
        harness = Harness(ScriptedEngine([0.01, EngineFailed("out of memory")]), info=EARLY)
        with pytest.raises(EngineFailed):
            await collect(harness.prefill.generate(request(), harness.context))
        assert isinstance(harness.lease.failed, EngineFailed)

    run_bounded(body())


def test_a_cancelled_decode_ends_the_prefill() -> None:
    async def body() -> None:
        harness = Harness(ScriptedEngine([asyncio.Event()]), info=EARLY)
        reading = asyncio.create_task(collect(harness.prefill.generate(request(), harness.context)))
        await eventually(lambda: bool(harness.producer.leases))
        harness.lease.lose(Cancelled("cancelled"))
        assert (await reading)[-1].finish_reason is FinishReason.LENGTH
        assert harness.freed()

    run_bounded(body())


def test_a_decode_gets_the_bootstrap_address_and_confirms_the_first_output() -> None:
    async def body() -> None:
        first, second = asyncio.Event(), asyncio.Event()
        harness = Harness(ScriptedEngine([first, *ONE[:1], second, *ONE[1:]]), info=EARLY)
        reading = asyncio.create_task(collect(harness.decode.generate(request(), harness.context)))
        await eventually(lambda: bool(harness.consumer.claims))
        assert harness.consumer.tickets == [TICKET]
        assert harness.engine.submitted == [], "the address is not known yet"
        harness.claim.accepted.set_result(("10.0.0.9", 8998))
        await eventually(lambda: bool(harness.engine.submitted))
        assert harness.engine.submitted[0].handoff == Consume(source=Bootstrap(host="10.0.0.9", port=8998, room=5))
        assert harness.claim.was_taken == 0
        first.set()
        await eventually(lambda: harness.claim.was_taken == 1)
        second.set()
        assert (await reading)[-1].finish_reason is FinishReason.LENGTH
        assert harness.claim.closed >= 1
        assert harness.consumer.declined == []

    run_bounded(body())


@pytest.mark.parametrize("accepted", [False, True])
@pytest.mark.parametrize("error", [PeerLost("lost"), EngineFailed("out of memory")])
def test_d15_a_decode_whose_prefill_fails_does_not_wait_for_it(accepted: bool, error: BatonError) -> None:
    async def body() -> None:
        harness = Harness(ScriptedEngine([asyncio.Event()]), info=EARLY)
        reading = asyncio.create_task(collect(harness.decode.generate(request(), harness.context)))
        await eventually(lambda: bool(harness.consumer.claims))
        if accepted:
            harness.claim.accepted.set_result(("10.0.0.9", 8998))
            await eventually(lambda: bool(harness.engine.submitted))
        harness.claim.on_lost(error)
        with pytest.raises(type(error), match=error.message):
            await reading
        assert harness.freed()
        assert harness.claim.closed >= 1

    run_bounded(body())


@pytest.mark.parametrize("accepted", [False, True])
def test_cancellation_closes_the_claim_in_every_phase(accepted: bool) -> None:
    async def body() -> None:
        harness = Harness(ScriptedEngine([asyncio.Event()]), info=EARLY)
        reading = asyncio.create_task(collect(harness.decode.generate(request(), harness.context)))
        await eventually(lambda: bool(harness.consumer.claims))
        if accepted:
            harness.claim.accepted.set_result(("10.0.0.9", 8998))
            await eventually(lambda: bool(harness.engine.submitted))
        harness.context.cancel()
        with pytest.raises(Cancelled):
            await reading
        assert harness.claim.closed >= 1
        assert harness.freed()

    run_bounded(body())


def test_work_that_the_engine_refuses_closes_the_claim() -> None:
    async def body() -> None:
        harness = Harness(ScriptedEngine(Unsupported("no")), info=EARLY)
        reading = asyncio.create_task(collect(harness.decode.generate(request(), harness.context)))
        await eventually(lambda: bool(harness.consumer.claims))
        harness.claim.accepted.set_result(("10.0.0.9", 8998))
        with pytest.raises(Unsupported):
            await reading
        assert harness.claim.closed >= 1

    run_bounded(body())


def test_a_late_prefill_wraps_its_engines_parameters_and_holds_the_kv() -> None:
    async def body() -> None:
        harness = Harness(ScriptedEngine([HandoffReady(OPAQUE), *ONE]), info=LATE)
        chunks = await collect(harness.prefill.generate(request(None), harness.context))
        [(ticket, _)] = harness.producer.offers
        assert chunks[0].disaggregated_params == params_of(ticket, OPAQUE)
        assert chunks[-1].finish_reason is FinishReason.LENGTH
        await asyncio.sleep(0.05)
        assert harness.engine.aborted == [], "the engine still holds it"
        harness.lease.end.set_result(None)
        await eventually(harness.freed)

    run_bounded(body())


def test_a_late_decode_passes_its_engine_the_prefill_engines_parameters() -> None:
    async def body() -> None:
        harness = Harness(ScriptedEngine(ONE), info=LATE)
        late = params_of(TICKET, OPAQUE)
        chunks = await collect(harness.decode.generate(request(None, late), harness.context))
        assert harness.engine.submitted[0].handoff == Consume(source=PrefillResult(disaggregated_params=OPAQUE))
        assert harness.consumer.tickets == [TICKET]
        assert harness.claim.was_taken == 1
        assert chunks[-1].finish_reason is FinishReason.LENGTH

    run_bounded(body())


@pytest.mark.parametrize(
    ("details", "expected"),
    [({"cached_tokens": 2}, 2), ({"cached_tokens": 0}, 0), (None, 1), ({}, 1), ({"cached_tokens": None}, 1)],
)
def test_a_late_decode_counts_what_the_prefill_had_cached(details: dict[str, object] | None, expected: int) -> None:
    async def body() -> None:
        harness = Harness(ScriptedEngine([TokenDelta([9]), Finished(FinishReason.LENGTH, cached_tokens=1)]), info=LATE)
        result = PrefillResult(disaggregated_params=params_of(TICKET, OPAQUE), prompt_tokens_details=details)
        asked = msgspec.structs.replace(request(None), prefill_result=result)
        chunks = await collect(harness.decode.generate(asked, harness.context))
        assert chunks[-1].usage == Usage(3, 1, cached_tokens=expected)

    run_bounded(body())


def test_an_engine_that_cannot_compute_prompts_refuses_a_request_without_kv() -> None:
    async def body() -> None:
        engine = ScriptedEngine(ONE, capabilities=Capabilities(needs_kv=True))
        harness = Harness(engine, FakeProducer(), info=EARLY)
        with pytest.raises(Unsupported, match="prefill workers"):
            await collect(harness.decode.generate(request(None), harness.context))
        assert engine.submitted == []

    run_bounded(body())
