"""The rules of `ports/engine.py` as tests, for every engine. See `docs/writing-an-engine.md`."""

import asyncio
from typing import Literal

import msgspec
import pytest

from baton.errors import BatonError, Cancelled, EngineDead
from baton.protocol.commands import Continue, Pause
from baton.protocol.events import KvCleared, KvRemoved, KvStored
from baton.protocol.ids import new_request_id
from baton.testing.abort_rules import AbortRules
from baton.testing.bounded import eventually
from baton.testing.engine_session import Session, read_to_the_end
from baton.testing.fakes import running
from baton.testing.generation_rules import GenerationRules
from baton.testing.handoff_contract import HandoffContract


class EngineContract(GenerationRules, AbortRules):
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
