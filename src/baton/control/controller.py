"""An operator's orders to one worker: one at a time, each within its time, and never half done.

order            discovery     engine                          a failure
pause            leave first   stops                           brings the worker back as it was
pause, drain     leave first   finishes what runs, then stops  the same, and so does a timeout
release          leave first   stops, then gives memory back   the same: it goes on, and is back
resume           -             takes memory again              leaves everything as it was
continue         -             -                               leaves everything as it was
all others       stays         obeys                           leaves everything as it was

After each: with nothing released and no pause, an engine that stands still goes on, and then the worker is back.
"""

import asyncio
import logging
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress

import msgspec

from baton.control.discovery import Absence, Door, Presence
from baton.engine_kit.capability_check import refuse_unsupported
from baton.errors import BatonError, Conflict, Draining, EngineDead, EngineFailed, EngineStalled, Unsupported
from baton.ports.control import Status
from baton.ports.engine import Engine
from baton.protocol.commands import (
    Continue,
    FromGroup,
    JoinGroup,
    Outcome,
    Pause,
    ReleaseMemory,
    ResumeMemory,
    SetWeightVersion,
    UpdateWeights,
    Verb,
)

log = logging.getLogger(__name__)

MARGIN_S = 30.0
"""What an order with a time of its own may take beyond that."""
DRAIN_S = 60.0
"""How long requests may take to finish where the engine cannot stop them for memory that goes."""
INITIAL = "initial"
WEIGHTS = "weights"
KV_CACHE = "kv_cache"


class Orders:
    """A Control (see `ports/control.py`) that keeps the worker's place in discovery in step with its engine."""

    def __init__(
        self, engine: Engine, presence: Presence, door: Door, limit_s: float, fail: Callable[[BatonError], None]
    ) -> None:
        self.presence = presence
        self._engine = engine
        self._door = door
        self._limit_s = limit_s
        self._fail = fail
        self._lock = asyncio.Lock()
        self._doing: str | None = None
        self._asking = False
        self._paused = False  # an operator's pause holds
        self._held = False  # the engine stands still, for that or for memory that is released
        self._released: tuple[str, ...] = ()
        self._weight_version = INITIAL
        self._closed = False

    @property
    def idle(self) -> bool:
        """Whether an operator has told this worker not to serve."""
        return self._paused or self._held or bool(self._released)

    @property
    def excused(self) -> bool:
        """Whether it is no wonder that the engine answers no request now: it is idle by order, or at an order."""
        return self.idle or self._asking

    def status(self) -> Status:
        """See `Control.status`."""
        return Status(
            weight_version=self._weight_version,
            paused=self._paused,
            released=self._released,
            doing=self._doing,
            listed=self.presence.listed,
            in_flight=self._door.in_flight,
            capabilities=self._engine.capabilities,
        )

    async def obey(self, verb: Verb) -> Outcome:
        """See `Control.obey`. An engine that does not return in time is stuck, and ends the worker: EngineStalled."""
        refuse_unsupported(verb, self._engine.capabilities)
        async with self._lock:
            self._refuse_when_closed()
            self._doing = name_of(verb)
            try:
                return await self._carry_out(verb)
            except BatonError as error:
                if error.scope == "worker" and not self._closed:
                    self._fail(error)
                raise
            finally:
                self._doing = None

    def close(self) -> None:
        """Take no more orders: the worker is leaving."""
        self._closed = True

    async def _carry_out(self, verb: Verb) -> Outcome:
        match verb:
            case ReleaseMemory(tags=tags):
                return await self._release(tuple(tag for tag in dict.fromkeys(tags) if tag not in self._released))
            case ResumeMemory(tags=tags):
                return await self._resume(tuple(tag for tag in dict.fromkeys(tags) if tag in self._released))
            case Pause():
                return await self._pause(verb)
            case Continue():
                return await self._continue(verb)
            case UpdateWeights():
                return await self._update(verb)
            case SetWeightVersion():
                return await self._name_weights(verb)
            case _:
                return await self._ask(verb)

    async def _pause(self, verb: Pause) -> Outcome:
        async with self._away():
            if verb.mode == "drain":
                await self._drained(verb.timeout_s)
                verb = Pause(mode="keep")
            outcome = await self._ask(verb)
            self._paused = self._held = outcome.paused is not False
        return self._as_it_is(outcome)

    async def _continue(self, verb: Continue) -> Outcome:
        if not (self._paused or self._held):
            return self._as_it_is(Outcome(message="nothing to do: not paused"))
        if self._released:
            self._paused = False
            return self._as_it_is(Outcome(message=f"requests wait for {' and '.join(self._released)}"))
        outcome = await self._ask(verb)
        self._paused = self._held = outcome.paused is True
        await self._settle()
        return self._as_it_is(outcome)

    async def _release(self, tags: tuple[str, ...]) -> Outcome:
        if not tags:
            return self._as_it_is(Outcome(message="nothing to do: released before"))
        async with self._away():
            await self._stand_still(tags)
            outcome = await self._ask(ReleaseMemory(tags=tags))
            self._released = _first(outcome.released, tuple(sorted({*self._released, *tags})))
        return self._as_it_is(outcome)

    async def _resume(self, tags: tuple[str, ...]) -> Outcome:
        outcome = Outcome(message="nothing to do: nothing of it is released")
        if tags:
            outcome = await self._ask(ResumeMemory(tags=tags))
            self._released = _first(outcome.released, tuple(tag for tag in self._released if tag not in tags))
        await self._settle()
        return self._as_it_is(outcome)

    async def _update(self, verb: UpdateWeights) -> Outcome:
        if WEIGHTS in self._released:
            raise Conflict("the weights are released; resume them before an update")
        outcome = await self._ask(verb)
        self._weight_version = outcome.weight_version or verb.version
        return msgspec.structs.replace(outcome, weight_version=self._weight_version)

    async def _name_weights(self, verb: SetWeightVersion) -> Outcome:
        if self._engine.capabilities.weight_sources:
            with suppress(Unsupported):  # an engine need not know the name: the worker keeps it
                await self._ask(verb)
        self._weight_version = verb.version
        return Outcome(message=f"the weights are called {verb.version}", weight_version=verb.version)

    async def _stand_still(self, tags: tuple[str, ...]) -> None:
        """See that nothing runs in the memory of `tags`: the engine stops, or has finished where it cannot stop."""
        modes = self._engine.capabilities.pause_modes
        if KV_CACHE in tags and "retract" in modes:
            await self._hold(Pause(mode="retract"))
        elif "keep" in modes:
            await self._hold(Pause(mode="keep"))
        else:
            await self._drained(DRAIN_S)

    async def _hold(self, verb: Pause) -> None:
        await self._ask(verb)
        self._held = True

    async def _drained(self, timeout_s: float) -> None:
        """Wait until no request runs. Raises Conflict if that takes longer than `timeout_s`, or can never be."""
        if self._held and self._door.in_flight:
            raise Conflict(
                f"{self._door.in_flight} requests cannot finish, for the engine stands still: continue first"
            )
        if not await self._door.idle(timeout_s):
            raise Conflict(f"{self._door.in_flight} requests still run after {timeout_s:g} s; nothing has changed")
        self._refuse_when_closed()

    @asynccontextmanager
    async def _away(self) -> AsyncIterator[None]:
        """Be out of discovery for an order, and back if it fails."""
        await self.presence.leave(Absence.ORDERED)
        try:
            yield
        except BatonError as error:
            if error.scope == "request":
                await self._roll_back(error)
            raise
        await self._settle()

    async def _roll_back(self, reason: BatonError) -> None:
        try:
            await self._settle()
        except BatonError as error:
            raise EngineDead(f"{reason.message}; and then it could not go on: {error.message}") from error

    async def _settle(self) -> None:
        """Have the engine go on and be in discovery again, if no order holds against it any more."""
        if self._paused or self._released:
            return
        if self._held:
            await self._ask(Continue())
            self._held = False
        await self.presence.come_back(Absence.ORDERED)

    async def _ask(self, verb: Verb) -> Outcome:
        limit_s = _limit_s(verb, self._limit_s)
        self._asking = True
        try:
            return await asyncio.wait_for(self._engine.control(verb), limit_s)
        except TimeoutError:
            raise EngineStalled(f"the engine has not done {name_of(verb)} within {limit_s:g} s") from None
        except BatonError:
            raise
        except Exception as error:
            log.exception("%s failed in a way that the engine should have told", name_of(verb))
            raise EngineFailed(f"{name_of(verb)} failed: {error!r}") from error
        finally:
            self._asking = False

    def _refuse_when_closed(self) -> None:
        if self._closed:
            raise Draining("this worker is shutting down")

    def _as_it_is(self, outcome: Outcome) -> Outcome:
        """Return `outcome` with what holds now: an engine cannot tell an operator's pause from ours."""
        return msgspec.structs.replace(outcome, released=self._released, paused=self._paused)


def name_of(verb: Verb) -> str:
    """Return what `verb` is called on the wire."""
    return str(verb.__struct_config__.tag)


def _first(told: tuple[str, ...] | None, asked: tuple[str, ...]) -> tuple[str, ...]:
    """Return what the engine says, which goes before what it was asked for."""
    return asked if told is None else told


def _limit_s(verb: Verb, usual_s: float) -> float:
    match verb:
        case JoinGroup(timeout_s=own_s) | UpdateWeights(source=FromGroup(timeout_s=own_s)):
            return own_s + MARGIN_S
        case _:
            return usual_s
