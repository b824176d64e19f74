"""The prefill and decode roles: rooms, leases and claims in the right order, and nothing held at the end."""

import asyncio
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing

import pytest

from baton.errors import (
    BatonError,
    Cancelled,
    ContextTooLong,
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
from tests.unit.handlers.handoff_fakes import FakeProducer, Harness

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


def test_early_prefill_opens_the_room_after_submit_and_ends_when_the_kv_is_taken() -> None:
    async def body() -> None:
        harness = Harness(ScriptedEngine(PREFILL))
        submitted_first: list[bool] = []
        harness.producer.before_offer = lambda: submitted_first.append(len(harness.engine.submitted) == 1)
        reading = asyncio.create_task(
            collect(harness.prefill.generate(request(sampling=Sampling(n=1)), harness.context))
        )
        await settle(lambda: harness.producer.leases and harness.lease.offered and harness.lease.offered[-1].complete)
        assert submitted_first == [True]
        assert harness.producer.offers == [(TICKET, 3)]
        assert [output.blocks for output in harness.lease.offered] == [(4,), (5, 6)]
        await asyncio.sleep(0.05)
        assert harness.engine.aborted == [], "KV that is offered stays"
        assert not reading.done()
        harness.lease.end.set_result(None)
        first, last = await reading
        assert first.disaggregated_params is not None, "the frontend treats a prefill without parameters as failed"
        assert last == Chunk([9], finish_reason=FinishReason.LENGTH, usage=Usage(3, 1, 2)), "neither stop nor eos"
        [work] = harness.engine.submitted
        assert (work.max_tokens, work.sampling.n, work.stop.min_tokens) == (1, 1, None)
        assert work.handoff == Produce(), "an engine with EngineInfo.kv needs no address"
        assert harness.freed()
        assert harness.ended() is State.COMPLETED

    run_bounded(body())


@pytest.mark.parametrize("computed", [False, True])
def test_kv_that_decode_does_not_want_ends_the_prefill_without_an_error(computed: bool) -> None:
    async def body() -> None:
        harness = Harness(ScriptedEngine(PREFILL if computed else PREFILL[:2]))
        reading = asyncio.create_task(collect(harness.prefill.generate(request(), harness.context)))
        await settle(lambda: harness.producer.leases and len(harness.lease.offered) == 1 + computed)
        harness.lease.lose(Cancelled("not wanted"))
        chunks = await reading
        assert chunks[-1].finish_reason is FinishReason.LENGTH
        assert harness.freed()
        assert harness.ended() is State.CANCELLED
        assert harness.producer.refused == []

    run_bounded(body())


@pytest.mark.parametrize("error", [PeerLost("lost"), EngineFailed("the decode's step failed")])
def test_a_lost_lease_ends_the_prefill_without_an_error(error: BatonError) -> None:
    async def body() -> None:
        harness = Harness(ScriptedEngine(PREFILL))
        reading = asyncio.create_task(collect(harness.prefill.generate(request(), harness.context)))
        await settle(lambda: harness.producer.leases and len(harness.lease.offered) == 2)
        harness.lease.lose(error)
        assert (await reading)[-1].finish_reason is FinishReason.LENGTH
        assert harness.freed()
        assert harness.ended() is State.FAILED

    run_bounded(body())


@pytest.mark.parametrize("phase", ["queued", "computing", "offered"])
@pytest.mark.parametrize("why", ["client", "deadline", "shutdown", "engine"])
def test_every_early_end_of_a_prefill_fails_the_lease_and_aborts(phase: str, why: str) -> None:
    script = {"queued": [], "computing": PREFILL[:1], "offered": PREFILL}[phase]
    failing = [*script[:2], EngineFailed("step")] if phase != "offered" else None

    async def body() -> None:
        if why == "engine" and failing is None:
            return
        engine = ScriptedEngine(failing if why == "engine" and failing else script)
        harness = Harness(engine, request_timeout_s=0.1 if why == "deadline" else 60.0)
        reading = asyncio.create_task(collect(harness.prefill.generate(request(), harness.context)))
        parts = {"queued": 0, "computing": 1, "offered": 2}[phase]
        await settle(lambda: harness.producer.leases and len(harness.lease.offered) >= parts)
        if why == "client":
            harness.context.cancel()
        elif why == "shutdown":
            harness.gate.fire_all(Draining("leaving"))
        expected = {"client": Cancelled, "deadline": DeadlineExceeded, "shutdown": Draining, "engine": EngineFailed}
        with pytest.raises(expected[why]):
            await reading
        assert type(harness.lease.failed) is expected[why]
        assert harness.freed()

    run_bounded(body())


def test_closing_the_iterator_of_a_prefill_fails_the_lease() -> None:
    async def body() -> None:
        harness = Harness(ScriptedEngine(PREFILL[:1]))
        chunks = harness.prefill.generate(request(), harness.context)
        await anext(chunks)
        await chunks.aclose()
        assert isinstance(harness.lease.failed, PeerLost)
        assert harness.freed()

    run_bounded(body())


def test_a_refused_prefill_refuses_its_ticket() -> None:
    async def body() -> None:
        full = Harness(ScriptedEngine(PREFILL), limit=1)
        holder = asyncio.create_task(collect(full.prefill.generate(request(), full.context)))
        await settle(lambda: full.producer.leases)
        with pytest.raises(Overloaded):
            await collect(full.prefill.generate(request(), MemoryContext()))
        assert [(ticket, type(error)) for ticket, error in full.producer.refused] == [(TICKET, Overloaded)]
        full.lease.end.set_result(None)
        await holder
        impossible = Harness(ScriptedEngine(InvalidRequest("too long")))
        with pytest.raises(InvalidRequest):
            await collect(impossible.prefill.generate(request(), impossible.context))
        assert [type(error) for _, error in impossible.producer.refused] == [InvalidRequest]
        used = Harness(ScriptedEngine(PREFILL), FakeProducer(PeerLost("in use")))
        with pytest.raises(PeerLost):
            await collect(used.prefill.generate(request(), used.context))
        assert used.freed()

    run_bounded(body())


def test_a_prefill_that_fails_unexpectedly_refuses_its_ticket() -> None:
    async def body() -> None:
        harness = Harness(ScriptedEngine(PREFILL), FakeProducer(ZeroDivisionError("a fault")))
        with pytest.raises(ZeroDivisionError):
            await collect(harness.prefill.generate(request(), harness.context))
        [(ticket, error)] = harness.producer.refused
        assert ticket == TICKET
        assert type(error) is PeerLost
        assert harness.freed()

    run_bounded(body())


def test_a_prefill_that_is_stopped_before_its_room_opens_refuses_its_ticket() -> None:
    async def body() -> None:
        harness = Harness(ScriptedEngine(PREFILL), FakeProducer(asyncio.CancelledError()))
        with pytest.raises(asyncio.CancelledError):
            await collect(harness.prefill.generate(request(), harness.context))
        assert [(ticket, type(error)) for ticket, error in harness.producer.refused] == [(TICKET, PeerLost)]

    run_bounded(body())


def test_a_room_declined_before_it_opens_ends_the_prefill_without_an_error() -> None:
    async def body() -> None:
        harness = Harness(ScriptedEngine(PREFILL), FakeProducer(Cancelled("declined")))
        [chunk] = await collect(harness.prefill.generate(request(), harness.context))
        assert chunk.disaggregated_params == {}
        assert chunk.finish_reason is FinishReason.LENGTH
        assert harness.freed()
        assert harness.ended() is State.CANCELLED

    run_bounded(body())


def test_a_room_without_a_secret_is_refused() -> None:
    async def body() -> None:
        harness = Harness(ScriptedEngine(PREFILL))
        without_secret = Bootstrap(host="h", port=1, room=1)
        for generate in (harness.prefill.generate, harness.decode.generate):
            with pytest.raises(InvalidRequest, match="handoff_id"):
                await collect(generate(request(without_secret), harness.context))
        assert harness.engine.submitted == []

    run_bounded(body())


@pytest.mark.parametrize("secret", [b"s" * 129, "s" * 129])
def test_a_room_with_a_long_secret_is_refused(secret: object) -> None:
    with pytest.raises(InvalidRequest, match="handoff_id: 129 bytes; 128 at most"):
        ticket_of(request(Bootstrap(host="h", port=1, room=1, handoff_id=secret)))


def test_the_room_determines_the_dp_rank() -> None:
    async def body() -> None:
        engine = ScriptedEngine(PREFILL, capabilities=Capabilities(dp_size=4))
        harness = Harness(engine)
        at = Bootstrap(host="h", port=1, room=2**63 - 2, handoff_id=b"x")
        reading = asyncio.create_task(collect(harness.prefill.generate(request(at), harness.context)))
        await settle(lambda: harness.producer.leases)
        assert engine.submitted[0].dp_rank == (2**63 - 2) % 4
        harness.lease.end.set_result(None)
        await reading

    run_bounded(body())


def test_late_prefill_returns_a_ticket_and_holds_the_kv_until_the_lease_ends() -> None:
    async def body() -> None:
        harness = Harness(ScriptedEngine(PREFILL))
        chunks = await collect(harness.prefill.generate(request(None), harness.context))
        [(ticket, _)] = harness.producer.offers
        assert chunks[0].disaggregated_params == params_of(ticket)
        assert chunks[-1].finish_reason is FinishReason.LENGTH
        assert [output.blocks for output in harness.lease.offered] == [(4, 5, 6)]
        assert harness.lease.offered[0].complete
        assert harness.ended() is State.COMPLETED
        await asyncio.sleep(0.05)
        assert harness.engine.aborted == []
        harness.lease.lose(PeerLost("expired"))
        await settle(harness.freed)

    run_bounded(body())


def test_late_kv_that_is_claimed_and_never_taken_is_freed_after_the_request_timeout() -> None:
    async def body() -> None:
        harness = Harness(ScriptedEngine(PREFILL), request_timeout_s=0.2)
        await collect(harness.prefill.generate(request(None), harness.context))
        await settle(lambda: harness.lease.failed)
        assert type(harness.lease.failed) is DeadlineExceeded
        await settle(harness.freed)

    run_bounded(body())


def test_a_cancelled_late_prefill_frees_its_kv() -> None:
    async def body() -> None:
        never = asyncio.Event()
        for script in (PREFILL[:1], [*PREFILL[:3], never]):
            harness = Harness(ScriptedEngine(script))
            reading = asyncio.create_task(collect(harness.prefill.generate(request(None), harness.context)))
            await settle(lambda harness=harness: harness.engine.submitted)
            await asyncio.sleep(0.05)
            harness.context.cancel()
            with pytest.raises(Cancelled):
                await reading
            await settle(harness.freed)
            assert all(lease.end.done() for lease in harness.producer.leases)

    run_bounded(body())


def test_a_local_probe_opens_no_room_and_claims_none() -> None:
    async def body() -> None:
        harness = Harness(ScriptedEngine(DECODE[2:]))
        chunks = await collect(harness.probe.generate(request(None), harness.context))
        assert chunks[-1].finish_reason is FinishReason.LENGTH
        assert isinstance(harness.engine.submitted[0].handoff, LocalProbe)
        assert (harness.producer.offers, harness.consumer.tickets) == ([], [])

    run_bounded(body())


def test_decode_claims_places_the_kv_and_continues() -> None:
    async def body() -> None:
        harness = Harness(ScriptedEngine(DECODE))
        chunks = harness.decode.generate(request(), harness.context)
        reading = asyncio.create_task(collect(chunks))
        await settle(lambda: harness.consumer.claims and harness.claim.placed)
        assert harness.consumer.tickets == [TICKET]
        assert harness.claim.placed == [KvWanted(1, (7, 8))]
        assert harness.engine.submitted[0].handoff == Consume(source=BOOTSTRAP)
        harness.claim.cached_tokens = 2
        harness.claim.on_arrived()
        assert harness.engine.received_ids == [harness.engine.submitted[0].request_id]
        assert (await reading)[-1] == Chunk([9], finish_reason=FinishReason.LENGTH, usage=Usage(3, 1, 2))
        assert harness.claim.given_up == 0
        assert harness.consumer.declined == []
        assert harness.engine.aborted == []

    run_bounded(body())


@pytest.mark.parametrize("error", [PeerLost("lost"), InvalidRequest("the prefill refused it")])
def test_a_decode_that_loses_its_kv_fails_with_the_reason(error: BatonError) -> None:
    async def body() -> None:
        harness = Harness(ScriptedEngine(DECODE[:1]))
        order: list[str] = []
        reading = asyncio.create_task(collect(harness.decode.generate(request(), harness.context)))
        await settle(lambda: harness.consumer.claims and harness.claim.placed)
        harness.claim.on_close = lambda: order.append(f"closed, {len(harness.engine.aborted)} aborted")
        harness.claim.on_lost(error)
        with pytest.raises(type(error), match=error.message):
            await reading
        assert order == ["closed, 0 aborted"], "nothing may be written into free blocks"
        assert harness.freed()

    run_bounded(body())


@pytest.mark.parametrize("why", ["client", "deadline", "shutdown"])
@pytest.mark.parametrize("phase", ["queued", "waiting for KV", "decoding"])
def test_every_early_end_of_a_decode_closes_the_claim_before_the_abort(phase: str, why: str) -> None:
    script: Script = {"queued": [], "waiting for KV": DECODE[:1], "decoding": DECODE[:3]}[phase]

    async def body() -> None:
        harness = Harness(ScriptedEngine(script), request_timeout_s=0.1 if why == "deadline" else 60.0)
        reading = asyncio.create_task(collect(harness.decode.generate(request(), harness.context)))
        await settle(lambda: harness.consumer.claims)
        order: list[int] = []
        harness.claim.on_close = lambda: order.append(len(harness.engine.aborted))
        await asyncio.sleep(0.03)
        if why == "client":
            harness.context.cancel()
        elif why == "shutdown":
            harness.gate.fire_all(Draining("leaving"))
        with pytest.raises((Cancelled, DeadlineExceeded, Draining)):
            await reading
        assert order == [0]
        assert harness.freed()

    run_bounded(body())


def test_a_decode_with_the_whole_prompt_cached_gives_up_the_claim() -> None:
    async def body() -> None:
        harness = Harness(ScriptedEngine(DECODE[2:]))
        await collect(harness.decode.generate(request(), harness.context))
        assert harness.claim.given_up == 1
        assert harness.claim.placed == []

    run_bounded(body())


@pytest.mark.parametrize("before", ["submit", "first output", "last output"])
def test_a_second_cancellation_does_not_stop_the_abort_after_the_claim_is_closed(before: str) -> None:
    script: Script = {"submit": [], "first output": DECODE[:1], "last output": DECODE[:3]}[before]

    async def body() -> None:
        harness = Harness(ScriptedEngine(script))
        reading = asyncio.create_task(collect(harness.decode.generate(request(), harness.context)))
        await settle(lambda: harness.engine.submitted)
        await asyncio.sleep(0.03)
        harness.claim.may_close.clear()
        closing = asyncio.Event()
        harness.claim.on_close = closing.set
        reading.cancel()
        await closing.wait()
        reading.cancel()
        await asyncio.sleep(0.01)
        assert harness.engine.aborted == [], "KV may still be written into the blocks"
        harness.claim.may_close.set()
        with pytest.raises(asyncio.CancelledError):
            await reading
        await settle(harness.freed)

    run_bounded(body())


def test_an_unused_ticket_is_declined() -> None:
    async def body() -> None:
        harness = Harness(ScriptedEngine(DECODE))
        too_long = request(max_tokens=5000)
        with pytest.raises(ContextTooLong):
            await collect(harness.decode.generate(too_long, harness.context))
        chunks = await collect(
            harness.decode.generate(
                GenerateRequest(token_ids=PROMPT, stop=StopConditions(max_tokens=0), bootstrap=BOOTSTRAP),
                MemoryContext(),
            )
        )
        assert chunks[-1].finish_reason is FinishReason.LENGTH
        assert harness.consumer.declined == [TICKET, TICKET]
        assert harness.consumer.claims == []

    run_bounded(body())


def test_a_claim_is_closed_when_the_engine_refuses_the_work() -> None:
    async def body() -> None:
        harness = Harness(ScriptedEngine(InvalidRequest("no")))
        with pytest.raises(InvalidRequest):
            await collect(harness.decode.generate(request(), harness.context))
        assert harness.claim.closed >= 1
        assert harness.consumer.declined == []

    run_bounded(body())


def test_several_choices_with_an_early_handoff_are_refused() -> None:
    async def body() -> None:
        harness = Harness(ScriptedEngine(DECODE, capabilities=Capabilities(max_choices=4)))
        with pytest.raises(Unsupported, match="--kv-handoff late"):
            await collect(harness.decode.generate(request(sampling=Sampling(n=2)), harness.context))
        assert harness.consumer.declined == [TICKET]

    run_bounded(body())


def test_a_decode_without_a_ticket_computes_the_prompt() -> None:
    async def body() -> None:
        harness = Harness(ScriptedEngine(DECODE[2:]))
        chunks = await collect(harness.decode.generate(request(None), harness.context))
        assert chunks[-1].usage == Usage(3, 1, 0)
        assert harness.engine.submitted[0].handoff is None
        assert harness.consumer.tickets == []

    run_bounded(body())


def test_a_late_ticket_is_read_from_the_prefill_result() -> None:
    ticket = new_ticket(("::1", 4000), dp_rank=3, dp_size=4)
    assert ticket.room % 4 == 3
    wire = {"token_ids": [1], "prefill_result": {"disaggregated_params": params_of(ticket)}}
    assert ticket_of(decode_request(wire)) == ticket


@pytest.mark.parametrize("dp_size", [1, 2, 3, 64])
def test_new_rooms_fit_63_bits_and_encode_their_rank(dp_size: int) -> None:
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
        {"ticket": {"host": "h", "port": 1, "room": 1, "secret": "00" * 129}},
        {"ticket": {"host": "", "port": 1, "room": 1, "secret": "00"}},
    ],
)
def test_a_ticket_that_cannot_be_read_is_refused(params: dict[str, object]) -> None:
    late = GenerateRequest(token_ids=PROMPT, prefill_result=PrefillResult(disaggregated_params=params))
    with pytest.raises(InvalidRequest, match="disaggregated_params"):
        ticket_of(late)
