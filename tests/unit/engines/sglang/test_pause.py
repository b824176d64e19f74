"""Pauses and releases of SGLang, with a scheduler that steps only while it is not paused, and dies as SGLang's does."""

import asyncio
from collections.abc import AsyncGenerator
from types import SimpleNamespace
from typing import Any

import pytest

from baton.engine_kit.output_stream import OutputStream
from baton.engines.sglang.compat import Dialect
from baton.engines.sglang.params import Setting
from baton.engines.sglang.pause import PauseCommands
from baton.engines.sglang.requests import Requests
from baton.errors import InvalidRequest, Paused
from baton.ports.engine import Work
from baton.protocol.commands import Continue, Pause, ReleaseMemory, ResumeMemory
from baton.protocol.ids import RequestId
from baton.testing.bounded import eventually, run_bounded
from baton.testing.engine_session import read_to_the_end

pytestmark = pytest.mark.usefixtures("io_struct")

ABORT = {"type": "abort", "message": "Aborted", "status_code": None}


class Scheduler:
    """SGLang's front half and its scheduler, as far as a pause and a release concern them."""

    def __init__(self) -> None:
        self.rid_to_state: dict[str, Any] = {}
        self.lora_ref_cache: dict[str, Any] = {}
        self.paused = False
        self.compiling = 0
        self.queue: list[str] = []
        self.running: list[str] = []
        self.aborted: list[str] = []
        self.released: list[str] = []
        self._resumed = asyncio.Event()
        self._resumed.set()

    async def generate_request(self, request: Any, _: None) -> AsyncGenerator[dict[str, Any], None]:
        rid = request.rid
        state = SimpleNamespace(dispatched=False, finished=False, event=asyncio.Event(), out_list=[])
        self.rid_to_state[rid] = state
        try:
            await self._resumed.wait()
            state.dispatched = True
            self.queue.append(rid)
            self._step()
            while not state.finished:
                await state.event.wait()
                state.event.clear()
                for chunk in state.out_list:
                    yield chunk
                state.out_list = []
        finally:
            del self.rid_to_state[rid]

    def abort_request(self, rid: str = "", abort_all: bool = False) -> None:
        for known in tuple(self.rid_to_state):
            if abort_all or known.startswith(rid):
                self._abort(known)

    async def pause_generation(self, request: Any) -> None:
        self._resumed.clear()
        match request.mode:
            case "abort":
                while self.queue or self.running:  # SGLang waits for all that hold its lock
                    self.abort_request(abort_all=True)
                    await asyncio.sleep(0.01)
            case "retract":
                self.paused = True
                self.queue += self.running
                self.running = []
            case "in_place":
                self.paused = True

    async def continue_generation(self, _: Any) -> None:
        self.paused = False
        self._resumed.set()
        self._step()

    async def flush_cache(self) -> Any:
        return SimpleNamespace(success=self._idle(), message="")

    async def release_memory_occupation(self, request: Any, _: None) -> None:
        assert self._idle(), "SGLang's scheduler dies"
        self.released += request.tags

    async def resume_memory_occupation(self, request: Any, _: None) -> None:
        self.released = [tag for tag in self.released if tag not in request.tags]

    def _idle(self) -> bool:
        return not self.running and not self.compiling and (self.paused or not self.queue)

    def _abort(self, rid: str) -> None:
        if rid in self.queue:
            self.queue.remove(rid)
            self._put(rid, ABORT)
        elif rid in self.running:
            self.aborted.append(rid)
            self._step()

    def _step(self) -> None:
        if self.paused:
            return
        assert not self.released, "SGLang's scheduler dies"
        for rid in self.queue:
            self.running.append(rid)
            self._put(rid, None, [7])
        self.queue = []
        ended, self.aborted = self.aborted, []
        for rid in ended:
            self.running.remove(rid)
            self._put(rid, ABORT)

    def _put(self, rid: str, finish: Any, tokens: list[int] | None = None) -> None:
        state = self.rid_to_state[rid]
        state.finished = finish is not None
        state.out_list.append({"output_ids": tokens or [], "meta_info": {"finish_reason": finish}})
        state.event.set()


def make(retracts: bool = True) -> tuple[Scheduler, Requests, PauseCommands]:
    scheduler: Any = Scheduler()
    setting = Setting(dialect=Dialect(version="0.5.23"))
    requests = Requests(scheduler, lambda **fields: SimpleNamespace(**fields), setting)
    return scheduler, requests, PauseCommands(scheduler, requests, retracts)


async def running(requests: Requests, name: str) -> OutputStream:
    stream = requests.submit(Work(request_id=RequestId(name), token_ids=(1, 2), max_tokens=9))
    await stream.read()
    return stream


@pytest.mark.parametrize("tag", ["weights", "kv_cache"])
def test_a_release_returns_requests_to_the_queue_that_a_pause_has_kept_in_place(tag: str) -> None:
    async def body() -> None:
        scheduler, requests, commands = make()
        await running(requests, "a")
        await commands.execute(Pause(mode="keep"))
        await commands.execute(ReleaseMemory(tags=(tag,)))
        assert scheduler.released == [tag]
        assert not scheduler.running
        await commands.execute(ResumeMemory(tags=(tag,)))
        await commands.execute(Continue())
        assert len(scheduler.running) == 1
        await requests.abort(RequestId("a"))

    run_bounded(body())


def test_a_release_that_sglang_would_die_of_is_refused_and_changes_nothing() -> None:
    async def body() -> None:
        scheduler, requests, commands = make()
        await running(requests, "a")
        scheduler.compiling = 1  # a grammar, which a pause does not end
        with pytest.raises(InvalidRequest, match="retry"):
            await commands.execute(ReleaseMemory(tags=("weights",)))
        assert not scheduler.released
        assert len(scheduler.running) == 1
        assert not requests.held
        await requests.abort(RequestId("a"))

    run_bounded(body())


@pytest.mark.parametrize("retracts", [True, False])
@pytest.mark.parametrize("mode", ["keep", "retract"])
def test_a_paused_engine_can_be_paused_again_to_end_its_requests(mode: Any, retracts: bool) -> None:
    async def body() -> None:
        scheduler, requests, commands = make(retracts)
        stream = await running(requests, "a")
        await commands.execute(Pause(mode=mode))
        late = requests.submit(Work(request_id=RequestId("late"), token_ids=(1, 2), max_tokens=9))
        await asyncio.sleep(0)
        outcome = await asyncio.wait_for(commands.execute(Pause(mode="abort")), 5)
        assert outcome.requests == 2
        for ended in (stream, late):
            with pytest.raises(Paused):
                await read_to_the_end(ended)
        await eventually(lambda: not requests.running and not requests.waiting)
        assert requests.held
        await commands.execute(ReleaseMemory(tags=("weights",)))
        assert scheduler.released == ["weights"]

    run_bounded(body())


def test_requests_that_wait_for_released_memory_can_be_ended() -> None:
    async def body() -> None:
        scheduler, requests, commands = make()
        stream = await running(requests, "a")
        await commands.execute(ReleaseMemory(tags=("weights",)))
        await commands.execute(Pause(mode="abort"))
        with pytest.raises(Paused):
            await read_to_the_end(stream)
        await eventually(lambda: not requests.running)
        assert scheduler.released == ["weights"]

    run_bounded(body())
