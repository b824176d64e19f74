"""From an engine's stream to chunks: merged, counted, and aborted unless every choice has finished."""

import asyncio
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from typing import NoReturn

import pytest
from dynamo import _core

from baton.errors import (
    BatonError,
    Cancelled,
    DeadlineExceeded,
    Draining,
    EngineDead,
    EngineFailed,
    EngineStalled,
    InvalidRequest,
)
from baton.handlers.aggregated import AggregatedHandler
from baton.ports.engine import Capabilities, Stream, Work
from baton.ports.runtime import SendNow
from baton.protocol.lifecycle import State
from baton.protocol.outputs import (
    Chunk,
    Finished,
    FinishReason,
    HandoffReady,
    Logprobs,
    Output,
    TokenDelta,
    Usage,
)
from baton.protocol.requests import GenerateRequest, Sampling, StopConditions
from baton.request.gate import Gate
from baton.request.tracker import RequestLimits, RequestTracker
from baton.runtimes.dynamo.errors import to_runtime
from baton.testing import RecordingObserver, ScriptedEngine, eventually, run_bounded
from baton.testing.fakes import SCRIPTED_INFO, Script
from baton.testing.memory_runtime import MemoryContext

END = Finished(FinishReason.LENGTH, cached_tokens=16)
ENDLESS = [TokenDelta([1])]


class Harness:
    """An aggregated worker around an engine, without a runtime."""

    def __init__(self, engine: ScriptedEngine, flush_interval_s: float = 0.0, request_timeout_s: float = 60.0) -> None:
        self.engine = engine
        self.gate = Gate(8)
        self.observer = RecordingObserver()
        self.fatal: list[BatonError] = []
        self.context = MemoryContext()
        limits = RequestLimits(
            flush_interval_s=flush_interval_s, request_timeout_s=request_timeout_s, abort_timeout_s=0.2
        )
        tracker = RequestTracker(self.gate, limits, self.observer, "aggregated", self.fatal.append)
        self.handler = AggregatedHandler(engine, SCRIPTED_INFO, tracker)

    def generate(self, choices: int = 1, send_now: SendNow[TokenDelta] | None = None) -> AsyncGenerator[Chunk, None]:
        request = GenerateRequest(
            token_ids=(1, 2, 3), stop=StopConditions(max_tokens=100), sampling=Sampling(n=choices)
        )
        return self.handler.generate(request, self.context, send_now)

    async def chunks(self, choices: int = 1) -> list[Chunk]:
        async with aclosing(self.generate(choices)) as chunks:
            return [chunk async for chunk in chunks]

    def ended(self) -> tuple[State, str | None]:
        [record] = self.observer.records
        assert self.gate.in_flight == 0
        return record.state, record.error_code

    def aborted(self) -> bool:
        """Whether every request was aborted at the engine, which holds none of them."""
        return (
            self.engine.aborted == [work.request_id for work in self.engine.submitted]
            and self.engine.progress().running == 0
        )


def two_choices() -> Capabilities:
    return Capabilities(max_choices=2)


def test_the_last_chunk_carries_the_reason_and_the_usage() -> None:
    async def body() -> None:
        harness = Harness(ScriptedEngine([TokenDelta([5]), 0.01, TokenDelta([6, 7]), END]))
        assert await harness.chunks() == [
            Chunk([5]),
            Chunk([6, 7], finish_reason=FinishReason.LENGTH, usage=Usage(3, 3, 16)),
        ]
        assert harness.ended() == (State.COMPLETED, None)
        record = harness.observer.records[0]
        assert (record.prompt_tokens, record.cached_tokens, record.completion_tokens) == (3, 16, 3)
        assert record.first_output_s is not None

    run_bounded(body())


def test_a_migrated_request_with_no_tokens_left_ends_at_once() -> None:
    async def body() -> None:
        harness = Harness(ScriptedEngine([]))
        request = GenerateRequest(token_ids=(1, 2, 3), stop=StopConditions(max_tokens=0))
        chunks = [chunk async for chunk in harness.handler.generate(request, harness.context)]
        assert chunks == [Chunk([], finish_reason=FinishReason.LENGTH, usage=Usage(3, 0))]
        assert harness.engine.submitted == []
        assert harness.ended() == (State.COMPLETED, None)

    run_bounded(body())


def test_a_finished_request_is_not_aborted() -> None:
    async def body() -> None:
        harness = Harness(ScriptedEngine([TokenDelta([5]), END]))
        await harness.chunks()
        async with aclosing(harness.generate()) as chunks:
            assert (await anext(chunks)).finish_reason is FinishReason.LENGTH
        assert harness.engine.aborted == []

    run_bounded(body())


def test_tokens_faster_than_the_flush_interval_are_joined() -> None:
    async def body() -> None:
        script = [TokenDelta([0])] + [step for token in range(1, 20) for step in (0.001, TokenDelta([token]))]
        harness = Harness(ScriptedEngine([*script, END]), flush_interval_s=3600.0)
        chunks = await harness.chunks()
        assert [chunk.token_ids for chunk in chunks] == [[0], list(range(1, 20))]

    run_bounded(body())


def test_stop_reason_and_log_probabilities_are_forwarded() -> None:
    async def body() -> None:
        logprobs = Logprobs((-0.5,))
        script = [TokenDelta([5], 0, logprobs), Finished(FinishReason.STOP, stop_reason=5)]
        [chunk] = await Harness(ScriptedEngine(script)).chunks()
        assert (chunk.logprobs, chunk.stop_reason, chunk.finish_reason) == (logprobs, 5, FinishReason.STOP)
        assert chunk.usage == Usage(3, 1, None)

    run_bounded(body())


def test_usage_counts_every_choice_and_is_on_the_last_chunk_only() -> None:
    async def body() -> None:
        script = [
            TokenDelta([1], 0),
            TokenDelta([2], 1),
            0.01,
            Finished(FinishReason.EOS, 1),
            0.01,
            TokenDelta([3], 0),
            Finished(FinishReason.LENGTH, 0),
        ]
        chunks = await Harness(ScriptedEngine(script, capabilities=two_choices())).chunks(choices=2)
        assert [(chunk.index, chunk.token_ids) for chunk in chunks] == [(0, [1]), (1, [2]), (1, []), (0, [3])]
        assert [chunk.usage for chunk in chunks] == [None, None, None, Usage(3, 3, None)]

    run_bounded(body())


def test_two_choices_that_end_together_have_one_usage() -> None:
    async def body() -> None:
        ends = [Finished(FinishReason.EOS, index) for index in (1, 0)]
        script = [TokenDelta([1], 0), TokenDelta([2], 1), *ends]
        chunks = await Harness(ScriptedEngine(script, capabilities=two_choices())).chunks(choices=2)
        assert [(chunk.index, chunk.finish_reason) for chunk in chunks] == [
            (1, FinishReason.EOS),
            (0, FinishReason.EOS),
        ]
        assert [chunk.usage for chunk in chunks] == [None, Usage(3, 2, None)]

    run_bounded(body())


def test_a_handoff_becomes_a_chunk() -> None:
    async def body() -> None:
        chunks = await Harness(ScriptedEngine([HandoffReady({"room": 0}), TokenDelta([1]), END])).chunks()
        assert chunks[0].disaggregated_params == {"room": 0}

    run_bounded(body())


def cancel(harness: Harness) -> None:
    harness.context.cancel()


def drain(harness: Harness) -> None:
    harness.gate.fire_all(Draining("leaving"))


def stall(harness: Harness) -> None:
    harness.gate.fire_all(EngineStalled("stuck"))


@pytest.mark.parametrize("script", [[], ENDLESS], ids=["before the first token", "while streaming"])
@pytest.mark.parametrize(
    ("end_early", "error", "state"),
    [
        (cancel, Cancelled, State.CANCELLED),
        (drain, Draining, State.FAILED),
        (stall, EngineStalled, State.FAILED),
    ],
)
def test_every_reason_that_fires_the_scope_aborts_at_the_engine(
    script: list[Output], end_early: Callable[[Harness], None], error: type[BatonError], state: State
) -> None:
    async def body() -> None:
        harness = Harness(ScriptedEngine(script))
        answer = asyncio.create_task(harness.chunks())
        await eventually(lambda: len(harness.engine.submitted) == 1)
        await asyncio.sleep(0.01)
        end_early(harness)
        with pytest.raises(error):
            await answer
        assert harness.aborted()
        assert harness.ended() == (state, error.code)

    run_bounded(body())


def test_the_deadline_aborts_at_the_engine() -> None:
    async def body() -> None:
        harness = Harness(ScriptedEngine(ENDLESS), request_timeout_s=0.02)
        with pytest.raises(DeadlineExceeded):
            await harness.chunks()
        assert harness.aborted()
        assert harness.ended() == (State.EXPIRED, "deadline_exceeded")

    run_bounded(body())


def test_closing_the_iterator_aborts_at_the_engine() -> None:
    async def body() -> None:
        harness = Harness(ScriptedEngine(ENDLESS))
        async with aclosing(harness.generate()) as chunks:
            await anext(chunks)
        assert harness.aborted()
        assert harness.ended() == (State.CANCELLED, "GeneratorExit")

    run_bounded(body())


def test_cancelling_the_task_aborts_at_the_engine() -> None:
    async def body() -> None:
        harness = Harness(ScriptedEngine(ENDLESS))
        answer = asyncio.create_task(harness.chunks())
        await eventually(lambda: len(harness.engine.submitted) == 1)
        answer.cancel()
        with pytest.raises(asyncio.CancelledError):
            await answer
        assert harness.aborted()
        assert harness.ended() == (State.CANCELLED, "CancelledError")

    run_bounded(body())


def test_a_second_cancellation_does_not_stop_the_abort() -> None:
    async def body() -> None:
        harness = Harness(ScriptedEngine(ENDLESS, abort_takes_s=0.05))
        answer = asyncio.create_task(harness.chunks())
        await eventually(lambda: len(harness.engine.submitted) == 1)
        answer.cancel()
        await eventually(lambda: len(harness.engine.aborted) == 1)
        answer.cancel()
        with pytest.raises(asyncio.CancelledError):
            await answer
        await eventually(harness.aborted)

    run_bounded(body())


def test_the_answer_ends_only_when_the_engine_has_confirmed_the_abort() -> None:
    async def body() -> None:
        harness = Harness(ScriptedEngine(ENDLESS, abort_takes_s=0.05))
        async with aclosing(harness.generate()) as chunks:
            await anext(chunks)
        assert harness.engine.progress().running == 0

    run_bounded(body())


def test_an_abort_that_the_engine_never_confirms_times_out(caplog: pytest.LogCaptureFixture) -> None:
    async def body() -> None:
        harness = Harness(ScriptedEngine(ENDLESS, abort_takes_s=3600.0))
        answer = asyncio.create_task(harness.chunks())
        await eventually(lambda: len(harness.engine.submitted) == 1)
        harness.context.cancel()
        with pytest.raises(Cancelled):
            await answer
        assert harness.ended() == (State.CANCELLED, "cancelled")

    run_bounded(body())
    assert "did not confirm an abort" in caplog.text


def test_a_request_cancelled_before_submit_is_not_submitted() -> None:
    async def body() -> None:
        harness = Harness(ScriptedEngine(ENDLESS))
        harness.context.cancel()
        with pytest.raises(Cancelled):
            await harness.chunks()
        assert harness.engine.submitted == []
        assert harness.ended() == (State.CANCELLED, "cancelled")

    run_bounded(body())


def test_an_engine_error_is_raised_after_the_tokens_before_it() -> None:
    async def body() -> None:
        harness = Harness(ScriptedEngine([TokenDelta([1]), EngineFailed("broken")]))
        async with aclosing(harness.generate()) as chunks:
            assert await anext(chunks) == Chunk([1])
            with pytest.raises(EngineFailed, match="broken"):
                await anext(chunks)
        assert harness.ended() == (State.FAILED, "engine_failed")
        assert harness.fatal == []

    run_bounded(body())


def test_a_dead_engine_reaches_the_worker() -> None:
    async def body() -> None:
        harness = Harness(ScriptedEngine(EngineDead("dead")))
        with pytest.raises(EngineDead):
            await harness.chunks()
        assert [error.code for error in harness.fatal] == ["engine_dead"]
        assert harness.ended() == (State.FAILED, "engine_dead")

    run_bounded(body())


@pytest.mark.parametrize("script", [[EngineDead("dead")], [TokenDelta([1]), EngineDead("dead")]])
def test_a_request_that_was_alone_in_an_engine_that_died_does_not_move_and_ends_the_worker(script: Script) -> None:
    async def body() -> None:
        harness = Harness(ScriptedEngine(script))
        with pytest.raises(EngineFailed, match="died with this request alone") as raised:
            await harness.chunks()
        assert not raised.value.retryable
        assert [error.scope for error in harness.fatal] == ["worker"]
        assert harness.ended() == (State.FAILED, "engine_failed")

    run_bounded(body())


def test_requests_that_shared_an_engine_that_died_all_move() -> None:
    async def body() -> None:
        death = asyncio.Event()
        harness = Harness(ScriptedEngine([death, EngineDead("dead")]))
        running = [asyncio.create_task(harness.chunks()) for _ in range(3)]
        await eventually(lambda: len(harness.engine.submitted) == 3)
        death.set()
        errors = await asyncio.gather(*running, return_exceptions=True)
        assert [type(error) for error in errors] == [EngineDead] * 3

    run_bounded(body())


def test_a_request_that_its_worker_ends_moves_even_if_it_is_alone() -> None:
    async def body() -> None:
        harness = Harness(ScriptedEngine([asyncio.Event()]))
        running = asyncio.create_task(harness.chunks())
        await eventually(lambda: len(harness.engine.submitted) == 1)
        harness.gate.fire_all(EngineDead("discovery has lost this worker"))
        with pytest.raises(EngineDead):
            await running

    run_bounded(body())


def test_work_that_the_engine_refuses_ends_as_refused() -> None:
    async def body() -> None:
        harness = Harness(ScriptedEngine(InvalidRequest("token_ids: no such token")))
        with pytest.raises(InvalidRequest, match="no such token"):
            await harness.chunks()
        assert harness.ended() == (State.REFUSED, "invalid_request")

    run_bounded(body())


def test_tokens_alone_are_sent_past_the_iterator() -> None:
    async def body() -> None:
        logprobs = Logprobs((-0.5,))
        script = [
            TokenDelta([5]),
            0.01,
            TokenDelta([6]),
            0.01,
            TokenDelta([7], 0, logprobs),
            0.01,
            TokenDelta([8]),
            END,
        ]
        harness = Harness(ScriptedEngine(script))
        sent: list[TokenDelta] = []
        yielded = [chunk async for chunk in harness.generate(send_now=lambda delta: not sent.append(delta))]
        assert sent == [TokenDelta([6]), TokenDelta([7], 0, logprobs)]
        assert yielded == [Chunk([5]), Chunk([8], finish_reason=FinishReason.LENGTH, usage=Usage(3, 4, 16))]
        assert harness.observer.records[0].completion_tokens == 4
        assert harness.ended() == (State.COMPLETED, None)

    run_bounded(body())


def test_tokens_that_cannot_be_sent_past_the_iterator_are_yielded() -> None:
    async def body() -> None:
        harness = Harness(ScriptedEngine([TokenDelta([5]), 0.01, TokenDelta([6]), 0.01, END]))
        chunks = [chunk async for chunk in harness.generate(send_now=lambda delta: False)]
        assert [chunk.token_ids for chunk in chunks] == [[5], [6], []]
        assert chunks[-1].usage == Usage(3, 2, 16)

    run_bounded(body())


def test_a_client_that_is_found_gone_past_the_iterator_aborts_at_the_engine() -> None:
    async def body() -> None:
        def send_now(delta: TokenDelta) -> bool:
            raise Cancelled("the client disconnected")

        harness = Harness(ScriptedEngine([TokenDelta([5]), 0.01, TokenDelta([6]), asyncio.Event()]))
        chunks = harness.generate(send_now=send_now)
        assert await anext(chunks) == Chunk([5])
        with pytest.raises(Cancelled):
            await anext(chunks)
        assert harness.aborted()
        assert harness.ended() == (State.CANCELLED, "cancelled")

    run_bounded(body())


class FailingSubmit(ScriptedEngine):
    """An engine whose submit fails after it has registered the request."""

    def submit(self, work: Work) -> NoReturn:
        super().submit(work)
        raise EngineFailed("out of memory")


def test_a_submit_that_fails_halfway_is_aborted() -> None:
    async def body() -> None:
        harness = Harness(FailingSubmit(ENDLESS))
        with pytest.raises(EngineFailed):
            await harness.chunks()
        assert len(harness.engine.submitted) == 1
        assert harness.aborted()

    run_bounded(body())


class SilentEngine(ScriptedEngine):
    """An engine whose streams end without a finish reason."""

    def submit(self, work: Work) -> "SilentStream":  # type: ignore[override]
        super().submit(work)
        return SilentStream()


class SilentStream(Stream):
    progress = ()

    async def read(self, not_before: float = 0.0) -> list[Output]:
        return []

    def fail(self, error: BaseException) -> None:
        pass


def test_a_stream_that_ends_without_a_finish_reason_fails() -> None:
    async def body() -> None:
        harness = Harness(SilentEngine())
        with pytest.raises(EngineFailed, match="without a finish reason"):
            await harness.chunks()
        assert harness.aborted()
        assert harness.ended() == (State.FAILED, "engine_failed")
        assert harness.observer.records[0].first_output_s is None

    run_bounded(body())


def test_concurrent_requests_do_not_mix() -> None:
    async def body() -> None:
        scripts = [[TokenDelta([number]), 0.005, TokenDelta([number]), END] for number in range(8)]
        harness = Harness(ScriptedEngine(*scripts))
        answers = await asyncio.gather(*(harness.chunks() for _ in range(8)))
        for answer in answers:
            tokens = [token for chunk in answer for token in chunk.token_ids]
            assert len(tokens) == 2
            assert len(set(tokens)) == 1
        assert harness.gate.in_flight == 0
        assert len(harness.observer.records) == 8

    run_bounded(body())


def test_d11_a_shutdown_is_an_error_that_moves_requests() -> None:
    async def body() -> None:
        harness = Harness(ScriptedEngine(ENDLESS))
        chunks = harness.generate()
        assert (await anext(chunks)).token_ids == [1]
        harness.gate.fire_all(Draining("this worker is shutting down"))
        with pytest.raises(Draining) as ended:
            await anext(chunks)
        assert ended.value.retryable
        assert type(to_runtime(ended.value)) is _core.EngineShutdown, "the frontend sends it to another worker"
        assert harness.engine.aborted == [harness.engine.submitted[0].request_id]

    run_bounded(body())
