"""The embed role: the work it submits, the requests it refuses, and how it ends early."""

import asyncio
import base64
import struct
from collections.abc import Awaitable, Callable
from typing import Any

import msgspec
import pytest

from baton.errors import (
    BatonError,
    Cancelled,
    ContextTooLong,
    DeadlineExceeded,
    Draining,
    EngineDead,
    EngineFailed,
    InvalidRequest,
)
from baton.handlers.embed import EmbedHandler
from baton.ports.engine import EngineInfo
from baton.protocol.embeddings import Embeddings, EmbedRequest, Texts, TokenLists
from baton.protocol.lifecycle import State
from baton.request.gate import Gate
from baton.request.tracker import RequestLimits, RequestTracker
from baton.testing import RecordingObserver, eventually, run_bounded
from baton.testing.memory_runtime import MemoryContext
from tests.unit.handlers.embed_fakes import CONTEXT, INFO, CountingEngine, LetterEncoder


class Counter:
    """A handler with everything around it."""

    def __init__(self, engine: CountingEngine, request_timeout_s: float = 600.0, info: EngineInfo = INFO) -> None:
        self.gate = Gate(8)
        self.observer = RecordingObserver()
        self.fatal: list[BatonError] = []
        tracker = RequestTracker(
            self.gate, RequestLimits(request_timeout_s=request_timeout_s), self.observer, "embed", self.fatal.append
        )
        self.handler = EmbedHandler(engine, info, tracker, LetterEncoder())

    async def embed(
        self, source: Texts | TokenLists, dimensions: int | None = None, context: MemoryContext | None = None
    ) -> Embeddings:
        request = EmbedRequest(model="m", source=source, dimensions=dimensions)
        [reply] = [reply async for reply in self.handler.embed(request, context or MemoryContext())]
        return reply


def numbers(vector: str) -> tuple[float, ...]:
    data = base64.b64decode(vector)
    return struct.unpack(f"<{len(data) // 4}f", data)


def run_with(engine: Callable[[], CountingEngine], body: Callable[[Counter], Awaitable[None]], **options: Any) -> None:
    async def main() -> None:
        counter = Counter(engine(), **options)
        await body(counter)
        assert counter.gate.in_flight == 0

    run_bounded(main())


def test_texts_and_tokens_become_vectors_in_order_with_usage() -> None:
    async def body(counter: Counter) -> None:
        texts = await counter.embed(Texts(("ab", "c")))
        assert [numbers(vector) for vector in texts.vectors] == [(2, 195, 0, 0), (1, 99, 0, 0)]
        assert (texts.prompt_tokens, texts.model) == (3, "m")
        tokens = await counter.embed(TokenLists(((97, 98), (99,))))
        assert tokens.vectors == texts.vectors
        record = counter.observer.records[0]
        assert (record.state, record.prompt_tokens, record.role) == (State.COMPLETED, 3, "embed")

    run_with(CountingEngine, body)


def test_many_texts_are_all_embedded() -> None:
    async def body(counter: Counter) -> None:
        reply = await counter.embed(Texts(tuple("a" * (number % 20 + 1) for number in range(300))))
        assert [numbers(vector)[0] for vector in reply.vectors] == [number % 20 + 1 for number in range(300)]

    run_with(CountingEngine, body)


def test_dimensions_shorten_vectors_and_normalise_them() -> None:
    async def body(counter: Counter) -> None:
        reply = await counter.embed(TokenLists(((2, 2, 0),)), dimensions=2)  # (3, 4, 0, 0)
        assert numbers(reply.vectors[0]) == pytest.approx((0.6, 0.8))
        assert numbers((await counter.embed(TokenLists(((0,),)), dimensions=1)).vectors[0]) == (1.0,)
        whole = await counter.embed(TokenLists(((2, 2, 0),)), dimensions=4)
        assert numbers(whole.vectors[0]) == pytest.approx((0.6, 0.8, 0, 0))

    run_with(CountingEngine, body)


@pytest.mark.parametrize("dimensions", [0, -1, 5, 2**31])
def test_dimensions_outside_the_vector_size_are_refused(dimensions: int) -> None:
    async def body(counter: Counter) -> None:
        with pytest.raises(InvalidRequest, match=r"dimensions.*1 to 4"):
            await counter.embed(Texts(("a",)), dimensions=dimensions)
        assert counter.observer.records[0].state is State.REFUSED

    run_with(CountingEngine, body)


@pytest.mark.parametrize(
    ("trained", "words"), [((), "leave the field out"), ((1, 3), "1, 3 or 4")], ids=["not-trained", "listed"]
)
def test_dimensions_that_the_model_was_not_trained_for_are_refused(trained: tuple[int, ...], words: str) -> None:
    async def body(counter: Counter) -> None:
        with pytest.raises(InvalidRequest, match=f"dimensions: .*{words}"):
            await counter.embed(Texts(("a",)), dimensions=2)
        assert len(numbers((await counter.embed(Texts(("a",)), dimensions=4)).vectors[0])) == 4

    run_with(CountingEngine, body, info=msgspec.structs.replace(INFO, embedding_dimensions=trained))


@pytest.mark.parametrize(
    "source", [Texts(("a", "b" * (CONTEXT + 1))), TokenLists(((1,), (1,) * (CONTEXT + 1)))], ids=["text", "tokens"]
)
def test_an_input_beyond_the_context_is_refused_by_index(source: Texts | TokenLists) -> None:
    async def body(counter: Counter) -> None:
        with pytest.raises(ContextTooLong, match=rf"input\[1\]: .*{CONTEXT} tokens.*{CONTEXT + 1}"):
            await counter.embed(source)
        assert counter.observer.records[0].state is State.REFUSED
        whole = await counter.embed(Texts(("b" * CONTEXT,)))
        assert whole.prompt_tokens == CONTEXT

    run_with(CountingEngine, body)


def test_a_long_text_in_a_later_batch_is_refused_by_index() -> None:
    async def body(counter: Counter) -> None:
        with pytest.raises(ContextTooLong, match=r"input\[100\]"):
            await counter.embed(Texts((*["a"] * 100, "b" * 100)))

    run_with(CountingEngine, body)


@pytest.mark.parametrize(
    ("error", "state", "fatal"),
    [
        (InvalidRequest("no such token"), State.REFUSED, False),
        (EngineFailed("failed"), State.FAILED, False),
        (EngineDead("dead"), State.FAILED, True),
    ],
    ids=lambda value: getattr(value, "code", None),
)
def test_errors_of_the_engine_reach_the_client(error: BatonError, state: State, fatal: bool) -> None:
    async def body(counter: Counter) -> None:
        with pytest.raises(type(error), match=error.message):
            await counter.embed(Texts(("a",)))
        assert counter.observer.records[0].state is state
        assert bool(counter.fatal) is fatal

    run_with(lambda: CountingEngine(error=error), body)


def test_cancellation_withdraws_the_work() -> None:
    async def main() -> None:
        engine = CountingEngine(gate=asyncio.Event())
        counter, context = Counter(engine), MemoryContext()
        call = asyncio.create_task(counter.embed(Texts(("a",)), context=context))
        await eventually(lambda: bool(engine.embedded))
        context.cancel()
        with pytest.raises(Cancelled):
            await call
        assert engine.withdrawn == 1
        assert counter.gate.in_flight == 0
        assert counter.observer.records[0].state is State.CANCELLED

    run_bounded(main())


def test_the_deadline_withdraws_the_work() -> None:
    async def main() -> None:
        engine = CountingEngine(gate=asyncio.Event())
        counter = Counter(engine, request_timeout_s=0.05)
        with pytest.raises(DeadlineExceeded):
            await counter.embed(Texts(("a",)))
        assert engine.withdrawn == 1
        assert counter.observer.records[0].state is State.EXPIRED

    run_bounded(main())


def test_draining_refuses_new_requests_and_ends_running_ones() -> None:
    async def main() -> None:
        engine = CountingEngine(gate=asyncio.Event())
        counter = Counter(engine)
        call = asyncio.create_task(counter.embed(Texts(("a",))))
        await eventually(lambda: bool(engine.embedded))
        counter.gate.drain()
        with pytest.raises(Draining):
            await counter.embed(Texts(("b",)))
        counter.gate.fire_all(Draining("this worker is shutting down"))
        with pytest.raises(Draining):
            await call
        assert engine.withdrawn == 1

    run_bounded(main())
