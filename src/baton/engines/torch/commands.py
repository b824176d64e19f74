"""Operators' commands, executed between two steps: memory, weights, pauses, the prefix cache, profiles, records.

Each is idempotent. What is paused or released, and which commands this engine supports, is known above the port.
"""

import logging
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

from baton.engines.torch.arena import Arena, available_bytes
from baton.engines.torch.experts.record_commands import RecordCommands
from baton.engines.torch.profiler import StepProfiler
from baton.engines.torch.weights import ReplaceWeights, WeightGroup, gather
from baton.errors import EngineFailed, InvalidRequest, Paused, Unsupported
from baton.protocol.commands import (
    ClearCache,
    Command,
    Continue,
    JoinGroup,
    LeaveGroup,
    Outcome,
    Pause,
    ReleaseMemory,
    ResumeMemory,
    StartExpertRecord,
    StartProfile,
    StopExpertRecord,
    StopProfile,
    UpdateWeights,
    WeightSource,
)

if TYPE_CHECKING:
    from baton.engines.torch.core import Core

log = logging.getLogger(__name__)

WEIGHTS = "weights"
KV_CACHE = "kv_cache"
PAUSED_REQUESTS = {"abort": "ended", "retract": "returned to the queue", "keep": "kept in place"}


class CommandExecutor:
    """Executes commands on one Core. One that cannot be done as asked raises, and has changed nothing."""

    def __init__(self, core: "Core") -> None:
        self._core = core
        self.records = RecordCommands(core.pass_counter)
        self._stopped_stepping = False
        self._group: WeightGroup | None = None
        self._closed = False
        self._profiler: StepProfiler | None = None
        self._last_profile: str | None = None

    @property
    def halted(self) -> bool:
        """Whether steps must wait: for `Continue`, or for memory that they need."""
        runner = self._core.runner
        return self._stopped_stepping or runner.kv_arena.released or runner.weights_arena.released

    def prepare(self, command: JoinGroup | UpdateWeights) -> Callable[[], Outcome]:
        """Do what has to wait for other processes; return the rest, to be done between two steps.

        Called for one command at a time, on a thread of its own: it touches nothing that a step uses, so steps go on.
        Both raise Unsupported, InvalidRequest or EngineFailed.
        """
        match command:
            case JoinGroup():
                joined = self._join(command)
                return lambda: joined
            case UpdateWeights():
                replace = self._gather(command.source)
                return lambda: self._update(replace, command.version)

    def execute(self, command: Command) -> Outcome:
        """Execute a command that needs no preparation. Raises Unsupported, InvalidRequest or EngineFailed."""
        self._core.drain()
        match command:
            case ReleaseMemory():
                return self._release(self._arenas(command.tags))
            case ResumeMemory():
                return self._resume(self._arenas(command.tags))
            case Pause():
                return self._pause(command.mode)
            case Continue():
                self._stopped_stepping = False
                return Outcome(message="continued")
            case ClearCache():
                self._core.scheduler.clear()
                return Outcome(message="the prefix cache is empty")
            case LeaveGroup():
                return self._leave(command.group)
            case StartProfile():
                return self._start_profile(command)
            case StopProfile():
                return self._stop_profile()
            case StartExpertRecord() | StopExpertRecord():
                return self.records.execute(command)
            case _:
                raise Unsupported(f"the torch engine does not execute {command.__struct_config__.tag}")

    def after_step(self) -> None:
        """Count a step of a profile that ends by itself."""
        if self._profiler is not None and self._profiler.step():
            try:
                self._stop_profile()
            except EngineFailed as error:
                log.error("%s", error.message)  # no caller waits for it, and requests go on

    def close(self) -> None:
        """Free what would outlive the engine."""
        if self._profiler is not None:
            self._profiler.discard()
            self._profiler = None
        self._closed = True
        self._leave_unusable_group()
        for arena in self._arenas((KV_CACHE, WEIGHTS)).values():
            arena.close()

    def _arenas(self, tags: Iterable[str]) -> dict[str, Arena]:
        """Return the memory of the tags; the cache first, because it has no content that could be lost."""
        arenas = {KV_CACHE: self._core.runner.kv_arena, WEIGHTS: self._core.runner.weights_arena}
        return {tag: arena for tag, arena in arenas.items() if tag in tags}

    def _release(self, arenas: dict[str, Arena]) -> Outcome:
        changed = {tag: arena for tag, arena in arenas.items() if not arena.released}
        if KV_CACHE in changed:
            self._refuse_during_handoff()
        if WEIGHTS in changed:  # before the cache: only this can fail
            try:
                changed[WEIGHTS].release(keep=True)
            except OSError as error:
                raise EngineFailed(f"the weights cannot be kept on disk: {error}") from error
        if KV_CACHE in changed:
            self._core.scheduler.retract_all()
            self._core.scheduler.clear()
            changed[KV_CACHE].release(keep=False)
        return _memory_outcome("released", changed)

    def _resume(self, arenas: dict[str, Arena]) -> Outcome:
        changed = {tag: arena for tag, arena in arenas.items() if arena.released}
        needed, free = sum(arena.nbytes for arena in changed.values()), available_bytes(self._core.runner.device)
        if needed > free:
            raise EngineFailed(f"{needed / 1e6:.0f} MB cannot be resumed: only {free / 1e6:.0f} MB are free")
        for tag, arena in changed.items():
            try:
                arena.resume()
            except (OSError, RuntimeError, MemoryError) as error:
                if tag == WEIGHTS and KV_CACHE in changed:
                    changed[KV_CACHE].release(keep=False)
                raise EngineFailed(f"{tag} cannot be resumed: {error}") from error
        self._core.runner.rebind()
        return _memory_outcome("resumed", changed)

    def _pause(self, mode: str) -> Outcome:
        core = self._core
        self._stopped_stepping = True
        affected = core.running
        if mode == "abort":
            requests = core.requests
            affected = len(requests)
            for request_id in requests:
                core.fail(request_id, Paused("the engine has been paused"))
        elif mode == "retract":  # offered blocks stay where they are
            affected = len({sequence.work.request_id for sequence in core.scheduler.retract_all()})
        return Outcome(message=f"paused; {affected} requests {PAUSED_REQUESTS[mode]}", requests=affected)

    def _refuse_during_handoff(self) -> None:
        """Raise InvalidRequest if a transfer may read or write blocks: their content must not change."""
        if count := self._core.scheduler.in_handoff:
            raise InvalidRequest(
                f"the KV of {count} requests is in a handoff with other workers; try again later, or pause with mode"
                " abort first"
            )

    def _gather(self, source: WeightSource) -> ReplaceWeights:
        runner = self._core.runner
        try:
            return gather(source, runner.parts, runner.config, self._group)
        finally:
            self._leave_unusable_group()

    def _update(self, replace: ReplaceWeights, version: str) -> Outcome:
        self._core.drain()
        self._refuse_during_handoff()
        count = replace()
        self._core.runner.weights_replaced()
        # The KV of the old weights cannot be reused.
        self._core.scheduler.retract_all()
        self._core.scheduler.clear()
        return Outcome(message=f"{count} tensors updated", weight_version=version)

    def _join(self, command: JoinGroup) -> Outcome:
        if self._group is not None:
            raise InvalidRequest(f"group: already in {self._group.name!r}; leave it first")
        self._group = WeightGroup(command, self._core.runner.device)
        self._leave_unusable_group()
        return Outcome(message=f"joined {command.group}")

    def _leave(self, name: str) -> Outcome:
        if self._group is None or self._group.name != name:
            raise InvalidRequest(f"group: not in {name!r}")
        self._group.close()
        self._group = None
        return Outcome(message=f"left {name}")

    def _leave_unusable_group(self) -> None:
        if self._group is not None and (self._closed or self._group.broken) and not self._group.receiving:
            self._group.close()
            self._group = None

    def _start_profile(self, command: StartProfile) -> Outcome:
        if self._profiler is not None:
            raise InvalidRequest(f"a profile is being recorded already, to {self._profiler.path}")
        self._profiler = StepProfiler(command.directory, command.steps)
        return Outcome(message="recording", path=str(self._profiler.path))

    def _stop_profile(self) -> Outcome:
        profiler, self._profiler = self._profiler, None
        if profiler is not None:
            self._last_profile = profiler.finish()
            return Outcome(message="written", path=self._last_profile)
        if self._last_profile is None:
            raise InvalidRequest("no profile is being recorded")
        return Outcome(message="nothing to do: the last profile has ended", path=self._last_profile)


def _memory_outcome(done: str, changed: dict[str, Arena]) -> Outcome:
    if not changed:
        return Outcome(message=f"nothing to do: already {done}")
    nbytes = sum(arena.nbytes for arena in changed.values())
    return Outcome(message=f"{done} {' and '.join(changed)}, {nbytes / 1e6:.0f} MB")
