"""Pausing SGLang, releasing its memory, and clearing its cache.

`control/` owns the state: which pause holds and which memory is released. Here are the operations. SGLang dies when
memory is released while it has anything to do, so requests return to the queue before a release, and stay there.
"""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from baton.engines.sglang.requests import Requests
from baton.engines.sglang.sglang_types import Manager
from baton.errors import InvalidRequest, Paused
from baton.protocol.commands import ClearCache, Continue, Outcome, Pause, ReleaseMemory, ResumeMemory

MODES = {"keep": "in_place", "retract": "retract", "abort": "abort"}
EFFECTS = {"abort": "ended", "retract": "returned to the queue", "keep": "kept in place"}


class PauseCommands:
    """Stops and continues generation. `Requests.held` is whether SGLang generates now."""

    def __init__(self, manager: Manager, requests: Requests, retracts: bool) -> None:
        self._manager = manager
        self._requests = requests
        self._retracts = retracts
        self._released: set[str] = set()

    async def execute(self, command: Pause | Continue | ClearCache | ReleaseMemory | ResumeMemory) -> Outcome:
        """See `Engine.execute`."""
        match command:
            case Pause():
                affected = await self._pause(command.mode)
                return Outcome(message=f"paused; {affected} requests {EFFECTS[command.mode]}", requests=affected)
            case Continue():
                await self._continue()
                return Outcome(message="continued")
            case ReleaseMemory():
                return await self._release(command.tags)
            case ResumeMemory():
                return await self._resume(command.tags)
            case ClearCache():
                async with self.between_steps():
                    answer = await self._manager.flush_cache()
                if not answer.success:
                    raise InvalidRequest(answer.message or "the cache cannot be cleared while requests use it")
                return Outcome(message="the prefix cache is empty")

    @asynccontextmanager
    async def between_steps(self) -> AsyncIterator[None]:
        """Stop generation for the block; afterwards it continues if it ran before.

        Raises InvalidRequest when there are requests and this engine cannot return them to the queue.
        """
        if not self._retracts:
            self._refuse_while_busy()
            yield
            return
        generated = not self._requests.held
        await self._hold("retract")
        try:
            yield
        finally:
            if generated:
                await self._continue()

    def _refuse_while_busy(self) -> None:
        if self._requests.running or self._requests.waiting:
            raise InvalidRequest(
                "requests are running, and this engine cannot return them to the queue; retry when they have ended, or"
                " end them with a pause of mode abort"
            )

    async def _pause(self, mode: str) -> int:
        """Stop generation; return how many requests that affects."""
        if mode == "abort":
            return await self._end_all()
        affected = self._requests.running
        await self._hold(MODES[mode])
        return affected

    async def _end_all(self) -> int:
        from sglang.srt.managers.io_struct import PauseGenerationReqInput

        because = self._requests.because = Paused("the engine has been paused")
        try:
            affected = self._requests.end_early(because)
            if not self._released:
                if self._requests.held:
                    await self._continue()  # SGLang waits until every request has ended, and ends them in steps
                await self._manager.pause_generation(PauseGenerationReqInput(mode="abort"))
        finally:
            self._requests.because = None
        self._requests.held = True
        return affected

    async def _hold(self, mode: str) -> None:
        from sglang.srt.managers.io_struct import PauseGenerationReqInput

        self._requests.held = True
        await self._manager.pause_generation(PauseGenerationReqInput(mode=mode))

    async def _continue(self) -> None:
        from sglang.srt.managers.io_struct import ContinueGenerationReqInput

        self._requests.held = False
        await self._manager.continue_generation(ContinueGenerationReqInput())

    async def _release(self, tags: tuple[str, ...]) -> Outcome:
        from sglang.srt.managers.io_struct import ReleaseMemoryOccupationReqInput

        generated = not self._requests.held
        if self._retracts:
            await self._hold("retract")  # after a pause in place too
        else:
            self._refuse_while_busy()
        if not (await self._manager.flush_cache()).success:
            if generated and self._retracts:
                await self._continue()
            raise InvalidRequest("SGLang still has work that cannot be returned to the queue; retry in a moment")
        await self._manager.release_memory_occupation(ReleaseMemoryOccupationReqInput(tags=list(tags)), None)
        self._released.update(tags)
        return Outcome(message=f"released {' and '.join(tags)}")

    async def _resume(self, tags: tuple[str, ...]) -> Outcome:
        from sglang.srt.managers.io_struct import ResumeMemoryOccupationReqInput

        await self._manager.resume_memory_occupation(ResumeMemoryOccupationReqInput(tags=list(tags)), None)
        self._released.difference_update(tags)
        return Outcome(message=f"resumed {' and '.join(tags)}")
