"""Rules of `ports/engine.py` about tokens and the streams that carry them."""

import asyncio
import random

import msgspec
import pytest

from baton.errors import Cancelled, EngineFailed, InvalidRequest
from baton.protocol.ids import new_request_id
from baton.protocol.outputs import Finished, FinishReason, TokenDelta
from baton.protocol.requests import OutputOptions
from baton.testing.bounded import eventually, measure_lag
from baton.testing.engine_session import Answer, Session, read_to_the_end
from baton.testing.engine_suite import EngineSuite


class GenerationRules(EngineSuite):
    """Part of `EngineContract`."""

    # Generation

    def test_every_choice_finishes_once_and_then_the_stream_ends(self) -> None:
        async def body() -> None:
            async with self._session() as session:
                stream = session.engine.submit(self.work(session.info))
                answer = await read_to_the_end(stream)
                assert answer.ends[0] is not None
                assert await stream.read() == []
                assert await stream.read() == []

        self._run(body())

    @pytest.mark.parametrize("tokens", [1, 2, 17, 64])
    def test_exactly_max_tokens_are_generated(self, tokens: int) -> None:
        async def body() -> None:
            async with self._session() as session:
                answer = await read_to_the_end(session.engine.submit(self.work(session.info, tokens=tokens)))
                assert len(answer.tokens[0]) == tokens
                assert answer.ends[0] is not None
                assert answer.ends[0].reason is FinishReason.LENGTH

        self._run(body())

    def test_cached_tokens_come_with_the_first_tokens_and_with_the_end(self) -> None:
        async def body() -> None:
            async with self._session() as session:
                length = 4 * session.info.block_size
                for _ in range(2):
                    work = self.work(session.info, length=length, tokens=4)
                    answer = await read_to_the_end(session.engine.submit(work))
                    assert answer.ends[0] is not None
                    assert answer.cached is not None
                    assert answer.cached == answer.ends[0].cached_tokens
                    assert answer.cached <= length

        self._run(body())

    def test_progress_of_a_prompt_is_in_order_and_covers_what_was_computed(self) -> None:
        """An engine need not tell; what it tells is right, and complete with the end."""

        async def body() -> None:
            async with self._session() as session:
                length = 4 * session.info.block_size
                stream = session.engine.submit(self.work(session.info, length=length, tokens=4))
                answer = await read_to_the_end(stream)
                phases = [each.phase for each in stream.progress]
                if not phases:
                    return
                assert phases[:2] == ["queued", "first_step"]
                assert [each.at_ns for each in stream.progress] == sorted(each.at_ns for each in stream.progress)
                assert sum(each.tokens for each in stream.progress) in (0, length - (answer.cached or 0))

        self._run(body())

    def test_requests_in_one_batch_do_not_mix(self) -> None:
        async def body() -> None:
            async with self._session() as session:
                works = [self.work(session.info, seed, length=16 + seed, tokens=40 + seed) for seed in range(12)]
                streams = [session.engine.submit(work) for work in works]
                together = await asyncio.gather(*(read_to_the_end(stream) for stream in streams))
                assert [len(answer.tokens[0]) for answer in together] == [40 + seed for seed in range(12)]
                if self.deterministic:
                    alone = [await self._tokens_of(session, work) for work in works]
                    assert [answer.tokens[0] for answer in together] == alone

        self._run(body())

    def test_a_stop_token_finishes_the_choice(self) -> None:
        async def body() -> None:
            async with self._session() as session:
                if not self.deterministic:
                    pytest.skip("the tokens are not deterministic")
                work = self.work(session.info, tokens=16)
                tokens = await self._tokens_of(session, work)
                stop = tokens[6]
                first = tokens.index(stop)
                conditions = msgspec.structs.replace(work.stop, stop_token_ids=(stop,))
                stopped = msgspec.structs.replace(work, stop=conditions, request_id=new_request_id("contract"))
                answer = await read_to_the_end(session.engine.submit(stopped))
                assert answer.tokens[0] in (tokens[:first], tokens[: first + 1])
                assert answer.ends[0] is not None
                assert answer.ends[0].reason is FinishReason.STOP

        self._run(body())

    def test_n_choices_finish_once_each(self) -> None:
        async def body() -> None:
            async with self._session() as session:
                if session.engine.capabilities.max_choices < 2:
                    pytest.skip("the engine generates one choice")
                stream = session.engine.submit(self.work(session.info, tokens=12, choices=2))
                answer = await read_to_the_end(stream, choices=2)
                assert [len(tokens) for tokens in answer.tokens] == [12, 12]
                assert None not in answer.ends

        self._run(body())

    def test_logprobs_are_aligned_with_merged_tokens(self) -> None:
        async def body() -> None:
            async with self._session() as session:
                max_logprobs = session.engine.capabilities.max_logprobs
                if max_logprobs is None:
                    pytest.skip("the engine returns no log-probabilities")
                requested = min(2, max_logprobs)
                stream = session.engine.submit(self.work(session.info, tokens=48, logprobs=requested))
                positions = 0
                while outputs := await stream.read():
                    for delta in (output for output in outputs if isinstance(output, TokenDelta)):
                        assert delta.logprobs is not None
                        assert len(delta.logprobs.chosen) == len(delta.token_ids)
                        assert all(value <= 0.0 for value in delta.logprobs.chosen)
                        if requested:
                            assert len(delta.logprobs.top) == len(delta.token_ids)
                        positions += len(delta.logprobs.chosen)
                    await asyncio.sleep(0.02)
                assert positions == 48

        self._run(body())

    def test_prompt_logprobs_come_once_with_the_first_tokens(self) -> None:
        async def body() -> None:
            async with self._session() as session:
                can = session.engine.capabilities
                if not can.prompt_logprobs:
                    pytest.skip("the engine returns no prompt logprobs")
                work = self.work(session.info, length=3 * session.info.block_size + 1, tokens=4)
                sampling = msgspec.structs.replace(work.sampling, n=min(2, can.max_choices))
                for alternatives in (0, 2):
                    asked = msgspec.structs.replace(
                        work,
                        request_id=new_request_id("scored"),
                        sampling=sampling,
                        output=OutputOptions(prompt_logprobs=alternatives),
                    )
                    answer = await read_to_the_end(session.engine.submit(asked), sampling.n or 1)
                    assert answer.prompt_logprobs is not None
                    assert len(answer.prompt_logprobs.chosen) == len(work.token_ids) - 1
                    assert all(logprob <= 0 for logprob in answer.prompt_logprobs.chosen)
                    assert {len(top) for top in answer.prompt_logprobs.top} <= {alternatives}

        self._run(body())

    def test_impossible_work_is_refused_at_submit_and_holds_nothing(self) -> None:
        async def body() -> None:
            async with self._session() as session:
                for work in self.impossible(session.info):
                    with pytest.raises(InvalidRequest):
                        session.engine.submit(work)
                    assert session.busy() == 0
                    await session.engine.abort(work.request_id)
                await self._tokens_of(session, self.work(session.info))
                await session.as_at_the_start(self.limit_s)

        self._run(body())

    def test_the_engine_does_not_block_the_event_loop(self) -> None:
        async def body() -> None:
            async with self._session() as session:
                measuring = asyncio.create_task(measure_lag())
                works = [self.work(session.info, seed, length=64, tokens=64) for seed in range(16)]
                await asyncio.gather(*(read_to_the_end(session.engine.submit(work)) for work in works))
                measuring.cancel()
                assert await measuring < self.lag_limit_s

        self._run(body())

    # Streams

    def test_a_slow_reader_gets_every_token_once_in_merged_deltas(self) -> None:
        async def body() -> None:
            async with self._session() as session:
                work = self.work(session.info, tokens=100)
                stream = session.engine.submit(work)
                await eventually(lambda: not session.busy(), self.limit_s)
                await asyncio.sleep(0.05)
                answer = await read_to_the_end(stream)
                assert answer.reads <= 2
                assert len(answer.tokens[0]) == 100
                if self.deterministic:
                    assert answer.tokens[0] == await self._tokens_of(session, work)

        self._run(body())

    def test_not_before_delays_tokens(self) -> None:
        async def delayed(session: Session, delay_s: float) -> bool:
            """Return whether tokens waited; not if all of them were there sooner, and the end, which is not delayed."""
            work = self._long(session)
            stream = session.engine.submit(work)
            await stream.read()
            clock = asyncio.get_running_loop().time
            not_before = clock() + delay_s
            outputs = await stream.read(not_before)
            assert outputs
            await session.engine.abort(work.request_id)
            if any(isinstance(output, Finished) for output in outputs):
                return False
            assert clock() >= not_before - 0.002
            return True

        async def body() -> None:
            async with self._session() as session:
                for delay_s in (0.1, 0.03, 0.01):
                    if await delayed(session, delay_s):
                        return
                pytest.fail("long_tokens is too short")

        self._run(body())

    def test_not_before_does_not_delay_the_end(self) -> None:
        async def body() -> None:
            async with self._session() as session:
                far = asyncio.get_running_loop().time() + 3600
                answer = await read_to_the_end(session.engine.submit(self.work(session.info)), not_before=far)
                assert len(answer.tokens[0]) == 8
                work = self._long(session)
                stream = session.engine.submit(work)
                reading = asyncio.create_task(read_to_the_end(stream, not_before=far))
                await eventually(lambda: session.engine.progress().running > 0)
                await session.engine.abort(work.request_id)
                with pytest.raises(Cancelled):
                    await reading

        self._run(body())

    def test_cancelling_a_read_loses_nothing(self) -> None:
        async def body() -> None:
            async with self._session() as session:
                work = self.work(session.info, tokens=60)
                stream = session.engine.submit(work)
                numbers = random.Random(1)
                answer = Answer()
                while answer.ends[0] is None:
                    read = asyncio.ensure_future(stream.read())
                    await asyncio.wait([read], timeout=numbers.random() * 0.004)
                    read.cancel()
                    await asyncio.wait([read])
                    if not read.cancelled():
                        answer.add(read.result())
                assert len(answer.tokens[0]) == 60
                if self.deterministic:
                    assert answer.tokens[0] == await self._tokens_of(session, work)

        self._run(body())

    def test_the_first_end_of_a_stream_wins(self) -> None:
        async def body() -> None:
            async with self._session() as session:
                work = self._long(session)
                stream = session.engine.submit(work)
                stream.fail(EngineFailed("first"))
                stream.fail(EngineFailed("second"))
                await session.engine.abort(work.request_id)
                with pytest.raises(EngineFailed, match="first"):
                    await read_to_the_end(stream)
                await session.as_at_the_start(self.limit_s)

        self._run(body())
