"""Rules of `ports/engine.py` about aborts: in every phase, and everything is freed."""

import asyncio
import random

import pytest

from baton.errors import Cancelled
from baton.protocol.ids import RequestId
from baton.testing.bounded import eventually
from baton.testing.engine_session import Session, read_to_the_end
from baton.testing.engine_suite import EngineSuite


class AbortRules(EngineSuite):
    """Part of `EngineContract`."""

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
