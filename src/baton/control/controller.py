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

from baton.control.capability_check import refuse_unsupported
from baton.control.discovery import AdmissionGate, DeregisterReason, DiscoveryRegistration
from baton.errors import BatonError, Conflict, Draining, EngineDead, EngineFailed, EngineStalled, Unsupported
from baton.ports.control import Status
from baton.ports.engine import Engine
from baton.protocol.commands import (
    Command,
    Continue,
    FromGroup,
    JoinGroup,
    Outcome,
    Pause,
    ReleaseMemory,
    ResumeMemory,
    SetWeightVersion,
    UpdateWeights,
)

log = logging.getLogger(__name__)

MARGIN_S = 30.0
"""What an order with a time of its own may take beyond that."""
DRAIN_S = 60.0
"""How long requests may take to finish where the engine cannot stop them for memory that goes."""
INITIAL = "initial"
WEIGHTS = "weights"
KV_CACHE = "kv_cache"


class Controller:
    """A Control (see `ports/control.py`) that keeps the worker's place in discovery in step with its engine."""

    def __init__(
        self,
        engine: Engine,
        registration: DiscoveryRegistration,
        gate: AdmissionGate,
        limit_s: float,
        fail: Callable[[BatonError], None],
    ) -> None:
        self.registration = registration
        self._engine = engine
        self._gate = gate
        self._limit_s = limit_s
        self._fail = fail
        self._lock = asyncio.Lock()
        self._running_command: str | None = None
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
    def suspended(self) -> bool:
        """Whether it is no wonder that the engine answers no request now: it is idle by order, or at an order."""
        return self.idle or self._asking

    def status(self) -> Status:
        """See `Control.status`."""
        return Status(
            weight_version=self._weight_version,
            paused=self._paused,
            released=self._released,
            command=self._running_command,
            registered=self.registration.registered,
            in_flight=self._gate.in_flight,
            capabilities=self._engine.capabilities,
        )

    async def execute(self, command: Command) -> Outcome:
        """See `Control.execute`. EngineStalled, which ends the worker, if the engine does not return in time."""
        refuse_unsupported(command, self._engine.capabilities)
        async with self._lock:
            self._refuse_when_closed()
            self._running_command = name_of(command)
            try:
                return await self._carry_out(command)
            except BatonError as error:
                if error.scope == "worker" and not self._closed:
                    self._fail(error)
                raise
            finally:
                self._running_command = None

    def close(self) -> None:
        """Take no more orders: the worker is leaving."""
        self._closed = True

    async def _carry_out(self, command: Command) -> Outcome:
        match command:
            case ReleaseMemory(tags=tags):
                return await self._release(tuple(tag for tag in dict.fromkeys(tags) if tag not in self._released))
            case ResumeMemory(tags=tags):
                return await self._resume(tuple(tag for tag in dict.fromkeys(tags) if tag in self._released))
            case Pause():
                return await self._pause(command)
            case Continue():
                return await self._continue(command)
            case UpdateWeights():
                return await self._update(command)
            case SetWeightVersion():
                return await self._name_weights(command)
            case _:
                return await self._ask(command)

    async def _pause(self, command: Pause) -> Outcome:
        async with self._away():
            if command.mode == "drain":
                await self._drained(command.timeout_s)
                command = Pause(mode="keep")
            outcome = await self._ask(command)
            self._paused = self._held = outcome.paused is not False
        return self._as_it_is(outcome)

    async def _continue(self, command: Continue) -> Outcome:
        if not (self._paused or self._held):
            return self._as_it_is(Outcome(message="nothing to do: not paused"))
        if self._released:
            self._paused = False
            return self._as_it_is(Outcome(message=f"requests wait for {' and '.join(self._released)}"))
        outcome = await self._ask(command)
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

    async def _update(self, command: UpdateWeights) -> Outcome:
        if WEIGHTS in self._released:
            raise Conflict("the weights are released; resume them before an update")
        outcome = await self._ask(command)
        self._weight_version = outcome.weight_version or command.version
        return msgspec.structs.replace(outcome, weight_version=self._weight_version)

    async def _name_weights(self, command: SetWeightVersion) -> Outcome:
        if self._engine.capabilities.weight_sources:
            with suppress(Unsupported):  # an engine need not know the name: the worker keeps it
                await self._ask(command)
        self._weight_version = command.version
        return Outcome(message=f"the weights are called {command.version}", weight_version=command.version)

    async def _stand_still(self, tags: tuple[str, ...]) -> None:
        """See that nothing runs in the memory of `tags`: the engine stops, or has finished where it cannot stop."""
        modes = self._engine.capabilities.pause_modes
        if KV_CACHE in tags and "retract" in modes:
            await self._hold(Pause(mode="retract"))
        elif "keep" in modes:
            await self._hold(Pause(mode="keep"))
        else:
            await self._drained(DRAIN_S)

    async def _hold(self, command: Pause) -> None:
        await self._ask(command)
        self._held = True

    async def _drained(self, timeout_s: float) -> None:
        """Wait until no request runs. Raises Conflict if that takes longer than `timeout_s`, or can never be."""
        if self._held and self._gate.in_flight:
            raise Conflict(
                f"{self._gate.in_flight} requests cannot finish, for the engine stands still: continue first"
            )
        if not await self._gate.idle(timeout_s):
            raise Conflict(f"{self._gate.in_flight} requests still run after {timeout_s:g} s; nothing has changed")
        self._refuse_when_closed()

    @asynccontextmanager
    async def _away(self) -> AsyncIterator[None]:
        """Be out of discovery for an order, and back if it fails."""
        await self.registration.deregister(DeregisterReason.COMMANDED)
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
        await self.registration.register(DeregisterReason.COMMANDED)

    async def _ask(self, command: Command) -> Outcome:
        limit_s = _limit_s(command, self._limit_s)
        self._asking = True
        try:
            return await asyncio.wait_for(self._engine.execute(command), limit_s)
        except TimeoutError:
            raise EngineStalled(f"the engine has not done {name_of(command)} within {limit_s:g} s") from None
        except BatonError:
            raise
        except Exception as error:
            log.exception("%s failed in a way that the engine should have told", name_of(command))
            raise EngineFailed(f"{name_of(command)} failed: {error!r}") from error
        finally:
            self._asking = False

    def _refuse_when_closed(self) -> None:
        if self._closed:
            raise Draining("this worker is shutting down")

    def _as_it_is(self, outcome: Outcome) -> Outcome:
        """Return `outcome` with what holds now: an engine cannot tell an operator's pause from ours."""
        return msgspec.structs.replace(outcome, released=self._released, paused=self._paused)


def name_of(command: Command) -> str:
    """Return what `verb` is called on the wire."""
    return str(command.__struct_config__.tag)


def _first(told: tuple[str, ...] | None, asked: tuple[str, ...]) -> tuple[str, ...]:
    """Return what the engine says, which goes before what it was asked for."""
    return asked if told is None else told


def _limit_s(command: Command, usual_s: float) -> float:
    match command:
        case JoinGroup(timeout_s=own_s) | UpdateWeights(source=FromGroup(timeout_s=own_s)):
            return own_s + MARGIN_S
        case _:
            return usual_s
