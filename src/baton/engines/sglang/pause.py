"""Having SGLang hold still: pauses, memory that is given back, and the cache, which can only be cleared meanwhile."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from baton.engines.sglang.sglang_types import Manager
from baton.engines.sglang.requests import Requests
from baton.errors import InvalidRequest, Paused
from baton.protocol.commands import ClearCache, Continue, Outcome, Pause, ReleaseMemory, ResumeMemory

MODES = {"keep": "in_place", "retract": "retract", "abort": "abort"}
DONE = {"abort": "ended", "retract": "sent back to the queue", "keep": "kept in place"}


class Holding:
    """What holds an engine: an operator's pause, or memory that it needs and has not. It goes on when nothing does.

    SGLang dies when memory is released that requests use, or resumed that was not released; it never hears of that.
    """

    def __init__(self, manager: Manager, requests: Requests, retracts: bool) -> None:
        self.released: frozenset[str] = frozenset()
        self._manager = manager
        self._requests = requests
        self._retracts = retracts
        self._paused = False

    async def execute(self, command: Pause | Continue | ClearCache | ReleaseMemory | ResumeMemory) -> Outcome:
        """See `Engine.execute`."""
        match command:
            case Pause():
                return await self._pause(command.mode)
            case Continue():
                return await self._continue()
            case ReleaseMemory():
                return await self._release(command.tags)
            case ResumeMemory():
                return await self._resume(command.tags)
            case ClearCache():
                async with self.between_steps():
                    answer = await self._manager.flush_cache()
                if not answer.success:
                    raise InvalidRequest(answer.message or "the cache cannot be cleared while requests hold it")
                return Outcome(message="the prefix cache is empty")

    @asynccontextmanager
    async def between_steps(self) -> AsyncIterator[None]:
        """Have every request out of the way, and let it go on afterwards unless something else holds it.

        Raises InvalidRequest when there are requests and they cannot be moved.
        """
        if not self._retracts:
            if self._requests.running or self._requests.waiting:
                raise InvalidRequest(
                    "requests are running, and this engine cannot send them back to the queue; ask again when they have"
                    " ended, which a pause with mode abort hastens"
                )
            yield
            return
        await self._hold("retract")
        try:
            yield
        finally:
            await self._go_on_unless_held()

    async def _pause(self, mode: str) -> Outcome:
        before = "paused already; " if self._paused else "paused; "
        self._paused = True
        if mode == "abort":
            affected = await self._end_all()
        else:
            affected = self._requests.running
            await self._hold(MODES[mode])
        return self._outcome(f"{before}{affected} requests {DONE[mode]}", affected)

    async def _end_all(self) -> int:
        from sglang.srt.managers.io_struct import PauseGenerationReqInput

        because = self._requests.because = Paused("the engine has been paused")
        try:
            affected = self._requests.end_early(because)
            await self._manager.pause_generation(PauseGenerationReqInput(mode="abort"))
        finally:
            self._requests.because = None
        return affected

    async def _hold(self, mode: str) -> None:
        from sglang.srt.managers.io_struct import PauseGenerationReqInput

        self._requests.held = True
        await self._manager.pause_generation(PauseGenerationReqInput(mode=mode))

    async def _continue(self) -> Outcome:
        before, self._paused = self._paused, False
        await self._go_on_unless_held()
        message = "continued" if before else "nothing to do: not paused"
        if self.released:
            message += f"; requests wait for {' and '.join(sorted(self.released))}"
        return self._outcome(message)

    async def _go_on_unless_held(self) -> None:
        from sglang.srt.managers.io_struct import ContinueGenerationReqInput

        if not self._paused and not self.released:
            self._requests.held = False
            await self._manager.continue_generation(ContinueGenerationReqInput())

    async def _release(self, tags: tuple[str, ...]) -> Outcome:
        from sglang.srt.managers.io_struct import ReleaseMemoryOccupationReqInput

        changed = sorted(set(tags) - self.released)
        if changed:
            async with self.between_steps():
                await self._manager.release_memory_occupation(ReleaseMemoryOccupationReqInput(tags=changed), None)
                self.released |= set(changed)
        return self._outcome(f"released {' and '.join(changed)}" if changed else "nothing to do: released before")

    async def _resume(self, tags: tuple[str, ...]) -> Outcome:
        from sglang.srt.managers.io_struct import ResumeMemoryOccupationReqInput

        changed = sorted(set(tags) & self.released)
        if changed:
            await self._manager.resume_memory_occupation(ResumeMemoryOccupationReqInput(tags=changed), None)
            self.released -= set(changed)
            await self._go_on_unless_held()
        return self._outcome(f"resumed {' and '.join(changed)}" if changed else "nothing to do: not released")

    def _outcome(self, message: str, requests: int | None = None) -> Outcome:
        released = tuple(sorted(self.released))
        return Outcome(message=message, requests=requests, paused=self._paused, released=released)
