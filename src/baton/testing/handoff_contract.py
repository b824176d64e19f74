"""The rules of `ports/engine.py` for work that produces or consumes KV. The suite copies the blocks itself."""

import asyncio
import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import msgspec
import pytest

from baton.errors import Cancelled, InvalidRequest
from baton.ports.engine import GenerateEngine, Work
from baton.protocol.ids import RequestId
from baton.protocol.outputs import FinishReason, KvWanted
from baton.protocol.requests import OutputOptions, Sampling, StopConditions
from baton.testing.bounded import eventually
from baton.testing.engine_session import Answer, Session, read_to_the_end
from baton.testing.engine_suite import EngineSuite
from baton.testing.handoff_session import (
    CONSUME,
    Produced,
    as_new_request,
    memory_of,
    producing,
    read_block,
    scores_of,
    wanted_by,
    write_block,
)


class HandoffContract(EngineSuite):
    """For engines with `EngineInfo.kv` in CPU memory. Subclass it besides `EngineContract`."""

    def make_producer(self) -> GenerateEngine:
        """Return an engine that has not been started, configured as on a worker that produces KV."""
        return self.make_engine()

    # The same output as from one engine

    @pytest.mark.parametrize(
        "reused", [0, 1, 2], ids=["not cached", "cached at the producer", "cached at the consumer"]
    )
    @pytest.mark.parametrize("blocks", [(0, 2), (1, -1), (1, 0), (1, 1), (3, 0), (5, 1), (6, 7)], ids=str)
    def test_a_handoff_gives_the_output_of_one_engine(self, blocks: tuple[int, int], reused: int) -> None:
        async def body() -> None:
            async with self._pair() as (producer, consumer):
                length = blocks[0] * producer.info.block_size + blocks[1]
                work = self.work(producer.info, length=length, tokens=24)
                for seed in (1, 2, 3):  # so that the two do not use the same blocks
                    await self._tokens_of(producer, self.work(producer.info, seed, length=40 * seed))
                beginning = self.work(producer.info, length=max(1, length * 2 // 3))
                if reused:
                    await self._tokens_of((producer, consumer)[reused - 1], beginning)
                await self._check_same(producer, consumer, work)

        self._run(body())

    def test_blocks_of_a_long_prompt_are_offered_while_it_is_computed(self) -> None:
        async def body() -> None:
            async with self._pair() as (producer, consumer):
                length = min(1500, producer.info.context_length // 2)
                produced = await self._check_same(
                    producer, consumer, self.work(producer.info, length=length, tokens=40)
                )
                assert produced.offers > 1, "the consumer can fetch while the producer computes"

        self._run(body())

    def test_a_seed_gives_the_same_tokens_across_a_handoff(self) -> None:
        async def body() -> None:
            async with self._pair() as (producer, consumer):
                work = self.work(producer.info, length=50, tokens=30)
                sampling = Sampling(temperature=1.0, seed=11, frequency_penalty=0.5, repetition_penalty=1.1)
                await self._check_same(producer, consumer, msgspec.structs.replace(work, sampling=sampling))

        self._run(body())

    def test_every_choice_continues_from_received_kv(self) -> None:
        async def body() -> None:
            async with self._pair() as (producer, consumer):
                if consumer.engine.capabilities.max_choices < 3:
                    pytest.skip("the engine does not generate three choices")
                work = self.work(producer.info, length=50, tokens=12)
                sampling = Sampling(temperature=1.0, seed=5, n=3)
                await self._check_same(producer, consumer, msgspec.structs.replace(work, sampling=sampling))

        self._run(body())

    def test_logprobs_are_the_same_across_a_handoff(self) -> None:
        async def body() -> None:
            async with self._pair() as (producer, consumer):
                if producer.engine.capabilities.max_logprobs is None:
                    pytest.skip("the engine returns no log-probabilities")
                work = self.work(producer.info, length=70, tokens=8, logprobs=0)
                alone = await scores_of(producer.engine.submit(as_new_request(work)))
                produced = await Produced(producer, producing(work)).read_all()
                consumed = as_new_request(work, CONSUME)
                stream = consumer.engine.submit(consumed)
                self._place(produced, consumer, await wanted_by(stream))
                consumer.kv_import.received(consumed.request_id)
                assert await scores_of(stream) == pytest.approx(alone, abs=1e-3)
                await produced.release()

        self._run(body())

    @pytest.mark.parametrize("reason", [FinishReason.STOP, FinishReason.EOS])
    def test_an_end_at_the_first_token_is_the_same_on_both_sides(self, reason: FinishReason) -> None:
        async def body() -> None:
            async with self._pair() as (producer, consumer):
                if not self.deterministic:
                    pytest.skip("the tokens are not deterministic")
                work = self.work(producer.info, length=40)
                first = (await self._tokens_of(producer, work))[0]
                stop = StopConditions(stop_token_ids=(first,) if reason is FinishReason.STOP else None)
                ends = (first,) if reason is FinishReason.EOS else ()
                ending = msgspec.structs.replace(work, stop=stop, eos_token_ids=ends)
                produced = await Produced(producer, producing(ending)).read_all()
                answer = await self._consume(produced, consumer, ending)
                for end in (produced.answer.ends[0], answer.ends[0]):
                    assert end is not None
                    assert end.reason is reason
                assert len(answer.tokens[0]) == 1
                await produced.release()
                await self._both_freed(producer, consumer)

        self._run(body())

    def test_received_kv_is_cached(self) -> None:
        async def body() -> None:
            async with self._pair() as (producer, consumer):
                size = producer.info.block_size
                work = self.work(producer.info, length=4 * size + 1, tokens=8)
                await self._check_same(producer, consumer, work)
                again = await read_to_the_end(consumer.engine.submit(as_new_request(work)))
                assert again.ends[0] is not None
                if not again.ends[0].cached_tokens:
                    pytest.skip("the engine has no prefix cache")
                assert again.ends[0].cached_tokens == 4 * size
                consuming = as_new_request(work, CONSUME)
                for _ in range(2):  # an id can be used again when its work has ended
                    consumed = await read_to_the_end(consumer.engine.submit(consuming))
                    assert consumed.tokens == again.tokens, "a consumer with a cached prompt wants no KV"

        self._run(body())

    def test_a_prompt_with_logprobs_is_computed_by_the_consumer(self) -> None:
        async def body() -> None:
            async with self._pair() as (_, consumer):
                if not consumer.engine.capabilities.prompt_logprobs:
                    pytest.skip("the engine returns no prompt logprobs")
                work = self.work(consumer.info, length=50)
                scored = msgspec.structs.replace(as_new_request(work, CONSUME), output=OutputOptions(prompt_logprobs=0))
                answer = await read_to_the_end(consumer.engine.submit(scored))
                assert answer.prompt_logprobs is not None
                assert len(answer.prompt_logprobs.chosen) == 49

        self._run(body())

    # Producing

    def test_offered_blocks_do_not_change_until_abort_and_leave_slots_free(self) -> None:
        async def body() -> None:
            async with self._pair() as (producer, _):
                offered = [
                    await Produced(producer, producing(self.work(producer.info, seed, length=70))).read_all()
                    for seed in range(producer.info.max_running + 1)
                ]
                await eventually(lambda: not producer.busy(), self.limit_s)
                works = [self.work(producer.info, 50 + seed, length=300, tokens=40) for seed in range(8)]
                await asyncio.gather(*(read_to_the_end(producer.engine.submit(work)) for work in works))
                for produced in offered:
                    produced.check_unchanged()
                assert len({block for produced in offered for block in produced.blocks}) == 5 * len(offered)
                for produced in offered:
                    await asyncio.gather(produced.release(), produced.release())
                    await produced.release()
                await producer.as_at_the_start(self.limit_s)

        self._run(body())

    def test_equal_prompts_offer_blocks_each_until_its_own_abort(self) -> None:
        async def body() -> None:
            async with self._pair() as (producer, consumer):
                work = self.work(producer.info, length=70, tokens=20)
                alone = await self._tokens_of(consumer, self.work(consumer.info, length=70, tokens=20))
                both = [Produced(producer, producing(work)) for _ in range(2)]
                first, second = await asyncio.gather(*(produced.read_all() for produced in both))
                await first.release()
                await self._tokens_of(producer, self.work(producer.info, 5, length=900, tokens=30))
                second.check_unchanged()
                answer = await self._consume(second, consumer, work)
                if self.deterministic:
                    assert answer.tokens[0] == alone
                await second.release()
                await self._both_freed(producer, consumer)

        self._run(body())

    def test_a_producing_request_id_is_in_use_until_abort(self) -> None:
        async def body() -> None:
            async with self._pair() as (producer, _):
                produced = await Produced(producer, producing(self.work(producer.info))).read_all()
                with pytest.raises(InvalidRequest):
                    producer.engine.submit(produced.work)
                await produced.release()
                await (await Produced(producer, produced.work).read_all()).release()

        self._run(body())

    def test_more_than_one_choice_or_token_cannot_be_produced(self) -> None:
        async def body() -> None:
            async with self._pair() as (producer, _):
                work = producing(self.work(producer.info))
                many = msgspec.structs.replace(work, sampling=Sampling(n=2))
                for impossible in (many, msgspec.structs.replace(work, max_tokens=2)):
                    with pytest.raises(InvalidRequest):
                        producer.engine.submit(impossible)
                await producer.as_at_the_start(self.limit_s)

        self._run(body())

    def test_when_all_blocks_are_offered_the_queue_idles_until_an_abort(self) -> None:
        async def body() -> None:
            async with self._pair() as (producer, _):
                offered = await self._offer_everything(producer)
                stream = producer.engine.submit(self.work(producer.info, 99))
                await self._is_idle(producer)
                assert producer.busy() == 1
                for produced in offered[1:]:
                    produced.check_unchanged()
                await offered[0].release()
                assert len((await read_to_the_end(stream)).tokens[0]) == 8
                for produced in offered[1:]:
                    await produced.release()
                await producer.as_at_the_start(self.limit_s)

        self._run(body())

    # Consuming

    def test_a_request_that_waits_for_kv_keeps_its_blocks_and_delays_no_other(self) -> None:
        async def body() -> None:
            async with self._pair() as (producer, consumer):
                memory = memory_of(consumer)
                work = self.work(consumer.info, length=70, tokens=20)
                alone = await self._tokens_of(producer, work)
                produced = await Produced(producer, producing(work)).read_all()
                consumed = as_new_request(work, CONSUME)
                stream = consumer.engine.submit(consumed)
                wanted = await wanted_by(stream)
                mark = [bytes([block % 251]) * memory.block_bytes for block in wanted.blocks]
                for block, content in zip(wanted.blocks, mark, strict=True):
                    write_block(memory, block, [content] * memory.planes)
                works = [self.work(consumer.info, 50 + seed, length=200, tokens=40) for seed in range(8)]
                await asyncio.gather(*(read_to_the_end(consumer.engine.submit(other)) for other in works))
                for block, content in zip(wanted.blocks, mark, strict=True):
                    assert read_block(memory, block) == (content,) * memory.planes, (
                        "wanted blocks are written by the transfer only"
                    )
                await self._is_idle(consumer)
                self._place(produced, consumer, wanted)
                consumer.kv_import.received(consumed.request_id)
                consumer.kv_import.received(consumed.request_id)
                answer = await read_to_the_end(stream)
                consumer.kv_import.received(consumed.request_id)
                if self.deterministic:
                    assert answer.tokens[0] == alone
                await produced.release()
                await self._both_freed(producer, consumer)

        self._run(body())

    def test_received_for_an_unknown_request_is_no_error(self) -> None:
        async def body() -> None:
            async with self._pair() as (_, consumer):
                consumer.kv_import.received(RequestId("never submitted"))
                work = self._long(consumer)
                stream = consumer.engine.submit(work)
                consumer.kv_import.received(work.request_id)
                await self._abort(consumer, work, stream)
                consumer.kv_import.received(work.request_id)
                await self._tokens_of(consumer, self.work(consumer.info))

        self._run(body())

    # Abort

    @pytest.mark.parametrize("after", [0, 1, None], ids=["queued", "producing", "offered"])
    def test_abort_of_a_producer_in_any_phase_frees_everything(self, after: int | None) -> None:
        async def body() -> None:
            async with self._pair() as (producer, _):
                length = min(2048, producer.info.context_length // 2)
                produced = Produced(producer, producing(self.work(producer.info, length=length)))
                if after is None:
                    await produced.read_all()
                    await produced.release()
                    assert await produced.stream.read() == []
                else:
                    for _ in range(after):
                        await produced.read()
                    await producer.engine.abort(produced.work.request_id)
                    if not produced.complete:
                        with pytest.raises(Cancelled):
                            await read_to_the_end(produced.stream)
                await producer.as_at_the_start(self.limit_s)

        self._run(body())

    @pytest.mark.parametrize("phase", ["queued", "wanting", "received", "decoding"])
    def test_abort_of_a_consumer_in_any_phase_frees_everything(self, phase: str) -> None:
        async def body() -> None:
            async with self._pair() as (_, consumer):
                work = as_new_request(self.work(consumer.info, length=70, tokens=self.long_tokens), CONSUME)
                stream = consumer.engine.submit(work)
                if phase != "queued":
                    await wanted_by(stream)
                if phase in ("received", "decoding"):
                    consumer.kv_import.received(work.request_id)
                if phase == "decoding":
                    assert await stream.read()
                await self._abort(consumer, work, stream)
                await consumer.as_at_the_start(self.limit_s)

        self._run(body())

    def test_many_concurrent_handoffs_and_aborts_free_everything(self) -> None:
        async def body() -> None:
            async with self._pair() as (producer, consumer):
                numbers = random.Random(13)
                storm = (
                    self._hand_off_and_maybe_abort(producer, consumer, random.Random(numbers.random()))
                    for _ in range(150)
                )
                await asyncio.gather(*storm)
                await self._both_freed(producer, consumer)
                await self._check_same(producer, consumer, self.work(producer.info, length=100, tokens=16))

        self._run(body())

    # Helpers

    @asynccontextmanager
    async def _pair(self) -> AsyncIterator[tuple[Session, Session]]:
        """Run two engines on one model: one produces KV, the other consumes it."""
        producing_engine = self.engines.session("producer", self.make_producer, self.limit_s)
        async with producing_engine as producer, self._session() as consumer:
            assert producer.info.kv is not None
            assert consumer.info.kv is not None
            assert consumer.info.kv.shape == producer.info.kv.shape, "engines on one model have one KV shape"
            yield producer, consumer

    async def _check_same(self, producer: Session, consumer: Session, work: Work) -> Produced:
        """Run `work` on one engine and on two, compare the outputs, and free everything."""
        produced = await Produced(producer, producing(work)).read_all()
        answer = await self._consume(produced, consumer, work)
        await produced.release()
        await self._both_freed(producer, consumer)
        if self.deterministic:
            alone = await read_to_the_end(producer.engine.submit(as_new_request(work)), work.sampling.n or 1)
            assert answer.tokens == alone.tokens
            if work.sampling.seed is None:
                assert produced.answer.tokens[0] == alone.tokens[0][:1]
        return produced

    async def _consume(self, produced: Produced, consumer: Session, work: Work) -> Answer:
        """Continue from the produced KV; return the output."""
        consumed = as_new_request(work, CONSUME)
        stream = consumer.engine.submit(consumed)
        answer = Answer(work.sampling.n or 1)
        while outputs := await stream.read():
            answer.add(outputs)
            for wanted in outputs:
                if isinstance(wanted, KvWanted):
                    self._place(produced, consumer, wanted)
                    consumer.kv_import.received(consumed.request_id)
        return answer

    def _place(self, produced: Produced, consumer: Session, wanted: KvWanted) -> None:
        """Copy the KV to the consumer, as it was when it was offered."""
        missing = produced.content[wanted.first :]
        for block, content in zip(wanted.blocks, missing, strict=True):
            write_block(memory_of(consumer), block, content)

    async def _offer_everything(self, producer: Session) -> list[Produced]:
        """Offer prompts until no block is free."""
        info, offered, left = producer.info, list[Produced](), producer.info.total_blocks
        while left:
            length = min(left * info.block_size, info.context_length - 1)
            work = producing(self.work(info, 1000 + left, length=length))
            produced = await Produced(producer, work).read_all()
            offered.append(produced)
            left -= len(produced.blocks)
        return offered

    async def _is_idle(self, session: Session) -> None:
        """Check that an engine with nothing to compute makes few steps: only signs of life."""
        await asyncio.sleep(0.1)
        before = session.engine.progress().steps
        await asyncio.sleep(0.5)
        assert session.engine.progress().steps - before <= 5

    async def _both_freed(self, producer: Session, consumer: Session) -> None:
        await producer.as_at_the_start(self.limit_s)
        await consumer.as_at_the_start(self.limit_s)

    async def _hand_off_and_maybe_abort(self, producer: Session, consumer: Session, numbers: random.Random) -> None:
        """One handoff: completed, or aborted on either side at a random time."""
        await asyncio.sleep(numbers.random() * 0.5)
        length = numbers.randrange(1, 6 * producer.info.block_size)
        work = self.work(producer.info, numbers.randrange(6), length, tokens=numbers.randrange(1, 20))
        aborted = numbers.randrange(4)
        produced = Produced(producer, producing(work))
        if aborted == 0:
            await asyncio.sleep(numbers.random() * 0.02)
            await producer.engine.abort(produced.work.request_id)
            return
        consumed = as_new_request(work, CONSUME)
        stream = consumer.engine.submit(consumed)
        if aborted == 1:
            await asyncio.sleep(numbers.random() * 0.02)
            await consumer.engine.abort(consumed.request_id)
            await (await produced.read_all()).release()
            return
        answer = Answer()
        while answer.ends[0] is None:
            outputs = await stream.read()
            answer.add(outputs)
            for wanted in outputs:
                if isinstance(wanted, KvWanted):
                    await produced.read_all()
                    self._place(produced, consumer, wanted)
                    consumer.kv_import.received(consumed.request_id)
                    if aborted == 2:
                        await consumer.engine.abort(consumed.request_id)
                        await produced.release()
                        return
        if not produced.complete:
            await produced.read_all()
        await produced.release()
        assert len(answer.tokens[0]) == work.max_tokens
