"""The rules of `ports/engine.py` as tests, for every engine. See `docs/writing-an-engine.md`."""

import asyncio
import random
from typing import Literal

import msgspec
import pytest

from baton.errors import BatonError, Cancelled, EngineDead, EngineFailed, InvalidRequest
from baton.protocol.commands import Continue, Pause
from baton.protocol.events import KvCleared, KvRemoved, KvStored
from baton.protocol.ids import RequestId, new_request_id
from baton.protocol.outputs import Finished, FinishReason, TokenDelta
from baton.protocol.requests import OutputOptions
from baton.testing.bounded import eventually, measure_lag
from baton.testing.engine_session import Answer, Session, read_to_the_end
from baton.testing.engine_suite import EngineSuite
from baton.testing.fakes import running
from baton.testing.handoff_contract import HandoffContract


class EngineContract(EngineSuite):
    """Subclass it in a test module, override `make_engine`, and pytest checks the rules of `ports/engine.py`."""

    # Start and stop

    def test_capabilities_can_be_read_before_start_and_stay_the_same(self) -> None:
        async def body() -> None:
            engine = self.make_engine()
            before = engine.capabilities
            async with running(engine) as info:
                assert engine.capabilities == before
                assert min(info.context_length, info.block_size, info.total_blocks, info.max_running) >= 1

        self._run(body())

    def test_an_engine_with_kv_memory_runs_the_handoff_contract(self) -> None:
        async def body() -> None:
            async with self._session() as session:
                has_kv = session.info.kv is not None and session.info.kv.device == "cpu"
                assert isinstance(self, HandoffContract) or not has_kv, "subclass HandoffContract too"

        self._run(body())

    def test_stop_ends_running_and_waiting_streams_with_engine_dead(self) -> None:
        async def body() -> None:
            async with self._own_session() as session:
                works = [self._long(session, seed) for seed in range(session.info.max_running + 1)]
                streams = [session.engine.submit(work) for work in works]
                await streams[0].read()
                await session.engine.stop()
                for stream in streams:
                    with pytest.raises(EngineDead):
                        await read_to_the_end(stream)
                assert session.busy() == 0

        self._run(body())

    def test_stop_twice_and_concurrently_is_no_error(self) -> None:
        async def body() -> None:
            async with self._own_session() as session:
                session.engine.submit(self._long(session))
                await asyncio.gather(session.engine.stop(), session.engine.stop())
                await session.engine.stop()

        self._run(body())

    def test_stop_before_start_is_no_error(self) -> None:
        self._run(self.make_engine().stop())

    def test_stop_after_a_failed_start_is_no_error(self) -> None:
        async def body() -> None:
            engine = self.make_broken_engine()
            if engine is None:
                pytest.skip("make_broken_engine returns None")
            with pytest.raises(BatonError) as failure:
                await engine.start()
            assert failure.value.scope == "worker"
            await engine.stop()
            await engine.stop()

        self._run(body())

    def test_submit_after_stop_raises_engine_dead(self) -> None:
        async def body() -> None:
            async with self._own_session() as session:
                work = self.work(session.info)
                await session.engine.stop()
                with pytest.raises(EngineDead):
                    session.engine.submit(work)
                await session.engine.abort(work.request_id)

        self._run(body())

    def test_readings_end_with_stop(self) -> None:
        async def body() -> None:
            engine = self.make_engine()
            async with running(engine) as info:
                session = Session(engine, info)
                listening = asyncio.create_task(session.listen())
                await eventually(lambda: session.used_blocks() is not None)
                await engine.stop()
                await listening

        self._run(body())

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
        async def body() -> None:
            async with self._session() as session:
                work = self._long(session)
                stream = session.engine.submit(work)
                await stream.read()
                clock = asyncio.get_running_loop().time
                not_before = clock() + 0.1
                outputs = await stream.read(not_before)
                assert outputs
                assert not any(isinstance(output, Finished) for output in outputs), "long_tokens is too short"
                assert clock() >= not_before - 0.002
                await session.engine.abort(work.request_id)

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

    # Abort

    def test_a_submitted_request_is_counted_at_once(self) -> None:
        async def body() -> None:
            async with self._session() as session:
                work = self._long(session)
                session.engine.submit(work)
                assert session.busy() == 1
                await session.engine.abort(work.request_id)

        self._run(body())

    def test_abort_right_after_submit_frees_everything(self) -> None:
        async def body() -> None:
            async with self._session() as session:
                work = self._long(session)
                stream = session.engine.submit(work)
                await self._abort(session, work, stream)
                await session.as_at_the_start(self.limit_s)

        self._run(body())

    def test_abort_while_waiting_leaves_the_others_alone(self) -> None:
        async def body() -> None:
            async with self._session() as session:
                works = [self._long(session, seed) for seed in range(session.info.max_running)]
                streams = [session.engine.submit(work) for work in works]
                await asyncio.gather(*(stream.read() for stream in streams))
                late = self._long(session, seed=1000)
                late_stream = session.engine.submit(late)
                assert session.engine.progress().waiting == 1
                await session.engine.abort(late.request_id)
                with pytest.raises(Cancelled):
                    assert not await late_stream.read(), "a waiting request has no tokens"
                assert session.engine.progress().waiting == 0
                assert all(await asyncio.gather(*(stream.read() for stream in streams)))
                for work, stream in zip(works, streams, strict=True):
                    await self._abort(session, work, stream)
                await session.as_at_the_start(self.limit_s)

        self._run(body())

    def test_abort_while_prefilling_frees_everything(self) -> None:
        async def body() -> None:
            async with self._session() as session:
                length = min(2048, session.info.context_length // 2)
                work = self.work(session.info, length=length, tokens=self.long_tokens)
                stream = session.engine.submit(work)
                await eventually(lambda: session.engine.progress().running > 0)
                await self._abort(session, work, stream)
                await session.as_at_the_start(self.limit_s)

        self._run(body())

    def test_abort_while_decoding_frees_everything(self) -> None:
        async def body() -> None:
            async with self._session() as session:
                work = self._long(session)
                stream = session.engine.submit(work)
                assert await stream.read()
                assert await stream.read()
                await self._abort(session, work, stream)
                await session.as_at_the_start(self.limit_s)

        self._run(body())

    def test_abort_of_every_choice_frees_everything(self) -> None:
        async def body() -> None:
            async with self._session() as session:
                if session.engine.capabilities.max_choices < 2:
                    pytest.skip("the engine generates one choice")
                work = self.work(session.info, tokens=self.long_tokens // 2, choices=2)
                stream = session.engine.submit(work)
                await stream.read()
                await self._abort(session, work, stream, choices=2)
                await session.as_at_the_start(self.limit_s)

        self._run(body())

    def test_abort_of_an_unknown_request_is_no_error(self) -> None:
        async def body() -> None:
            async with self._session() as session:
                await session.engine.abort(RequestId("never submitted"))
                await self._tokens_of(session, self.work(session.info))

        self._run(body())

    def test_abort_of_a_finished_request_keeps_its_output(self) -> None:
        async def body() -> None:
            async with self._session() as session:
                work = self.work(session.info)
                stream = session.engine.submit(work)
                await eventually(lambda: not session.busy(), self.limit_s)
                await session.engine.abort(work.request_id)
                answer = await read_to_the_end(stream)
                assert len(answer.tokens[0]) == 8
                await session.engine.abort(work.request_id)
                assert await stream.read() == []

        self._run(body())

    def test_abort_twice_and_concurrently_is_no_error(self) -> None:
        async def body() -> None:
            async with self._session() as session:
                work = self._long(session)
                stream = session.engine.submit(work)
                await stream.read()
                await asyncio.gather(*(session.engine.abort(work.request_id) for _ in range(3)))
                await self._abort(session, work, stream)
                await session.as_at_the_start(self.limit_s)

        self._run(body())

    def test_many_concurrent_submits_and_aborts_free_everything(self) -> None:
        async def body() -> None:
            async with self._session() as session:
                numbers = random.Random(7)
                await asyncio.gather(
                    *(self._submit_and_maybe_abort(session, random.Random(numbers.random())) for _ in range(300))
                )
                await session.as_at_the_start(self.limit_s)
                assert len(await self._tokens_of(session, self.work(session.info))) == 8

        self._run(body())

    # Readings

    def test_steps_grow_with_work_and_counts_return_to_zero(self) -> None:
        async def body() -> None:
            async with self._session() as session:
                before = session.engine.progress()
                assert (before.running, before.waiting) == (0, 0)
                await self._tokens_of(session, self.work(session.info, tokens=32))
                await eventually(lambda: not session.busy(), self.limit_s)
                assert session.engine.progress().steps > before.steps

        self._run(body())

    def test_kv_events_are_consistent(self) -> None:
        async def body() -> None:
            async with self._session() as session:
                size = session.info.block_size
                works = [self.work(session.info, seed % 160, size * (4 + seed % 9), tokens=2) for seed in range(240)]
                for first in range(0, len(works), 30):
                    batch = works[first : first + 30]
                    await asyncio.gather(*(read_to_the_end(session.engine.submit(work)) for work in batch))
                await session.as_at_the_start(self.limit_s)
                self._check_kv_events(session)

        self._run(body())

    def test_readings_have_no_gap_when_they_are_read_late(self) -> None:
        async def body() -> None:
            engine = self.make_engine()
            async with running(engine) as info:
                session = Session(engine, info)
                await self._tokens_of(session, self.work(info, length=4 * info.block_size))
                listening = asyncio.create_task(session.listen())
                await eventually(lambda: session.used_blocks() is not None)
                await self._tokens_of(session, self.work(info, length=8 * info.block_size))
                await engine.stop()
                await listening
                self._check_kv_events(session)

        self._run(body())

    # Commands

    @pytest.mark.parametrize("mode", ["keep", "retract"])
    def test_requests_wait_during_a_pause_and_then_continue(self, mode: Literal["keep", "retract"]) -> None:
        async def body() -> None:
            async with self._session() as session:
                if mode not in session.engine.capabilities.pause_modes:
                    pytest.skip(f"the engine cannot pause and {mode}")
                work = self.work(session.info, tokens=600)  # enough to be still running when the pause begins
                alone = await self._tokens_of(session, work) if self.deterministic else None
                stream = session.engine.submit(msgspec.structs.replace(work, request_id=new_request_id("contract")))
                await session.engine.execute(Pause(mode=mode))
                late = session.engine.submit(self.work(session.info, seed=9))
                await asyncio.sleep(0.2)
                assert session.busy() == 2
                await session.engine.execute(Continue())
                answer = await read_to_the_end(stream)
                assert len(answer.tokens[0]) == 600
                if alone is not None:
                    assert answer.tokens[0] == alone
                assert len((await read_to_the_end(late)).tokens[0]) == 8
                await session.as_at_the_start(self.limit_s)

        self._run(body())

    def test_a_paused_engine_still_aborts_and_stops(self) -> None:
        async def body() -> None:
            async with self._own_session() as session:
                if "keep" not in session.engine.capabilities.pause_modes:
                    pytest.skip("the engine cannot pause")
                work, other = self._long(session), self._long(session, seed=1)
                stream, left = session.engine.submit(work), session.engine.submit(other)
                await stream.read()
                await session.engine.execute(Pause(mode="keep"))
                await session.engine.abort(work.request_id)
                with pytest.raises(Cancelled):
                    await read_to_the_end(stream)
                await session.engine.stop()
                with pytest.raises(EngineDead):
                    await read_to_the_end(left)
                with pytest.raises(EngineDead):
                    await session.engine.execute(Continue())

        self._run(body())

    # Helpers

    async def _submit_and_maybe_abort(self, session: Session, numbers: random.Random) -> None:
        """One request: read to its end, aborted at a random time, or aborted after a read."""
        await asyncio.sleep(numbers.random() * 0.3)
        length = numbers.randrange(1, 4 * session.info.block_size)
        work = self.work(session.info, numbers.randrange(6), length, tokens=numbers.randrange(1, 40))
        stream = session.engine.submit(work)
        match numbers.randrange(3):
            case 0:
                answer = await read_to_the_end(stream)
                assert len(answer.tokens[0]) == work.max_tokens
                return
            case 1:
                await asyncio.sleep(numbers.random() * 0.1 * numbers.randrange(2))
            case _:
                await stream.read()
        await session.engine.abort(work.request_id)

    def _check_kv_events(self, session: Session) -> None:
        stored: set[int] = set()
        for reading in session.readings:
            match reading:
                case KvStored():
                    assert reading.block_size == session.info.block_size
                    assert len(reading.token_ids) == reading.block_size * len(reading.block_hashes)
                    assert reading.parent_hash is None or reading.parent_hash in stored, "the parent was stored"
                    stored.update(reading.block_hashes)
                case KvRemoved():
                    assert stored.issuperset(reading.block_hashes), "removed blocks were stored"
                    stored.difference_update(reading.block_hashes)
                case KvCleared():
                    stored.clear()
