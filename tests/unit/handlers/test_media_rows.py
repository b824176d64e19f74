"""Media as rows: encoded here or fetched, placed in the prompt, given to the engine, unpinned when the work ends."""

import asyncio
from collections.abc import AsyncGenerator
from typing import Any

import msgspec
import pytest

from baton.engine_kit.content_hash import rows_hash
from baton.errors import BatonError, Cancelled, ContextTooLong, EngineFailed, InvalidRequest, PeerLost
from baton.handlers.aggregated import AggregatedHandler
from baton.handlers.decode import DecodeHandler
from baton.handlers.media import MediaInput
from baton.handlers.media_encoder import MediaEncoder
from baton.handlers.media_rows import RowsInput, wait_for_rows
from baton.handlers.prefill import PrefillHandler
from baton.handlers.tickets import params_of, rows_params
from baton.media.embedding_store import EmbeddingStore, Hold, Wanted
from baton.ports.engine import (
    Capabilities,
    Encoded,
    EncodedRows,
    EncodeWork,
    EngineInfo,
    HandoffStyle,
    MediaInfo,
    Placeholder,
)
from baton.ports.transfer import EmbeddingShape
from baton.protocol.codec import decode_request
from baton.protocol.handoff import Ticket
from baton.protocol.ids import RequestId
from baton.protocol.media import EncodedItem, EncodedMedia, HeldItem, MediaEmbedding, PlacedItem
from baton.protocol.outputs import Chunk, Finished, FinishReason, HandoffReady, TokenDelta
from baton.protocol.requests import GenerateRequest
from baton.request.cancel_scope import CancelScope
from baton.request.gate import Gate
from baton.request.tracker import RequestLimits, RequestTracker
from baton.testing import RecordingObserver, ScriptedEngine, eventually, run_bounded
from baton.testing.fakes import SCRIPTED_INFO, Script
from baton.testing.memory_runtime import MemoryContext
from tests.unit.handlers.handoff_fakes import FakeConsumer, FakeProducer
from tests.unit.media.media_fakes import FakeLoader

SHAPE = EmbeddingShape(model="tower", dtype="uint8", size=8)
IMAGE, ROW, BEGIN = 50, 51, 52
MEDIA = MediaInfo(shape=SHAPE, placeholders={"image": Placeholder(token=IMAGE, text="<image>", as_text=(60, 61, 62))})
INFO: EngineInfo = msgspec.structs.replace(SCRIPTED_INFO, media=MEDIA, context_length=40)
CAN = Capabilities(
    media_encoding=True,
    media_embeddings=True,
    encoded_modalities=frozenset({"image"}),
    handoff=HandoffStyle.LATE,
)
ONE: Script = [TokenDelta([9]), Finished(FinishReason.LENGTH)]
A, B = "https://example.com/a", "https://example.com/bb"
TICKET = Ticket(host="10.0.0.1", port=4000, room=5, secret=b"\x01\x02")


def item(url: str) -> EncodedItem:
    """As many rows as the URL has letters after the last slash, and one more."""
    rows = len(url.rpartition("/")[2]) + 1
    return EncodedItem(
        modality="image",
        content_hash=rows_hash(SHAPE.model, url.encode()),
        expansion=((BEGIN, 1), (ROW, rows)),
        embed_token=ROW,
        rows=rows,
    )


def rows_of(url: str) -> bytes:
    return url[-1:].encode() * (8 * item(url).rows)


def request(*urls: str, tokens: tuple[int, ...] = (1, IMAGE, 2), **more: Any) -> GenerateRequest:
    media = {"image_url": list(urls)} if urls else None
    return decode_request({"token_ids": list(tokens), "multi_modal_data": media, **more})


class RowsEngine(ScriptedEngine):
    """Encodes a file to rows of its last letter. Waits for `gate` first, if there is one."""

    def __init__(self, script: Script = ONE) -> None:
        super().__init__(script, capabilities=CAN)
        self.encoded: list[str] = []
        self.withdrawn = 0
        self.gate: asyncio.Event | None = None
        self.may_abort = asyncio.Event()
        self.may_abort.set()
        self.wrong: dict[str, Any] = {}
        self.error: BatonError | None = None

    async def encode(self, work: EncodeWork) -> Encoded:
        [file] = work.media
        url = file.data.decode()
        self.encoded.append(url)
        try:
            if self.gate is not None:
                await self.gate.wait()
        except asyncio.CancelledError:
            self.withdrawn += 1
            raise
        if self.error is not None:
            raise self.error
        fields = {"item": item(url), "dtype": "uint8", "size": 8, "data": memoryview(rows_of(url))}
        return Encoded(items=(EncodedRows(**{**fields, **self.wrong}),))

    async def abort(self, request_id: RequestId) -> None:
        await self.may_abort.wait()
        await super().abort(request_id)


class RowsHarness:
    """Handlers of every role that computes prompts, around one engine that encodes and takes rows."""

    def __init__(self, script: Script = ONE, encodes: bool = True) -> None:
        self.engine = RowsEngine(script)
        self.store = EmbeddingStore(SHAPE, 1 << 20)
        self.consumer = FakeConsumer()
        self.loader = FakeLoader()
        self.producer = FakeProducer()
        self.context = MemoryContext()
        self.observer = RecordingObserver()
        self.gate = Gate(64)
        limits = RequestLimits(flush_interval_s=0.0, abort_timeout_s=10.0)
        tracker = RequestTracker(self.gate, limits, self.observer, "role", lambda error: None)
        encoder = MediaEncoder(self.engine, self.store, MEDIA) if encodes else None
        media_input = MediaInput(CAN, INFO, self.loader, encoder, RowsInput(self.consumer, self.store))
        self.aggregated = AggregatedHandler(self.engine, INFO, tracker, media_input)
        self.prefill = PrefillHandler(self.engine, INFO, tracker, self.producer, media_input)
        self.decode = DecodeHandler(self.engine, INFO, tracker, self.consumer, media_input)

    async def compute(self, sent: GenerateRequest) -> list[Chunk]:
        return await collect(self.aggregated.generate(sent, self.context))

    def result(self, *urls: str, **changed: Any) -> dict[str, object]:
        """Return what an encode worker returns for these files."""
        held = tuple(
            HeldItem(item=each, nbytes=each.rows * 8, blocks=self.store.blocks_of(each.rows * 8))
            for each in map(item, urls)
        )
        fields = {"owner": "10.0.0.1:4000", "expires_at": 0.0, "model": "tower", "dtype": "uint8", "size": 8}
        return rows_params(TICKET, EncodedMedia(items=held, **{**fields, **changed}))  # type: ignore[arg-type]


async def collect(chunks: AsyncGenerator[Chunk, None]) -> list[Chunk]:
    return [chunk async for chunk in chunks]


def test_media_are_encoded_placed_and_counted_and_unpinned_at_the_end() -> None:
    async def body() -> None:
        first = asyncio.Event()
        harness = RowsHarness([first, *ONE])
        sent = request(A, B, tokens=(1, IMAGE, 2, IMAGE, 3))
        answer = asyncio.create_task(harness.compute(sent))
        await eventually(lambda: bool(harness.engine.submitted))
        [work] = harness.engine.submitted
        assert work.token_ids == (1, BEGIN, ROW, ROW, 2, BEGIN, ROW, ROW, ROW, 3)
        assert work.max_tokens == 40 - 10, "the limit is what the expanded prompt leaves"
        one, two = work.media
        assert isinstance(one, MediaEmbedding)
        assert isinstance(two, MediaEmbedding)
        assert (one.position, two.position) == (1, 5)
        assert one.data is not None
        assert one.data.tobytes() == rows_of(A)
        assert harness.store.pinned == 2
        first.set()
        [*_, last] = await answer
        assert last.usage is not None
        assert last.usage.prompt_tokens == 10
        assert harness.observer.records[0].prompt_tokens == 10
        assert harness.store.pinned == 0

    run_bounded(body())


def test_an_expanded_prompt_must_fit_the_context() -> None:
    async def body() -> None:
        harness = RowsHarness()
        long = "https://example.com/" + "x" * 40
        with pytest.raises(ContextTooLong, match="the prompt has 44"):
            await harness.compute(request(long))
        with pytest.raises(ContextTooLong, match="max_tokens"):
            await harness.compute(request(A, stop_conditions={"max_tokens": 37}))
        assert harness.engine.submitted == []
        assert harness.store.pinned == 0

    run_bounded(body())


def test_a_placeholder_that_a_client_has_typed_is_text() -> None:
    async def body() -> None:
        harness = RowsHarness()
        await harness.compute(request(tokens=(1, IMAGE)))
        assert harness.engine.submitted[0].token_ids == (1, 60, 61, 62)
        parts = [{"type": "text", "text": "a <image>"}, {"type": "image_url"}]
        messages = [{"role": "user", "content": parts}]
        await harness.compute(request(A, tokens=(1, IMAGE, IMAGE), extra_args={"messages": messages}))
        assert harness.engine.submitted[1].token_ids == (1, 60, 61, 62, BEGIN, ROW, ROW)
        with pytest.raises(InvalidRequest, match="2 placeholders '<image>' for 1 items"):
            await harness.compute(request(A, tokens=(1, IMAGE, IMAGE)))
        assert harness.store.pinned == 0

    run_bounded(body())


def test_requests_for_one_file_at_a_time_encode_it_once() -> None:
    async def body() -> None:
        harness = RowsHarness()
        harness.engine.gate = asyncio.Event()
        answers = [asyncio.create_task(harness.compute(request(A))) for _ in range(10)]
        await eventually(lambda: harness.gate.in_flight == 10 and bool(harness.engine.encoded))
        harness.engine.gate.set()
        await asyncio.gather(*answers)
        await harness.compute(request(A, A, tokens=(IMAGE, IMAGE)))
        assert harness.engine.encoded == [A]
        assert (harness.store.hits, harness.store.misses) == (11, 1)
        assert harness.store.pinned == 0

    run_bounded(body())


def test_encoding_goes_on_for_those_who_still_wait_and_ends_without_them() -> None:
    async def body() -> None:
        harness = RowsHarness()
        harness.engine.gate = asyncio.Event()
        contexts = [MemoryContext() for _ in range(3)]
        answers = [
            asyncio.create_task(collect(harness.aggregated.generate(request(A), context))) for context in contexts
        ]
        await eventually(lambda: harness.gate.in_flight == 3 and bool(harness.engine.encoded))
        contexts[0].cancel()
        with pytest.raises(Cancelled):
            await answers[0]
        assert harness.engine.withdrawn == 0
        for context in contexts[1:]:
            context.cancel()
        await asyncio.wait(answers)
        assert harness.engine.withdrawn == 1
        harness.engine.gate.set()
        await harness.compute(request(A))
        assert harness.engine.encoded == [A, A]
        assert (harness.store.pinned, harness.store.entries) == (0, 1)

    run_bounded(body())


def test_an_engine_that_fails_to_encode_fails_every_request_that_waits() -> None:
    async def body() -> None:
        harness = RowsHarness()
        harness.engine.error = InvalidRequest("not an image")
        results = await asyncio.gather(*(harness.compute(request(A)) for _ in range(3)), return_exceptions=True)
        assert [type(each) for each in results] == [InvalidRequest] * 3
        harness.engine.error = None
        harness.engine.wrong = {"size": 4}
        with pytest.raises(EngineFailed, match="4 x uint8"):
            await harness.compute(request(A))
        harness.engine.wrong = {}
        await harness.compute(request(A))
        assert harness.store.pinned == 0

    run_bounded(body())


def test_rows_of_an_encode_worker_are_fetched_into_the_store() -> None:
    async def body() -> None:
        harness = RowsHarness()
        sent = request(A, B, A, tokens=(IMAGE, IMAGE, IMAGE), encoder_result=harness.result(A, B, A))
        answer = asyncio.create_task(harness.compute(sent))
        await eventually(lambda: bool(harness.consumer.claims))
        [claim] = harness.consumer.claims
        assert harness.store.used_bytes == 0, "nothing is allocated before the room is claimed"
        claim.accepted.set_result(("", 0))
        await eventually(lambda: bool(claim.placed))
        assert [wanted.first for wanted in claim.placed] == [0, 1], "each different item once"
        claim.on_arrived()
        await answer
        assert harness.engine.encoded == []
        assert harness.loader.named == []
        assert harness.store.pinned == 0
        await harness.compute(sent)
        assert len(harness.consumer.claims) == 1
        assert harness.consumer.declined == [TICKET], "rows that are here are not fetched again"

    run_bounded(body())


@pytest.mark.parametrize("encodes", [True, False])
@pytest.mark.parametrize("when", ["claiming", "fetching"])
def test_rows_that_are_lost_are_encoded_here_or_the_request_is_retryable(when: str, encodes: bool) -> None:
    async def body() -> None:
        harness = RowsHarness(encodes=encodes)
        answer = asyncio.create_task(harness.compute(request(A, encoder_result=harness.result(A))))
        await eventually(lambda: bool(harness.consumer.claims))
        [claim] = harness.consumer.claims
        if when == "claiming":
            claim.accepted.set_exception(PeerLost("gone"))
        else:
            claim.accepted.set_result(("", 0))
            await eventually(lambda: bool(claim.placed))
            claim.on_lost(PeerLost("gone"))
        if encodes:
            await answer
            assert harness.engine.encoded == [A]
        else:
            with pytest.raises(PeerLost, match="gone"):
                await answer
        assert claim.closed >= 1
        assert harness.store.pinned == 0

    run_bounded(body())


@pytest.mark.parametrize("when", ["claiming", "fetching"])
def test_a_cancelled_request_frees_the_memory_after_the_claim_is_closed(when: str) -> None:
    async def body() -> None:
        harness = RowsHarness()
        answer = asyncio.create_task(harness.compute(request(A, encoder_result=harness.result(A))))
        await eventually(lambda: bool(harness.consumer.claims))
        [claim] = harness.consumer.claims
        pinned_at_close: list[int] = []
        claim.on_close = lambda: pinned_at_close.append(harness.store.pinned)
        if when == "fetching":
            claim.accepted.set_result(("", 0))
            await eventually(lambda: bool(claim.placed))
        harness.context.cancel()
        with pytest.raises(Cancelled):
            await answer
        assert pinned_at_close == [1 if when == "fetching" else 0]
        assert (harness.store.pinned, harness.store.used_bytes) == (0, 0)

    run_bounded(body())


def test_requests_that_want_the_same_rows_fetch_them_once_even_if_the_first_is_cancelled() -> None:
    async def body() -> None:
        harness = RowsHarness(encodes=False)
        contexts = [MemoryContext(), MemoryContext()]
        sent = request(A, encoder_result=harness.result(A))
        answers = [asyncio.create_task(collect(harness.aggregated.generate(sent, each))) for each in contexts]
        await eventually(lambda: len(harness.consumer.claims) == 2)
        first, second = harness.consumer.claims
        first.accepted.set_result(("", 0))
        await eventually(lambda: bool(first.placed))
        second.accepted.set_result(("", 0))
        await asyncio.sleep(0.01)
        assert second.placed == []
        contexts[0].cancel()
        await eventually(lambda: bool(second.placed))
        second.on_arrived()
        await answers[1]
        assert harness.store.pinned == 0

    run_bounded(body())


def test_a_prefill_sends_the_places_of_its_media_and_a_decode_expands_the_same_prompt() -> None:
    async def body() -> None:
        harness = RowsHarness([HandoffReady({"kv": 1}), *ONE])
        sent = request(A, tokens=(1, IMAGE, 2), stop_conditions={"max_tokens": 4})
        chunks = await collect(harness.prefill.generate(sent, harness.context))
        [lease] = harness.producer.leases
        placed = (PlacedItem(item=item(A), index=1),)
        assert lease.media == placed
        [params] = [each.disaggregated_params for each in chunks if each.disaggregated_params]
        harness.consumer.media = placed
        decoding = request(A, stop_conditions={"max_tokens": 4}, prefill_result={"disaggregated_params": params})
        await collect(harness.decode.generate(decoding, harness.context))
        prefilled, decoded = harness.engine.submitted
        assert prefilled.token_ids == decoded.token_ids == (1, BEGIN, ROW, ROW, 2)
        [embedding] = decoded.media
        assert isinstance(embedding, MediaEmbedding)
        assert (embedding.data, embedding.position) == (None, 1)
        assert len(harness.loader.named) == 1, "D-27: the decode fetches nothing"
        assert harness.store.pinned == 1, "until the KV has been taken"
        lease.end.set_result(None)
        await eventually(lambda: harness.store.pinned == 0)

    run_bounded(body())


def test_an_early_prefill_opens_its_room_before_media_are_encoded() -> None:
    async def body() -> None:
        harness = RowsHarness()
        harness.engine.gate = asyncio.Event()
        bootstrap = {"bootstrap_host": "h", "bootstrap_port": 1, "bootstrap_room": 5, "handoff_id": "secret"}
        sent = request(A, bootstrap_info=bootstrap)
        answer = asyncio.create_task(collect(harness.prefill.generate(sent, harness.context)))
        await eventually(lambda: bool(harness.engine.encoded))
        [lease] = harness.producer.leases
        assert lease.media is None
        harness.engine.gate.set()
        await eventually(lambda: lease.media is not None)
        lease.end.set_result(None)
        await answer
        assert harness.store.pinned == 0

        failing = RowsHarness()
        failing.engine.error = InvalidRequest("not an image")
        with pytest.raises(InvalidRequest):
            await collect(failing.prefill.generate(sent, failing.context))
        assert type(failing.producer.leases[0].failed) is InvalidRequest, "the decode worker gets the reason"

    run_bounded(body())


def test_rows_that_arrive_in_the_moment_of_a_cancellation_are_released() -> None:
    async def body() -> None:
        store = EmbeddingStore(SHAPE, 1 << 20)
        waiting: list[asyncio.Task[Hold]] = []

        async def load() -> Hold:
            hold = await store.hold([Wanted("a", 8)])
            assert hold is not None
            hold.filled(hold.new[0], item(A))
            asyncio.get_running_loop().call_soon(waiting[0].cancel)
            return hold

        waiting.append(asyncio.create_task(wait_for_rows(CancelScope(), load())))
        with pytest.raises(asyncio.CancelledError):
            await waiting[0]
        await eventually(lambda: store.misses == 1 and store.pinned == 0)

    run_bounded(body())


def test_places_of_another_prompt_are_refused() -> None:
    async def body() -> None:
        harness = RowsHarness()
        harness.consumer.media = (PlacedItem(item=item(A), index=2),)
        late = {"disaggregated_params": params_of(TICKET, {})}
        with pytest.raises(PeerLost, match="no placeholder at token 2"):
            await collect(harness.decode.generate(request(A, prefill_result=late), harness.context))

    run_bounded(body())


@pytest.mark.parametrize("role", ["aggregated", "early prefill", "late prefill"])
def test_rows_stay_pinned_until_the_abort_has_ended_even_if_the_request_is_cancelled_again(role: str) -> None:
    async def body() -> None:
        harness = RowsHarness([asyncio.Event()])
        harness.engine.may_abort.clear()
        bootstrap = {"bootstrap_host": "h", "bootstrap_port": 1, "bootstrap_room": 5, "handoff_id": "secret"}
        sent = request(A, bootstrap_info=bootstrap) if role == "early prefill" else request(A)
        handler = harness.aggregated if role == "aggregated" else harness.prefill
        answer = asyncio.create_task(collect(handler.generate(sent, harness.context)))
        await eventually(lambda: bool(harness.engine.submitted))
        harness.context.cancel()
        await asyncio.sleep(0.01)
        for _ in range(3):
            answer.cancel()
            await asyncio.sleep(0.01)
        assert harness.store.pinned == 1, "the engine may still read them"
        harness.engine.may_abort.set()
        await asyncio.wait([answer])
        await eventually(lambda: harness.store.pinned == 0)

    run_bounded(body())


def test_a_claim_that_is_lost_while_its_request_waits_for_memory_ends_the_wait() -> None:
    async def body() -> None:
        harness = RowsHarness(encodes=False)
        blocks = harness.store.memory.blocks
        full = await harness.store.hold([Wanted("full", blocks * harness.store.memory.block_bytes)])
        assert full is not None
        answer = asyncio.create_task(harness.compute(request(A, encoder_result=harness.result(A))))
        await eventually(lambda: bool(harness.consumer.claims))
        [claim] = harness.consumer.claims
        claim.accepted.set_result(("", 0))
        await asyncio.sleep(0.01)
        claim.on_lost(PeerLost("gone"))
        with pytest.raises(PeerLost, match="gone"):
            await asyncio.wait_for(answer, 5.0)
        assert claim.closed == 1
        assert claim.placed == []
        full.release()
        assert harness.store.pinned == 0
        assert await harness.store.hold([Wanted("next", 8)]) is not None, "the queue for memory goes on"

    run_bounded(body())
