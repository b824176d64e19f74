"""What an operator may ask of the engine, done between two steps: memory, weights, pauses, the cache, profiles."""

import logging
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

from baton.engines.torch.arena import Arena, available_bytes
from baton.engines.torch.profiler import Recording
from baton.engines.torch.weights import Put, WeightGroup, gather
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
    StartProfile,
    StopProfile,
    UpdateWeights,
    WeightSource,
)

if TYPE_CHECKING:
    from baton.engines.torch.core import Core

log = logging.getLogger(__name__)

WEIGHTS = "weights"
KV_CACHE = "kv_cache"


class Controls:
    """The operator's hand on one Core. A verb that cannot be done as asked raises, and has changed nothing."""

    def __init__(self, core: "Core") -> None:
        self._core = core
        self._held = False
        self._group: WeightGroup | None = None
        self._closed = False
        self._recording: Recording | None = None
        self._recorded: str | None = None

    @property
    def paused(self) -> bool:
        """Whether steps must wait: an operator said so, or memory that they need is given back."""
        return self._held or bool(self._released())

    def prepare(self, command: Command) -> Callable[[], Outcome]:
        """Do what of `verb` has to wait for other processes; return the rest, to be done between two steps.

        For one verb at a time, on a thread of its own: it touches nothing that a step uses, so that steps go on. Both
        raise Unsupported, InvalidRequest or EngineFailed.
        """
        match command:
            case JoinGroup():
                joined = self._join(command)
                return lambda: joined
            case UpdateWeights():
                put = self._gather(command.source)
                return lambda: self._update(put, command.version)
            case _:
                return lambda: self._execute(command)

    def _execute(self, command: Command) -> Outcome:
        match command:
            case ReleaseMemory():
                return self._release(self._arenas(command.tags))
            case ResumeMemory():
                return self._resume(self._arenas(command.tags))
            case Pause():
                return self._pause(command.mode)
            case Continue():
                return self._continue()
            case ClearCache():
                self._core.scheduler.clear()
                return Outcome(message="the prefix cache is empty")
            case LeaveGroup():
                return self._leave(command.group)
            case StartProfile():
                return self._start_profile(command)
            case StopProfile():
                return self._stop_profile()
            case UpdateWeights() | JoinGroup():
                raise AssertionError("these have been prepared")
            case _:
                raise Unsupported(f"the torch engine cannot do {command.__struct_config__.tag}")

    def after_step(self) -> None:
        """Count a step of a recording that ends by itself."""
        if self._recording is not None and self._recording.step():
            try:
                self._stop_profile()
            except EngineFailed as error:
                log.error("%s", error.message)  # nobody waits for it, and requests go on

    def close(self) -> None:
        """Give up what would outlive the engine."""
        if self._recording is not None:
            self._recording.discard()
            self._recording = None
        self._closed = True
        self._leave_if_of_no_use()
        for arena in self._arenas((KV_CACHE, WEIGHTS)).values():
            arena.close()

    def _arenas(self, tags: Iterable[str]) -> dict[str, Arena]:
        """Return what the tags stand for; the cache first, for it has no content that could be lost."""
        runner = self._core.runner
        arenas = {KV_CACHE: runner.kv_arena, WEIGHTS: runner.weights_arena}
        unknown = sorted(set(tags) - arenas.keys())
        if unknown:
            raise Unsupported(f"tags: this engine has no {unknown[0]!r}; it has {KV_CACHE} and {WEIGHTS}")
        if not tags:
            raise InvalidRequest(f"tags: name at least one of {KV_CACHE} and {WEIGHTS}")
        return {tag: arena for tag, arena in arenas.items() if tag in tags}

    def _released(self) -> tuple[str, ...]:
        arenas = self._arenas((KV_CACHE, WEIGHTS))
        return tuple(tag for tag, arena in arenas.items() if arena.released)

    def _memory_outcome(self, what: str, changed: dict[str, Arena]) -> Outcome:
        nbytes = sum(arena.nbytes for arena in changed.values())
        message = (
            f"{what} {' and '.join(changed)}, {nbytes / 1e6:.0f} MB" if changed else f"nothing to do: {what} before"
        )
        return Outcome(message=message, released=self._released(), paused=self._held)

    def _release(self, arenas: dict[str, Arena]) -> Outcome:
        changed = {tag: arena for tag, arena in arenas.items() if not arena.released}
        if KV_CACHE in changed:
            self._refuse_during_hand_over()
        if WEIGHTS in changed:  # before the cache: only this can fail
            try:
                changed[WEIGHTS].release(keep=True)
            except OSError as error:
                raise EngineFailed(f"the weights cannot be kept on disk: {error}") from error
        if KV_CACHE in changed:
            self._core.scheduler.retract_all()
            self._core.scheduler.clear()
            changed[KV_CACHE].release(keep=False)
        return self._memory_outcome("released", changed)

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
        return self._memory_outcome("resumed", changed)

    def _pause(self, mode: str) -> Outcome:
        core, before = self._core, "paused already; " if self._held else "paused; "
        self._held = True
        affected = core.running
        if mode == "abort":
            requests = core.requests
            affected = len(requests)
            for request_id in requests:
                core.fail(request_id, Paused("the engine has been paused"))
        elif mode == "retract":  # what others read stays where it is
            affected = len({sequence.work.request_id for sequence in core.scheduler.retract_all()})
        done = {"abort": "ended", "retract": "sent back to the queue", "keep": "kept in place"}[mode]
        message = f"{before}{affected} requests {done}"
        return Outcome(message=message, requests=affected, paused=True, released=self._released())

    def _continue(self) -> Outcome:
        before, self._held = self._held, False
        released = self._released()
        message = "continued" if before else "nothing to do: not paused"
        if released:
            message += f"; requests wait for {' and '.join(released)}"
        return Outcome(message=message, paused=False, released=released)

    def _refuse_during_hand_over(self) -> None:
        """Nobody may take away or change what other workers read, or write where they do. Raises InvalidRequest."""
        if count := self._core.scheduler.handed_over:
            raise InvalidRequest(
                f"{count} requests are being handed over to or from other workers; ask again when that is done, which a"
                " pause with mode abort hastens"
            )

    def _gather(self, source: WeightSource) -> Put:
        runner = self._core.runner
        if runner.weights_arena.released:
            raise InvalidRequest("the weights are released; resume them before an update")
        try:
            return gather(source, runner.parts, runner.config, self._group)
        finally:
            self._leave_if_of_no_use()

    def _update(self, put: Put, version: str) -> Outcome:
        self._refuse_during_hand_over()
        count = put()
        # Keys and values of the old weights are worth nothing now.
        self._core.scheduler.retract_all()
        self._core.scheduler.clear()
        return Outcome(message=f"{count} tensors updated", weight_version=version)

    def _join(self, command: JoinGroup) -> Outcome:
        if self._group is not None:
            raise InvalidRequest(f"group: already in {self._group.name!r}; leave it first")
        self._group = WeightGroup(command, self._core.runner.device)
        self._leave_if_of_no_use()
        return Outcome(message=f"joined {command.group}")

    def _leave(self, name: str) -> Outcome:
        if self._group is None or self._group.name != name:
            raise InvalidRequest(f"group: not in {name!r}")
        self._group.close()
        self._group = None
        return Outcome(message=f"left {name}")

    def _leave_if_of_no_use(self) -> None:
        if self._group is not None and (self._closed or self._group.broken) and not self._group.receiving:
            self._group.close()
            self._group = None

    def _start_profile(self, command: StartProfile) -> Outcome:
        if self._recording is not None:
            raise InvalidRequest(f"a profile is being recorded already, to {self._recording.path}")
        self._recording = Recording(command.directory, command.steps)
        return Outcome(message="recording", path=str(self._recording.path))

    def _stop_profile(self) -> Outcome:
        recording, self._recording = self._recording, None
        if recording is not None:
            self._recorded = recording.finish()
            return Outcome(message="written", path=self._recorded)
        if self._recorded is None:
            raise InvalidRequest("no profile is being recorded")
        return Outcome(message="nothing to do: the last profile has ended", path=self._recorded)
