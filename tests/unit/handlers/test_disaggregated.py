"""The prefill and decode roles: who is told what, in which order, and that nothing is held when it is over."""

import asyncio
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing

import pytest

from baton.errors import (
    BatonError,
    Cancelled,
    DeadlineExceeded,
    Draining,
    EngineFailed,
    InvalidRequest,
    Overloaded,
    PeerLost,
    Unsupported,
)
from baton.handlers.tickets import new_ticket, params_of, ticket_of
from baton.ports.engine import Capabilities
from baton.protocol.codec import decode_request
from baton.protocol.handoff import Bootstrap, Consume, LocalProbe, PrefillResult, Produce, Ticket
from baton.protocol.lifecycle import State
from baton.protocol.outputs import Chunk, Finished, FinishReason, KvComputed, KvWanted, TokenDelta, Usage
from baton.protocol.requests import GenerateRequest, Sampling, StopConditions
from baton.testing import ScriptedEngine, eventually, run_bounded
from baton.testing.fakes import Script
from baton.testing.memory_runtime import MemoryContext
from tests.unit.handlers.handoff_fakes import Bench, FakeProducer

BOOTSTRAP = Bootstrap(host="127.0.0.1", port=4000, room=0, handoff_id=bytes(range(16)))
TICKET = Ticket(host="127.0.0.1", port=4000, room=0, secret=bytes(range(16)))
PROMPT = (1, 2, 3)
EOS = Finished(FinishReason.EOS, cached_tokens=2)
PREFILL: Script = [KvComputed((4,)), 0.01, KvComputed((5, 6), True, 16), TokenDelta([9]), EOS]
DECODE: Script = [KvWanted(1, (7, 8)), 0.01, TokenDelta([9]), Finished(FinishReason.LENGTH, cached_tokens=0)]


def request(bootstrap: Bootstrap | None = BOOTSTRAP, max_tokens: int = 50, **fields: object) -> GenerateRequest:
    return GenerateRequest(
        token_ids=PROMPT,
        stop=StopConditions(max_tokens=max_tokens, min_tokens=5),
        bootstrap=bootstrap,
        **fields,  # type: ignore[arg-type]
    )


async def collect(chunks: AsyncGenerator[Chunk, None]) -> list[Chunk]:
    async with aclosing(chunks):
        return [chunk async for chunk in chunks]


async def settle(condition: Callable[[], object]) -> None:
    await eventually(lambda: bool(condition()))


def test_early_prefill_opens_the_room_after_submitting_and_ends_when_it_is_empty() -> None:
    async def body() -> None:
        bench = Bench(ScriptedEngine(PREFILL))
        submitted_first: list[bool] = []
        bench.producer.before_lend = lambda: submitted_first.append(len(bench.engine.submitted) == 1)
        reading = asyncio.create_task(collect(bench.prefill.generate(request(sampling=Sampling(n=1)), bench.context)))
        await settle(lambda: bench.producer.leases and bench.lease.told and bench.lease.told[-1].complete)
        assert submitted_first == [True]
        assert bench.producer.lent == [(TICKET, 3)]
        assert [output.blocks for output in bench.lease.told] == [(4,), (5, 6)]
        await asyncio.sleep(0.05)
        assert bench.engine.aborted == [], "what is lent stays"
        assert not reading.done()
        bench.lease.end.set_result(None)
        first, last = await reading
        assert first.disaggregated_params is not None, "the frontend takes a prefill without any for a failure"
        assert last == Chunk([9], finish_reason=FinishReason.LENGTH, usage=Usage(3, 1, 2)), "never stop, never eos"
        [work] = bench.engine.submitted
        assert (work.max_tokens, work.sampling.n, work.stop.min_tokens) == (1, 1, None)
        assert work.handoff == Produce(), "such an engine need not know where"
        assert bench.freed()
        assert bench.ended() is State.COMPLETED

    run_bounded(body())


@pytest.mark.parametrize("computed", [False, True])
def test_a_decode_worker_that_does_not_want_it_ends_the_prefill_without_an_error(computed: bool) -> None:
    async def body() -> None:
        bench = Bench(ScriptedEngine(PREFILL if computed else PREFILL[:2]))
        reading = asyncio.create_task(collect(bench.prefill.generate(request(), bench.context)))
        await settle(lambda: bench.producer.leases and len(bench.lease.told) == 1 + computed)
        bench.lease.lose(Cancelled("not wanted"))
        chunks = await reading
        assert chunks[-1].finish_reason is FinishReason.LENGTH
        assert bench.freed()
        assert bench.ended() is State.CANCELLED
        assert bench.producer.refused == []

    run_bounded(body())


@pytest.mark.parametrize("error", [PeerLost("gone"), EngineFailed("the decode's step failed")])
def test_a_lease_that_is_lost_ends_the_prefill_and_leaves_the_failing_to_the_decode(error: BatonError) -> None:
    async def body() -> None:
        bench = Bench(ScriptedEngine(PREFILL))
        reading = asyncio.create_task(collect(bench.prefill.generate(request(), bench.context)))
        await settle(lambda: bench.producer.leases and len(bench.lease.told) == 2)
        bench.lease.lose(error)
        assert (await reading)[-1].finish_reason is FinishReason.LENGTH
        assert bench.freed()
        assert bench.ended() is State.FAILED

    run_bounded(body())


@pytest.mark.parametrize("phase", ["queued", "computing", "lent"])
@pytest.mark.parametrize("why", ["client", "deadline", "shutdown", "engine"])
def test_whatever_ends_a_prefill_the_lease_is_told_and_the_engine_freed(phase: str, why: str) -> None:
    script = {"queued": [], "computing": PREFILL[:1], "lent": PREFILL}[phase]
    failing = [*script[:2], EngineFailed("step")] if phase != "lent" else None

    async def body() -> None:
        if why == "engine" and failing is None:
            return
        engine = ScriptedEngine(failing if why == "engine" and failing else script)
        bench = Bench(engine, request_timeout_s=0.1 if why == "deadline" else 60.0)
        reading = asyncio.create_task(collect(bench.prefill.generate(request(), bench.context)))
        told = {"queued": 0, "computing": 1, "lent": 2}[phase]
        await settle(lambda: bench.producer.leases and len(bench.lease.told) >= told)
        if why == "client":
            bench.context.cancel()
        elif why == "shutdown":
            bench.gate.fire_all(Draining("leaving"))
        expected = {"client": Cancelled, "deadline": DeadlineExceeded, "shutdown": Draining, "engine": EngineFailed}
        with pytest.raises(expected[why]):
            await reading
        assert type(bench.lease.failed) is expected[why]
        assert bench.freed()

    run_bounded(body())


def test_a_prefill_that_is_closed_from_outside_tells_its_lease() -> None:
    async def body() -> None:
        bench = Bench(ScriptedEngine(PREFILL[:1]))
        chunks = bench.prefill.generate(request(), bench.context)
        await anext(chunks)
        await chunks.aclose()
        assert isinstance(bench.lease.failed, PeerLost)
        assert bench.freed()

    run_bounded(body())


def test_who_waits_for_a_prefill_that_is_refused_is_told() -> None:
    async def body() -> None:
        full = Bench(ScriptedEngine(PREFILL), room=1)
        holder = asyncio.create_task(collect(full.prefill.generate(request(), full.context)))
        await settle(lambda: full.producer.leases)
        with pytest.raises(Overloaded):
            await collect(full.prefill.generate(request(), MemoryContext()))
        assert [(ticket, type(error)) for ticket, error in full.producer.refused] == [(TICKET, Overloaded)]
        full.lease.end.set_result(None)
        await holder
        impossible = Bench(ScriptedEngine(InvalidRequest("too long")))
        with pytest.raises(InvalidRequest):
            await collect(impossible.prefill.generate(request(), impossible.context))
        assert [type(error) for _, error in impossible.producer.refused] == [InvalidRequest]
        used = Bench(ScriptedEngine(PREFILL), FakeProducer(InvalidRequest("in use")))
        with pytest.raises(InvalidRequest):
            await collect(used.prefill.generate(request(), used.context))
        assert used.freed()

    run_bounded(body())


def test_a_decode_worker_that_left_before_the_room_was_there_fails_nothing() -> None:
    async def body() -> None:
        bench = Bench(ScriptedEngine(PREFILL), FakeProducer(Cancelled("it has left")))
        [chunk] = await collect(bench.prefill.generate(request(), bench.context))
        assert chunk.disaggregated_params == {}
        assert chunk.finish_reason is FinishReason.LENGTH
        assert bench.freed()
        assert bench.ended() is State.CANCELLED

    run_bounded(body())


def test_a_room_without_a_secret_is_refused() -> None:
    async def body() -> None:
        bench = Bench(ScriptedEngine(PREFILL))
        open_to_all = Bootstrap(host="h", port=1, room=1)
        for generate in (bench.prefill.generate, bench.decode.generate):
            with pytest.raises(InvalidRequest, match="handoff_id"):
                await collect(generate(request(open_to_all), bench.context))
        assert bench.engine.submitted == []

    run_bounded(body())


def test_the_room_says_which_rank_computes() -> None:
    async def body() -> None:
        engine = ScriptedEngine(PREFILL, capabilities=Capabilities(dp_size=4))
        bench = Bench(engine)
        at = Bootstrap(host="h", port=1, room=2**63 - 2, handoff_id=b"x")
        reading = asyncio.create_task(collect(bench.prefill.generate(request(at), bench.context)))
        await settle(lambda: bench.producer.leases)
        assert engine.submitted[0].dp_rank == (2**63 - 2) % 4
        bench.lease.end.set_result(None)
        await reading

    run_bounded(body())


def test_late_prefill_gives_out_a_ticket_when_all_is_computed_and_keeps_the_kv_after_its_end() -> None:
    async def body() -> None:
        bench = Bench(ScriptedEngine(PREFILL))
        chunks = await collect(bench.prefill.generate(request(None), bench.context))
        [(ticket, _)] = bench.producer.lent
        assert chunks[0].disaggregated_params == params_of(ticket)
        assert chunks[-1].finish_reason is FinishReason.LENGTH
        assert [output.blocks for output in bench.lease.told] == [(4, 5, 6)]
        assert bench.lease.told[0].complete
        assert bench.ended() is State.COMPLETED
        await asyncio.sleep(0.05)
        assert bench.engine.aborted == []
        bench.lease.lose(PeerLost("expired"))
        await settle(bench.freed)

    run_bounded(body())


def test_late_prefill_that_is_cancelled_keeps_nothing() -> None:
    async def body() -> None:
        never = asyncio.Event()
        for script in (PREFILL[:1], [*PREFILL[:3], never]):
            bench = Bench(ScriptedEngine(script))
            reading = asyncio.create_task(collect(bench.prefill.generate(request(None), bench.context)))
            await settle(lambda bench=bench: bench.engine.submitted)
            await asyncio.sleep(0.05)
            bench.context.cancel()
            with pytest.raises(Cancelled):
                await reading
            await settle(bench.freed)
            assert all(lease.end.done() for lease in bench.producer.leases)

    run_bounded(body())


def test_a_trial_lends_and_borrows_nothing() -> None:
    async def body() -> None:
        bench = Bench(ScriptedEngine(DECODE[2:]))
        chunks = await collect(bench.trial.generate(request(None), bench.context))
        assert chunks[-1].finish_reason is FinishReason.LENGTH
        assert isinstance(bench.engine.submitted[0].handoff, LocalProbe)
        assert (bench.producer.lent, bench.consumer.tickets) == ([], [])

    run_bounded(body())


def test_decode_claims_at_once_places_what_the_engine_wants_and_goes_on() -> None:
    async def body() -> None:
        bench = Bench(ScriptedEngine(DECODE))
        chunks = bench.decode.generate(request(), bench.context)
        reading = asyncio.create_task(collect(chunks))
        await settle(lambda: bench.consumer.loans and bench.claim.placed)
        assert bench.consumer.tickets == [TICKET]
        assert bench.claim.placed == [KvWanted(1, (7, 8))]
        assert bench.engine.submitted[0].handoff == Consume(source=BOOTSTRAP)
        bench.claim.cached_tokens = 2
        bench.claim.on_arrived()
        assert bench.engine.received_ids == [bench.engine.submitted[0].request_id]
        assert (await reading)[-1] == Chunk([9], finish_reason=FinishReason.LENGTH, usage=Usage(3, 1, 2))
        assert bench.claim.given_up == 0
        assert bench.consumer.declined == []
        assert bench.engine.aborted == []

    run_bounded(body())


@pytest.mark.parametrize("error", [PeerLost("gone"), InvalidRequest("the prefill refused it")])
def test_a_decode_that_loses_its_kv_fails_with_the_reason(error: BatonError) -> None:
    async def body() -> None:
        bench = Bench(ScriptedEngine(DECODE[:1]))
        order: list[str] = []
        reading = asyncio.create_task(collect(bench.decode.generate(request(), bench.context)))
        await settle(lambda: bench.consumer.loans and bench.claim.placed)
        bench.claim.on_close = lambda: order.append(f"closed, {len(bench.engine.aborted)} aborted")
        bench.claim.on_lost(error)
        with pytest.raises(type(error), match=error.message):
            await reading
        assert order == ["closed, 0 aborted"], "nothing may be written when the blocks are given back"
        assert bench.freed()

    run_bounded(body())


@pytest.mark.parametrize("why", ["client", "deadline", "shutdown"])
@pytest.mark.parametrize("phase", ["queued", "waiting for KV", "decoding"])
def test_whatever_ends_a_decode_the_loan_is_closed_before_the_engine_is_freed(phase: str, why: str) -> None:
    script: Script = {"queued": [], "waiting for KV": DECODE[:1], "decoding": DECODE[:3]}[phase]

    async def body() -> None:
        bench = Bench(ScriptedEngine(script), request_timeout_s=0.1 if why == "deadline" else 60.0)
        reading = asyncio.create_task(collect(bench.decode.generate(request(), bench.context)))
        await settle(lambda: bench.consumer.loans)
        order: list[int] = []
        bench.claim.on_close = lambda: order.append(len(bench.engine.aborted))
        await asyncio.sleep(0.03)
        if why == "client":
            bench.context.cancel()
        elif why == "shutdown":
            bench.gate.fire_all(Draining("leaving"))
        with pytest.raises((Cancelled, DeadlineExceeded, Draining)):
            await reading
        assert order == [0]
        assert bench.freed()

    run_bounded(body())


def test_an_engine_that_has_everything_lets_the_prefill_go() -> None:
    async def body() -> None:
        bench = Bench(ScriptedEngine(DECODE[2:]))
        await collect(bench.decode.generate(request(), bench.context))
        assert bench.claim.given_up == 1
        assert bench.claim.placed == []

    run_bounded(body())


def test_a_ticket_that_is_not_used_is_declined() -> None:
    async def body() -> None:
        bench = Bench(ScriptedEngine(InvalidRequest("no")))
        with pytest.raises(InvalidRequest):
            await collect(bench.decode.generate(request(), bench.context))
        chunks = await collect(
            bench.decode.generate(
                GenerateRequest(token_ids=PROMPT, stop=StopConditions(max_tokens=0), bootstrap=BOOTSTRAP),
                MemoryContext(),
            )
        )
        assert chunks[-1].finish_reason is FinishReason.LENGTH
        assert bench.consumer.declined == [TICKET, TICKET]

    run_bounded(body())


def test_choices_that_the_frontend_would_lose_are_refused() -> None:
    async def body() -> None:
        bench = Bench(ScriptedEngine(DECODE, capabilities=Capabilities(max_choices=4)))
        with pytest.raises(Unsupported, match="--kv-handoff late"):
            await collect(bench.decode.generate(request(sampling=Sampling(n=2)), bench.context))
        assert bench.consumer.declined == [TICKET]

    run_bounded(body())


def test_a_decode_without_a_room_computes_by_itself() -> None:
    async def body() -> None:
        bench = Bench(ScriptedEngine(DECODE[2:]))
        chunks = await collect(bench.decode.generate(request(None), bench.context))
        assert chunks[-1].usage == Usage(3, 1, 0)
        assert bench.engine.submitted[0].handoff is None
        assert bench.consumer.tickets == []

    run_bounded(body())


def test_a_late_ticket_survives_the_frontend() -> None:
    ticket = new_ticket(("::1", 4000), dp_rank=3, dp_size=4)
    assert ticket.room % 4 == 3
    wire = {"token_ids": [1], "prefill_result": {"disaggregated_params": params_of(ticket)}}
    assert ticket_of(decode_request(wire)) == ticket


@pytest.mark.parametrize("dp_size", [1, 2, 3, 64])
def test_rooms_of_our_own_fit_and_name_their_rank(dp_size: int) -> None:
    for dp_rank in (0, dp_size - 1):
        for _ in range(100):
            room = new_ticket(("h", 1), dp_rank, dp_size).room
            assert 0 <= room < 2**63
            assert room % dp_size == dp_rank


@pytest.mark.parametrize(
    "params",
    [
        {},
        {"ticket": "x"},
        {"ticket": {"host": "h", "port": 1, "room": 1}},
        {"ticket": {"host": "h", "port": 1, "room": 1, "secret": "no hex"}},
        {"ticket": {"host": "h", "port": "x", "room": 1, "secret": "00"}},
        {"ticket": {"host": "h", "port": 1, "room": -1, "secret": "00"}},
        {"ticket": {"host": "h", "port": True, "room": 1, "secret": "00"}},
        {"ticket": {"host": "h", "port": 1, "room": 2**63, "secret": "00"}},
        {"ticket": {"host": "h", "port": 70000, "room": 1, "secret": "00"}},
        {"ticket": {"host": "h", "port": 1, "room": 1, "secret": ""}},
        {"ticket": {"host": "", "port": 1, "room": 1, "secret": "00"}},
    ],
)
def test_a_ticket_that_cannot_be_read_is_refused(params: dict[str, object]) -> None:
    late = GenerateRequest(token_ids=PROMPT, prefill_result=PrefillResult(disaggregated_params=params))
    with pytest.raises(InvalidRequest, match="disaggregated_params"):
        ticket_of(late)
