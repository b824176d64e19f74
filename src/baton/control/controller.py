"""Executes an operator's commands on one worker: one at a time, each within its time. `state.py` decides what to do."""

import asyncio
import logging
from collections.abc import Awaitable, Callable

from baton.control.capability_check import refuse_unsupported
from baton.control.discovery import DiscoveryRegistration
from baton.control.state import (
    DeregisterReason,
    Drain,
    Hold,
    Plan,
    Preparation,
    Settlement,
    WorkerState,
    executed,
    next_settlement,
    plan_command,
    reply_to,
)
from baton.errors import BatonError, Conflict, Draining, EngineDead, EngineFailed, EngineStalled, Unsupported
from baton.ports.control import Status
from baton.ports.engine import Engine
from baton.protocol.commands import (
    Command,
    Continue,
    FromGroup,
    JoinGroup,
    LoadLora,
    Outcome,
    Pause,
    UnloadLora,
    UpdateWeights,
)
from baton.request.gate import Gate

log = logging.getLogger(__name__)

GROUP_MARGIN_S = 30.0
"""How much longer than its own timeout a command of a process group may take."""


class Controller:
    """A Control (see `ports/control.py`) that keeps engine, admission and discovery in line with one `WorkerState`."""

    def __init__(
        self,
        engine: Engine,
        registration: DiscoveryRegistration,
        gate: Gate,
        command_timeout_s: float,
        fail: Callable[[BatonError], None],
    ) -> None:
        self._engine = engine
        self._registration = registration
        self._gate = gate
        self._command_timeout_s = command_timeout_s
        self._fail = fail
        self._state = WorkerState()
        self._running_command: str | None = None
        self._calling_engine = False
        self._command_lock = asyncio.Lock()
        self._registration_lock = asyncio.Lock()

    @property
    def registered(self) -> bool:
        """Whether discovery should have this worker now; False from the moment it begins to leave."""
        return self._registration.registered and not self._state.closed

    @property
    def suspended(self) -> bool:
        """Whether the engine need not answer requests now: it is idle by command, or executes one."""
        return self._state.idle or self._calling_engine

    def status(self) -> Status:
        """See `Control.status`."""
        return Status(
            weight_version=self._state.weight_version,
            paused=self._state.paused,
            released=self._state.released,
            command=self._running_command,
            registered=self.registered,
            in_flight=self._gate.in_flight,
            capabilities=self._engine.capabilities,
        )

    async def execute(self, command: Command) -> Outcome:
        """See `Control.execute`. EngineStalled, which ends the worker, if the engine does not return in time."""
        refuse_unsupported(command, self._engine.capabilities)
        async with self._command_lock:
            self._refuse_when_closed()
            self._running_command = name_of(command)
            try:
                return await self._execute(plan_command(self._state, command, self._engine.capabilities))
            except BatonError as error:
                if error.scope == "worker" and not self._state.closed:
                    self._fail(error)
                raise
            finally:
                self._running_command = None

    async def set_healthy(self, healthy: bool) -> None:
        """Follow the canary: an unhealthy worker is not registered. Raises PeerLost or EngineDead."""
        if healthy:
            await self._register(DeregisterReason.UNHEALTHY)
        else:
            await self._deregister(DeregisterReason.UNHEALTHY)

    async def restore(self, restore: Callable[[], Awaitable[None]]) -> None:
        """Enter discovery again, by `restore`, if discovery should have this worker. Raises what `restore` raises."""
        async with self._registration_lock:
            if self.registered:
                await restore()

    async def aclose(self) -> None:
        """Take no more commands, and leave discovery for good."""
        self._state = self._state.shutting_down()
        async with self._registration_lock:
            await self._registration.leave()

    async def _execute(self, plan: Plan) -> Outcome:
        if plan.deregisters:
            await self._deregister(DeregisterReason.COMMANDED)
        try:
            for step in plan.preparations:
                await self._prepare(step)
            outcome = await self._call_as_planned(plan)
        except BatonError as error:
            if plan.deregisters and error.scope == "request":
                await self._roll_back(error)
            raise
        self._state = executed(self._state, plan.command, outcome)
        if plan.settles:
            await self._settle()
        return reply_to(self._state, plan, outcome)

    async def _prepare(self, step: Preparation) -> None:
        match step:
            case Drain(timeout_s=timeout_s):
                await self._drain(timeout_s)
            case Hold(mode=mode):
                await self._call_engine(Pause(mode=mode))
                self._state = self._state.holding(mode)

    async def _call_as_planned(self, plan: Plan) -> Outcome:
        if not plan.calls_engine:
            return Outcome(message="")
        match plan.command:
            case LoadLora():
                return await self._load_adapter(plan.command)
            case UnloadLora():
                return await self._unload_adapter(plan.command)
        try:
            return await self._call_engine(plan.command)
        except Unsupported:
            if plan.optional:
                return Outcome(message="")
            raise

    async def _load_adapter(self, command: LoadLora) -> Outcome:
        """Load, then register. Raises EngineDead if an adapter that is not registered cannot be unloaded again."""
        outcome = await self._call_engine(command)
        try:
            await self._registration.register_adapter(command.name)
        except BatonError as reason:
            try:
                await self._call_engine(UnloadLora(name=command.name))
            except BatonError as error:
                raise EngineDead(f"{reason.message}; and then it could not be unloaded: {error.message}") from error
            raise
        return outcome

    async def _unload_adapter(self, command: UnloadLora) -> Outcome:
        """Deregister, then unload. An adapter that the engine keeps is registered again."""
        registered = await self._registration.deregister_adapter(command.name)
        try:
            return await self._call_engine(command)
        except BatonError as error:
            if registered and error.scope == "request":
                await self._registration.register_adapter(command.name)
            raise

    async def _roll_back(self, reason: BatonError) -> None:
        """Bring a worker back that a failed command took out of discovery. Raises EngineDead if that fails too."""
        try:
            await self._settle()
        except BatonError as error:
            raise EngineDead(f"{reason.message}; and then it could not continue: {error.message}") from error

    async def _settle(self) -> None:
        while (step := next_settlement(self._state)) is not None:
            match step:
                case Settlement.CONTINUE:
                    outcome = await self._call_engine(Continue())
                    self._state = executed(self._state, Continue(), outcome)
                case Settlement.REGISTER:
                    await self._register(DeregisterReason.COMMANDED)

    async def _drain(self, timeout_s: float) -> None:
        """Wait until no request runs. Raises Conflict if that takes longer than `timeout_s`, or cannot happen."""
        if self._state.held is not None and self._gate.in_flight:
            raise Conflict(f"{self._gate.in_flight} requests cannot finish while the engine is paused: continue first")
        if not await self._gate.idle(timeout_s):
            raise Conflict(f"{self._gate.in_flight} requests still run after {timeout_s:g} s; nothing has changed")
        self._refuse_when_closed()

    async def _deregister(self, reason: DeregisterReason) -> None:
        """Be out of discovery for `reason`. Raises PeerLost, and nothing has changed, if discovery does not answer.

        Running requests go on. By command, requests that arrive all the same are refused; they are retried elsewhere.
        """
        async with self._registration_lock:
            if reason in self._state.reasons:
                return
            if self._state.registrable:
                await self._registration.deregister()
            self._state = self._state.with_reason(reason)
            if reason is DeregisterReason.COMMANDED:
                self._gate.pause()

    async def _register(self, reason: DeregisterReason) -> None:
        """Drop `reason`; with none left, register again. Raises EngineDead if that fails."""
        async with self._registration_lock:
            if reason not in self._state.reasons:
                return
            self._state = self._state.without_reason(reason)
            if reason is DeregisterReason.COMMANDED:
                self._gate.resume()
            if self._state.registrable:
                await self._registration.register()

    async def _call_engine(self, command: Command) -> Outcome:
        timeout_s = _timeout_s(command, self._command_timeout_s)
        self._calling_engine = True
        try:
            async with asyncio.timeout(timeout_s):
                return await self._engine.execute(command)
        except TimeoutError:
            raise EngineStalled(f"the engine has not executed {name_of(command)} within {timeout_s:g} s") from None
        except BatonError:
            raise
        except Exception as error:
            log.exception("%s failed with an error that the engine does not translate", name_of(command))
            raise EngineFailed(f"{name_of(command)} failed: {error!r}") from error
        finally:
            self._calling_engine = False

    def _refuse_when_closed(self) -> None:
        if self._state.closed:
            raise Draining("this worker is shutting down")


def name_of(command: Command) -> str:
    """Return the name of `command` on the wire."""
    return str(command.__struct_config__.tag)


def _timeout_s(command: Command, usual_s: float) -> float:
    match command:
        case JoinGroup(timeout_s=own_s) | UpdateWeights(source=FromGroup(timeout_s=own_s)):
            return own_s + GROUP_MARGIN_S
        case _:
            return usual_s
