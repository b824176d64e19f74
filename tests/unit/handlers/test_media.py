"""Media for an engine that computes prompts: fetched here, or claimed from an encode worker."""

import asyncio
from collections.abc import AsyncGenerator
from typing import Any

import pytest

from baton.errors import BatonError, Cancelled, InvalidRequest, PeerLost, Unsupported
from baton.handlers.aggregated import AggregatedHandler
from baton.handlers.decode import DecodeHandler
from baton.handlers.media import MediaInput
from baton.handlers.prefill import PrefillHandler
from baton.handlers.tickets import params_of
from baton.ports.engine import Capabilities, HandoffStyle
from baton.protocol.codec import decode_request, encode_request
from baton.protocol.handoff import Consume, Ticket
from baton.protocol.media import MediaFile, MediaHandles
from baton.protocol.outputs import Chunk, Finished, FinishReason, HandoffReady, TokenDelta
from baton.protocol.requests import GenerateRequest
from baton.request.gate import Gate
from baton.request.tracker import RequestLimits, RequestTracker
from baton.testing import RecordingObserver, ScriptedEngine, eventually, run_bounded
from baton.testing.fakes import SCRIPTED_INFO, Script
from baton.testing.memory_runtime import MemoryContext
from tests.unit.handlers.handoff_fakes import FakeConsumer, FakeProducer, Harness
from tests.unit.media.media_fakes import FakeLoader

TICKET = Ticket(host="10.0.0.1", port=4000, room=5, secret=b"\x01\x02")
RESULT = params_of(TICKET, {"handle": "h"})
ONE: Script = [TokenDelta([9]), Finished(FinishReason.LENGTH)]
HANDLES = Capabilities(media_handles=True, handoff=HandoffStyle.LATE)
IMAGES = Capabilities(modalities=frozenset({"text", "image"}), handoff=HandoffStyle.LATE)
URLS = {"image_url": ["https://example.com/a.png"]}


def request(**more: Any) -> GenerateRequest:
    return decode_request({"token_ids": [1, 2, 3], "stop_conditions": {"max_tokens": 1}, **more})


class MediaHarness:
    """Handlers of every role that computes prompts, around one engine, with media input."""

    def __init__(self, script: Script = ONE, can: Capabilities = HANDLES, loader: FakeLoader | None = None) -> None:
        self.engine = ScriptedEngine(script, capabilities=can)
        self.consumer = FakeConsumer()
        self.loader = loader or FakeLoader()
        self.producer = FakeProducer()
        self.gate = Gate(8)
        self.context = MemoryContext()
        tracker = RequestTracker(
            self.gate,
            RequestLimits(flush_interval_s=0.0, abort_timeout_s=0.5),
            RecordingObserver(),
            "role",
            lambda error: None,
        )
        handles = self.consumer if can.media_handles else None
        media_input = MediaInput(can, SCRIPTED_INFO, self.loader, handles=handles)
        self.aggregated = AggregatedHandler(self.engine, SCRIPTED_INFO, tracker, media_input)
        self.prefill = PrefillHandler(self.engine, SCRIPTED_INFO, tracker, self.producer, media_input)
        self.decode = DecodeHandler(self.engine, SCRIPTED_INFO, tracker, self.consumer, media_input)

    async def compute(self, sent: GenerateRequest) -> list[Chunk]:
        return await collect(self.aggregated.generate(sent, self.context))


async def collect(chunks: AsyncGenerator[Chunk, None]) -> list[Chunk]:
    return [chunk async for chunk in chunks]


def test_media_are_fetched_for_an_engine_with_the_modality() -> None:
    async def body() -> None:
        harness = MediaHarness(can=IMAGES)
        await harness.compute(request(multi_modal_data=URLS))
        [work] = harness.engine.submitted
        place = "multi_modal_data.image_url[0]"
        assert work.media == (MediaFile(modality="image", data=b"https://example.com/a.png", place=place),)
        await harness.compute(request())
        assert len(harness.loader.named) == 1, "a request without media loads none"

    run_bounded(body())


@pytest.mark.parametrize(
    ("sent", "can", "error", "why"),
    [
        (request(multi_modal_data=URLS), Capabilities(), Unsupported, r"multi_modal_data\.image_url: .*text only"),
        (request(multi_modal_data={"video_url": ["https://a"]}), IMAGES, Unsupported, r"multi_modal_data\.video_url"),
        (request(multi_modal_data={"image_url": ["ftp://h/x"]}), IMAGES, InvalidRequest, "only http"),
        (request(encoder_result=RESULT), IMAGES, Unsupported, "encoder_result: this worker"),
        (request(encoder_result={}), HANDLES, InvalidRequest, "encoder_result.*ticket"),
        (request(encoder_result={"ticket": {"host": "a"}}), HANDLES, InvalidRequest, "encoder_result"),
    ],
)
def test_unsupported_media_are_refused_by_field_before_anything_is_fetched(
    sent: GenerateRequest, can: Capabilities, error: type[BatonError], why: str
) -> None:
    async def body() -> None:
        harness = MediaHarness(can=can)
        with pytest.raises(error, match=why) as refusal:
            await harness.compute(sent)
        assert refusal.value.status == 400
        assert harness.loader.named == []
        assert harness.consumer.tickets == []
        assert harness.engine.submitted == []

    run_bounded(body())


def test_handles_reach_the_engine_after_the_claim_is_accepted() -> None:
    async def body() -> None:
        first = asyncio.Event()
        harness = MediaHarness([first, *ONE])
        answer = asyncio.create_task(harness.compute(request(encoder_result=RESULT, multi_modal_data=URLS)))
        await eventually(lambda: bool(harness.consumer.claims))
        [claim] = harness.consumer.claims
        assert harness.consumer.tickets == [TICKET]
        await asyncio.sleep(0.02)
        assert harness.engine.submitted == [], "media may have been freed before the claim is accepted"
        claim.accepted.set_result(("", 0))
        await eventually(lambda: bool(harness.engine.submitted))
        assert harness.engine.submitted[0].media == (MediaHandles(params={"handle": "h"}),)
        assert harness.loader.named == [], "nothing is fetched a second time"
        assert claim.was_taken == 0
        first.set()
        await answer
        assert claim.was_taken >= 1
        assert claim.closed >= 1

    run_bounded(body())


def test_d16_a_request_that_loses_its_encoded_media_is_retryable() -> None:
    async def body() -> None:
        harness = MediaHarness([asyncio.Event()])
        answer = asyncio.create_task(harness.compute(request(encoder_result=RESULT)))
        await eventually(lambda: bool(harness.consumer.claims))
        [claim] = harness.consumer.claims
        claim.accepted.set_result(("", 0))
        await eventually(lambda: bool(harness.engine.submitted))
        claim.on_lost(PeerLost("connection lost"))
        with pytest.raises(PeerLost, match=r"encode worker.*connection lost") as loss:
            await answer
        assert loss.value.retryable
        assert harness.engine.aborted == [harness.engine.submitted[0].request_id]
        assert claim.closed >= 1

    run_bounded(body())


@pytest.mark.parametrize("claimed", [False, True])
def test_d16_cancellation_closes_the_media_claim(claimed: bool) -> None:
    async def body() -> None:
        harness = MediaHarness([asyncio.Event()])
        answer = asyncio.create_task(harness.compute(request(encoder_result=RESULT)))
        await eventually(lambda: bool(harness.consumer.claims))
        [claim] = harness.consumer.claims
        if claimed:
            claim.accepted.set_result(("", 0))
            await eventually(lambda: bool(harness.engine.submitted))
        harness.context.cancel()
        with pytest.raises(Cancelled):
            await answer
        assert claim.was_taken == 0
        assert claim.closed >= 1
        assert harness.gate.in_flight == 0

    run_bounded(body())


@pytest.mark.parametrize("taken", [True, False])
def test_a_prefill_keeps_media_claimed_as_long_as_its_kv(taken: bool) -> None:
    async def body() -> None:
        harness = MediaHarness([HandoffReady({"kv": 1}), *ONE])
        answer = asyncio.create_task(collect(harness.prefill.generate(request(encoder_result=RESULT), harness.context)))
        await eventually(lambda: bool(harness.consumer.claims))
        [claim] = harness.consumer.claims
        claim.accepted.set_result(("", 0))
        await answer
        assert harness.engine.submitted[0].media == (MediaHandles(params={"handle": "h"}),)
        await asyncio.sleep(0.02)
        assert (claim.was_taken, claim.closed) == (0, 0), "the decode may need some of them"
        [lease] = harness.producer.leases
        if taken:
            lease.end.set_result(None)
        else:
            lease.lose(PeerLost("expired"))
        await eventually(lambda: claim.closed >= 1)
        assert claim.was_taken == (1 if taken else 0)
        assert harness.engine.aborted == [harness.engine.submitted[0].request_id]

    run_bounded(body())


def test_a_failed_prefill_closes_the_media_claim() -> None:
    async def body() -> None:
        harness = MediaHarness([PeerLost("lost")])
        answer = asyncio.create_task(collect(harness.prefill.generate(request(encoder_result=RESULT), harness.context)))
        await eventually(lambda: bool(harness.consumer.claims))
        [claim] = harness.consumer.claims
        claim.accepted.set_result(("", 0))
        with pytest.raises(PeerLost):
            await answer
        assert (claim.was_taken, claim.closed >= 1) == (0, True)

    run_bounded(body())


def test_d27_a_decode_does_not_fetch_what_is_in_the_kv_already() -> None:
    async def body() -> None:
        harness = MediaHarness()
        harness.consumer.media = ()
        late = params_of(Ticket(host="10.0.0.2", port=1, room=2, secret=b"x"), {"kv": 1})
        sent = request(encoder_result=RESULT, multi_modal_data=URLS, prefill_result={"disaggregated_params": late})
        await collect(harness.decode.generate(sent, harness.context))
        [work] = harness.engine.submitted
        assert isinstance(work.handoff, Consume)
        assert work.media == ()
        assert harness.loader.named == []
        assert [ticket.host for ticket in harness.consumer.tickets] == ["10.0.0.2"], (
            "only the prefill's room is claimed"
        )

    run_bounded(body())


def test_a_decode_without_kv_loads_media() -> None:
    async def body() -> None:
        harness = MediaHarness()
        answer = asyncio.create_task(collect(harness.decode.generate(request(encoder_result=RESULT), harness.context)))
        await eventually(lambda: bool(harness.consumer.claims))
        harness.consumer.claims[0].accepted.set_result(("", 0))
        await answer
        assert harness.engine.submitted[0].media == (MediaHandles(params={"handle": "h"}),)

    run_bounded(body())


def test_a_handler_without_a_media_loader_refuses_media() -> None:
    async def body() -> None:
        harness = Harness(ScriptedEngine(ONE, capabilities=IMAGES))
        with pytest.raises(Unsupported, match="takes text only"):
            await collect(harness.decode.generate(request(multi_modal_data=URLS), harness.context))

    run_bounded(body())


def test_the_encoder_result_is_forwarded() -> None:
    assert encode_request(request(encoder_result=RESULT))["encoder_result"] == RESULT
