"""The encode role: the work it submits, the result it returns, and how long that is held."""

import asyncio
from contextlib import aclosing
from typing import Any

import pytest

from baton.errors import (
    BatonError,
    Cancelled,
    DeadlineExceeded,
    Draining,
    EngineDead,
    EngineFailed,
    InvalidRequest,
    Overloaded,
    PeerLost,
    Unsupported,
)
from baton.handlers.encode import EncodeHandler
from baton.handlers.tickets import read_encoder_result
from baton.protocol.codec import decode_request, encode_chunk
from baton.protocol.ids import RequestId
from baton.protocol.lifecycle import State
from baton.protocol.media import MediaFile
from baton.protocol.outputs import Chunk, FinishReason
from baton.protocol.requests import GenerateRequest
from baton.request.gate import Gate
from baton.request.tracker import RequestLimits, RequestTracker
from baton.testing import RecordingObserver, eventually, run_bounded
from baton.testing.fakes import SCRIPTED_INFO
from baton.testing.memory_runtime import MemoryContext
from tests.unit.handlers.handoff_fakes import FakeProducer
from tests.unit.media.media_fakes import EncodingEngine, FakeLoader

IMAGES = {"image_url": [{"Url": "https://example.com/a"}, "data:,b"]}


def request(media: Any = IMAGES, tokens: tuple[int, ...] = (1, 2, 3)) -> GenerateRequest:
    return decode_request({"token_ids": list(tokens), "multi_modal_data": media})


class Encoder:
    """A handler with everything around it."""

    def __init__(
        self, engine: EncodingEngine | None = None, loader: FakeLoader | None = None, request_timeout_s: float = 60.0
    ) -> None:
        self.engine = engine or EncodingEngine()
        self.loader = loader or FakeLoader()
        self.producer = FakeProducer()
        self.gate = Gate(4)
        self.observer = RecordingObserver()
        self.fatal: list[BatonError] = []
        self.context = MemoryContext()
        limits = RequestLimits(request_timeout_s=request_timeout_s, abort_timeout_s=0.5)
        tracker = RequestTracker(self.gate, limits, self.observer, "encode", self.fatal.append)
        self.handler = EncodeHandler(self.engine, SCRIPTED_INFO, tracker, self.loader, self.producer)

    async def encode(self, sent: GenerateRequest | None = None) -> list[Chunk]:
        return [chunk async for chunk in self.handler.generate(sent or request(), self.context)]

    def ended(self) -> State:
        [record] = self.observer.records
        assert self.gate.in_flight == 0
        return record.state


def test_one_final_chunk_carries_the_ticket_and_the_engines_parameters() -> None:
    async def body() -> None:
        encoder = Encoder()
        [chunk] = await encoder.encode()
        [work] = encoder.engine.encoded
        assert work.token_ids == (1, 2, 3)
        assert work.media == (
            MediaFile(modality="image", data=b"https://example.com/a", place="multi_modal_data.image_url[0]"),
            MediaFile(modality="image", data=b"data:,b", place="multi_modal_data.image_url[1]"),
        )
        wire = encode_chunk(chunk)
        assert wire["finish_reason"] == FinishReason.STOP.value, "the frontend takes the chunk that has one"
        assert chunk.encoder_result is not None
        ticket, params, _ = read_encoder_result(chunk.encoder_result)
        assert params == {"handle": str(work.request_id)}
        assert encoder.producer.offers == [(ticket, 3)]
        assert encoder.ended() is State.COMPLETED

    run_bounded(body())


@pytest.mark.parametrize("end", ["taken", "expired", "lost"])
def test_d16_encoded_media_outlive_the_request_and_are_freed_when_the_lease_ends(end: str) -> None:
    async def body() -> None:
        encoder = Encoder()
        await encoder.encode()
        await asyncio.sleep(0.02)
        assert len(encoder.engine.held) == 1, "the worker that computes has not read it yet"
        [lease] = encoder.producer.leases
        if end == "taken":
            lease.end.set_result(None)
        else:
            lease.lose(PeerLost(end))
        await eventually(lambda: not encoder.engine.held)

    run_bounded(body())


def test_encoded_media_that_are_claimed_and_never_taken_are_freed_after_the_request_timeout() -> None:
    async def body() -> None:
        encoder = Encoder(request_timeout_s=0.2)
        await encoder.encode()
        [lease] = encoder.producer.leases
        await eventually(lambda: not encoder.engine.held)
        assert type(lease.failed) is DeadlineExceeded

    run_bounded(body())


def test_d16_cancellation_while_media_are_fetched_encodes_nothing() -> None:
    async def body() -> None:
        encoder = Encoder(loader=FakeLoader(gate=asyncio.Event()))
        call = asyncio.create_task(encoder.encode())
        await eventually(lambda: bool(encoder.loader.named))
        encoder.context.cancel()
        with pytest.raises(Cancelled):
            await call
        assert encoder.engine.encoded == []
        assert encoder.ended() is State.CANCELLED

    run_bounded(body())


@pytest.mark.parametrize("how", ["cancel", "deadline", "shutdown", "task"])
def test_d16_a_request_that_ends_while_the_engine_encodes_withdraws_the_work(how: str) -> None:
    async def body() -> None:
        encoder = Encoder(EncodingEngine(gate=asyncio.Event()), request_timeout_s=0.05 if how == "deadline" else 60.0)
        call = asyncio.create_task(encoder.encode())
        await eventually(lambda: bool(encoder.engine.encoded))
        expected: type[BaseException] = DeadlineExceeded
        if how == "cancel":
            expected = Cancelled
            encoder.context.cancel()
        elif how == "shutdown":
            expected = Draining
            encoder.gate.fire_all(Draining("leaving"))
        elif how == "task":
            expected = asyncio.CancelledError
            call.cancel()
        with pytest.raises(expected):
            await call
        assert encoder.engine.withdrawn == 1
        assert encoder.engine.aborted == [encoder.engine.encoded[0].request_id]
        assert encoder.producer.leases == []
        assert encoder.gate.in_flight == 0

    run_bounded(body())


def test_d16_a_reply_that_cannot_be_sent_frees_the_encoded_media() -> None:
    async def body() -> None:
        encoder = Encoder()
        replies = encoder.handler.generate(request(), encoder.context)
        async with aclosing(replies):
            await anext(replies)
            assert len(encoder.engine.held) == 1
        await eventually(lambda: not encoder.engine.held)
        [lease] = encoder.producer.leases
        assert lease.failed is not None, "a worker that claims it gets the reason"

    run_bounded(body())


@pytest.mark.parametrize("error", [InvalidRequest("bad"), EngineFailed("failed"), EngineDead("dead")])
def test_d16_a_failed_encode_is_aborted(error: BatonError) -> None:
    async def body() -> None:
        encoder = Encoder(EncodingEngine(error=error))
        with pytest.raises(type(error)):
            await encoder.encode()
        assert len(encoder.engine.aborted) == 1
        assert encoder.fatal == ([error] if error.scope == "worker" else [])

    run_bounded(body())


@pytest.mark.parametrize(
    ("sent", "error", "why"),
    [
        (request(media=None), InvalidRequest, "nothing to encode"),
        (request(media={}), InvalidRequest, "nothing to encode"),
        (request(media={"image_url": []}), InvalidRequest, "nothing to encode"),
        (request(tokens=()), InvalidRequest, "token_ids"),
        (request(media={"image_url": ["ftp://example.com/a.png"]}), InvalidRequest, r"image_url\[0\]: only http"),
        (request(media={"video_url": ["https://a"]}), Unsupported, r"video_url: this engine encodes image only"),
        (request(media={"image_url": [{"Decoded": {}}]}), Unsupported, r"image_url\[0\].*decoded"),
    ],
)
def test_a_request_that_cannot_be_encoded_is_refused_before_media_are_fetched(
    sent: GenerateRequest, error: type[BatonError], why: str
) -> None:
    async def body() -> None:
        encoder = Encoder()
        with pytest.raises(error, match=why):
            await encoder.encode(sent)
        assert encoder.loader.named == []
        assert encoder.engine.encoded == []
        assert encoder.ended() is State.REFUSED

    run_bounded(body())


def test_media_that_cannot_be_fetched_never_reach_the_engine() -> None:
    async def body() -> None:
        encoder = Encoder(loader=FakeLoader(error=InvalidRequest("multi_modal_data.image_url[0]: not found")))
        with pytest.raises(InvalidRequest, match="not found"):
            await encoder.encode()
        assert encoder.engine.encoded == []

    run_bounded(body())


def test_a_worker_at_its_limit_refuses() -> None:
    async def body() -> None:
        encoder = Encoder(EncodingEngine(gate=asyncio.Event()))
        calls = [asyncio.create_task(encoder.encode()) for _ in range(4)]
        await eventually(lambda: encoder.gate.in_flight == 4)
        with pytest.raises(Overloaded):
            await encoder.encode()
        for call in calls:
            call.cancel()
        await asyncio.wait(calls)
        assert encoder.gate.in_flight == 0

    run_bounded(body())


def test_d17_a_probe_encodes_an_image_and_frees_it() -> None:
    async def body() -> None:
        encoder = Encoder()
        image = MediaFile(modality="image", data=b"x")
        await encoder.handler.probe((7,), image, encoder.context)
        assert [work.media for work in encoder.engine.encoded] == [(image,)]
        assert encoder.engine.held == set()
        assert encoder.producer.leases == []
        for error in (EngineFailed("failed"), EngineDead("dead")):
            failing = Encoder(EncodingEngine(error=error))
            with pytest.raises(type(error)):
                await failing.handler.probe((7,), image, failing.context)
            assert failing.gate.in_flight == 0

    run_bounded(body())


def test_an_engine_that_refuses_the_good_image_of_the_probe_has_failed() -> None:
    async def body() -> None:
        refusing = Encoder(EncodingEngine(error=InvalidRequest("it is not an image")))
        with pytest.raises(EngineFailed, match="refuses to encode the probe: it is not an image"):
            await refusing.handler.probe((7,), MediaFile(modality="image", data=b"x"), refusing.context)

    run_bounded(body())


class HandleEncoder(EncodingEngine):
    """Records the requests whose handles nobody has read."""

    def __init__(self) -> None:
        super().__init__()
        self.unread: list[RequestId] = []

    def mark_unread(self, request_id: RequestId) -> None:
        assert request_id in self.held, "before the abort"
        self.unread.append(request_id)


@pytest.mark.parametrize("claimed", [False, True])
def test_d16_handles_of_a_lease_that_nobody_claimed_are_marked_as_unread(claimed: bool) -> None:
    async def body() -> None:
        engine = HandleEncoder()
        encoder = Encoder(engine)
        await encoder.encode()
        [lease] = encoder.producer.leases
        lease.claimed = claimed
        lease.lose(PeerLost("expired"))
        await eventually(lambda: not engine.held)
        assert engine.unread == ([] if claimed else [engine.encoded[0].request_id])

    run_bounded(body())


def test_d16_handles_of_a_probe_are_marked_as_unread() -> None:
    async def body() -> None:
        engine = HandleEncoder()
        encoder = Encoder(engine)
        await encoder.handler.probe((7,), MediaFile(modality="image", data=b"x"), encoder.context)
        assert engine.unread == [engine.encoded[0].request_id]
        assert engine.held == set()

    run_bounded(body())
