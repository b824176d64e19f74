"""Engines that move KV by themselves: their rooms carry what must be said, and nothing else."""

import asyncio
from collections.abc import AsyncGenerator

import msgspec
import pytest

from baton.errors import BatonError, Cancelled, EngineFailed, PeerLost, Unsupported
from baton.handlers.tickets import params_of
from baton.ports.engine import Capabilities
from baton.protocol.handoff import Bootstrap, Consume, PrefillResult, Produce, Ticket
from baton.protocol.lifecycle import State
from baton.protocol.outputs import Chunk, Finished, FinishReason, HandoffReady, TokenDelta
from baton.protocol.requests import GenerateRequest, StopConditions
from baton.testing import ScriptedEngine, eventually, run_bounded
from baton.testing.fakes import SCRIPTED_INFO, Script
from tests.unit.handlers.handoff_fakes import Bench, FakeProducer

GIVEN = Bootstrap(host="10.0.0.1", port=4000, room=5, handoff_id=bytes(range(16)))
TICKET = Ticket(host="10.0.0.1", port=4000, room=5, secret=bytes(range(16)))
EARLY = msgspec.structs.replace(SCRIPTED_INFO, handoff_host="10.0.0.9", handoff_port=8998)
LATE = SCRIPTED_INFO
ONE: Script = [TokenDelta([9]), Finished(FinishReason.LENGTH)]
OPAQUE = {"opaque_state": "AAEC", "ctx_request_id": 7}


def request(bootstrap: Bootstrap | None = GIVEN, late: dict[str, object] | None = None) -> GenerateRequest:
    result = PrefillResult(disaggregated_params=late) if late is not None else None
    stop = StopConditions(max_tokens=10)
    return GenerateRequest(token_ids=(1, 2, 3), stop=stop, bootstrap=bootstrap, prefill_result=result)


async def collect(chunks: AsyncGenerator[Chunk, None]) -> list[Chunk]:
    return [chunk async for chunk in chunks]


def test_an_early_prefill_sends_its_engine_to_the_engines_own_meeting_place() -> None:
    async def body() -> None:
        bench = Bench(ScriptedEngine(ONE), info=EARLY)
        reading = asyncio.create_task(collect(bench.prefill.generate(request(), bench.context)))
        await eventually(lambda: bool(bench.producer.leases))
        [work] = bench.engine.submitted
        assert work.handoff == Produce(bootstrap=Bootstrap(host="10.0.0.9", port=8998, room=5))
        await asyncio.sleep(0.05)
        assert not reading.done(), "the call lasts until decode has the KV"
        bench.lease.end.set_result(None)
        assert (await reading)[0].disaggregated_params == {}
        assert bench.ended() is State.COMPLETED

    run_bounded(body())


def test_d15_a_prefill_that_fails_tells_its_decode() -> None:
    async def body() -> None:
        bench = Bench(ScriptedEngine([0.01, EngineFailed("out of memory")]), info=EARLY)
        with pytest.raises(EngineFailed):
            await collect(bench.prefill.generate(request(), bench.context))
        assert isinstance(bench.lease.failed, EngineFailed)

    run_bounded(body())


def test_a_decode_that_leaves_ends_the_prefill() -> None:
    async def body() -> None:
        bench = Bench(ScriptedEngine([asyncio.Event()]), info=EARLY)
        reading = asyncio.create_task(collect(bench.prefill.generate(request(), bench.context)))
        await eventually(lambda: bool(bench.producer.leases))
        bench.lease.lose(Cancelled("the client left"))
        assert (await reading)[-1].finish_reason is FinishReason.LENGTH
        assert bench.freed()

    run_bounded(body())


def test_a_decode_asks_where_the_engines_meet_and_says_when_they_have_met() -> None:
    async def body() -> None:
        first, second = asyncio.Event(), asyncio.Event()
        bench = Bench(ScriptedEngine([first, *ONE[:1], second, *ONE[1:]]), info=EARLY)
        reading = asyncio.create_task(collect(bench.decode.generate(request(), bench.context)))
        await eventually(lambda: bool(bench.consumer.loans))
        assert bench.consumer.tickets == [TICKET]
        assert bench.engine.submitted == [], "the engine does not know yet where to go"
        bench.claim.met.set_result(("10.0.0.9", 8998))
        await eventually(lambda: bool(bench.engine.submitted))
        assert bench.engine.submitted[0].handoff == Consume(source=Bootstrap(host="10.0.0.9", port=8998, room=5))
        assert bench.claim.was_taken == 0
        first.set()
        await eventually(lambda: bench.claim.was_taken == 1)
        second.set()
        assert (await reading)[-1].finish_reason is FinishReason.LENGTH
        assert bench.claim.closed >= 1
        assert bench.consumer.declined == []

    run_bounded(body())


@pytest.mark.parametrize("met", [False, True])
@pytest.mark.parametrize("error", [PeerLost("gone"), EngineFailed("out of memory")])
def test_d15_a_decode_whose_prefill_fails_does_not_wait_for_it(met: bool, error: BatonError) -> None:
    async def body() -> None:
        bench = Bench(ScriptedEngine([asyncio.Event()]), info=EARLY)
        reading = asyncio.create_task(collect(bench.decode.generate(request(), bench.context)))
        await eventually(lambda: bool(bench.consumer.loans))
        if met:
            bench.claim.met.set_result(("10.0.0.9", 8998))
            await eventually(lambda: bool(bench.engine.submitted))
        bench.claim.on_lost(error)
        with pytest.raises(type(error), match=error.message):
            await reading
        assert bench.freed()
        assert bench.claim.closed >= 1

    run_bounded(body())


@pytest.mark.parametrize("met", [False, True])
def test_a_client_that_leaves_closes_the_loan_in_every_phase(met: bool) -> None:
    async def body() -> None:
        bench = Bench(ScriptedEngine([asyncio.Event()]), info=EARLY)
        reading = asyncio.create_task(collect(bench.decode.generate(request(), bench.context)))
        await eventually(lambda: bool(bench.consumer.loans))
        if met:
            bench.claim.met.set_result(("10.0.0.9", 8998))
            await eventually(lambda: bool(bench.engine.submitted))
        bench.context.cancel()
        with pytest.raises(Cancelled):
            await reading
        assert bench.claim.closed >= 1
        assert bench.freed()

    run_bounded(body())


def test_an_engine_that_refuses_the_work_gives_the_room_back() -> None:
    async def body() -> None:
        bench = Bench(ScriptedEngine(Unsupported("no")), info=EARLY)
        reading = asyncio.create_task(collect(bench.decode.generate(request(), bench.context)))
        await eventually(lambda: bool(bench.consumer.loans))
        bench.claim.met.set_result(("10.0.0.9", 8998))
        with pytest.raises(Unsupported):
            await reading
        assert bench.claim.closed >= 1

    run_bounded(body())


def test_a_late_prefill_wraps_what_its_engine_says_and_keeps_the_kv_until_it_is_taken() -> None:
    async def body() -> None:
        bench = Bench(ScriptedEngine([HandoffReady(OPAQUE), *ONE]), info=LATE)
        chunks = await collect(bench.prefill.generate(request(None), bench.context))
        [(ticket, _)] = bench.producer.lent
        assert chunks[0].disaggregated_params == params_of(ticket, OPAQUE)
        assert chunks[-1].finish_reason is FinishReason.LENGTH
        await asyncio.sleep(0.05)
        assert bench.engine.aborted == [], "the engine still holds it"
        bench.lease.end.set_result(None)
        await eventually(bench.freed)

    run_bounded(body())


def test_a_late_decode_gives_its_engine_what_the_other_engine_said() -> None:
    async def body() -> None:
        bench = Bench(ScriptedEngine(ONE), info=LATE)
        late = params_of(TICKET, OPAQUE)
        chunks = await collect(bench.decode.generate(request(None, late), bench.context))
        assert bench.engine.submitted[0].handoff == Consume(source=PrefillResult(disaggregated_params=OPAQUE))
        assert bench.consumer.tickets == [TICKET]
        assert bench.claim.was_taken == 1
        assert chunks[-1].finish_reason is FinishReason.LENGTH

    run_bounded(body())


def test_an_engine_that_cannot_compute_prompts_refuses_a_request_without_kv() -> None:
    async def body() -> None:
        engine = ScriptedEngine(ONE, capabilities=Capabilities(needs_kv=True))
        bench = Bench(engine, FakeProducer(), info=EARLY)
        with pytest.raises(Unsupported, match="prefill workers"):
            await collect(bench.decode.generate(request(None), bench.context))
        assert engine.submitted == []

    run_bounded(body())
