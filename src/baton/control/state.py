"""What commands do to a worker, as a pure state machine: pause, memory, weights and discovery in one state. No I/O.

command        discovery          engine                                       if that fails
pause          deregister first   pause                                        settle
pause, drain   deregister first   wait until no request runs, then pause       settle
release        deregister first   hold (or drain), then release the memory     settle
resume         -                  resume the memory                            as before
continue       -                  continue, unless memory is released          as before
all others     -                  execute                                      as before

The first five end by settling: with no pause and no released memory, a held engine continues, and then the worker is
registered again. The executor is `controller.py`.
"""

import enum
from typing import Literal, NamedTuple

import msgspec

from baton.errors import Conflict
from baton.ports.engine import Capabilities
from baton.protocol.commands import (
    Command,
    Continue,
    Outcome,
    Pause,
    ReleaseMemory,
    ResumeMemory,
    SetWeightVersion,
    UpdateWeights,
)

INITIAL_VERSION = "initial"
WEIGHTS = "weights"
KV_CACHE = "kv_cache"
DRAIN_TIMEOUT_S = 60.0
"""How long requests may run on before a release, where the engine cannot pause them."""

HoldMode = Literal["keep", "retract", "abort"]
_HOLD_MODES: tuple[HoldMode, ...] = ("keep", "retract", "abort")  # each implies what those before it do


class DeregisterReason(enum.Enum):
    """Why a worker is not registered in discovery."""

    UNHEALTHY = "unhealthy"  # the canary fails
    COMMANDED = "command"  # an operator has paused it or released its memory


class WorkerState(msgspec.Struct, frozen=True, kw_only=True):
    """The state of one worker.

    `paused`: an operator's pause holds. `held`: the engine does not step, for that pause or for released memory, and
    how its running requests were stopped. `closed`: the worker shuts down.
    """

    paused: bool = False
    held: HoldMode | None = None
    released: tuple[str, ...] = ()
    weight_version: str = INITIAL_VERSION
    reasons: frozenset[DeregisterReason] = frozenset()
    closed: bool = False

    @property
    def idle(self) -> bool:
        """Whether the engine serves no requests, by command."""
        return self.paused or self.held is not None or bool(self.released)

    @property
    def registrable(self) -> bool:
        """Whether discovery should have the worker."""
        return not self.reasons and not self.closed

    def with_reason(self, reason: DeregisterReason) -> "WorkerState":
        """Return the state with one more reason against registration."""
        return msgspec.structs.replace(self, reasons=self.reasons | {reason})

    def without_reason(self, reason: DeregisterReason) -> "WorkerState":
        """Return the state with `reason` gone."""
        return msgspec.structs.replace(self, reasons=self.reasons - {reason})

    def shutting_down(self) -> "WorkerState":
        """Return the state of the worker on its way out: no command and no recovery registers it again."""
        return msgspec.structs.replace(self, closed=True)

    def holding(self, mode: HoldMode) -> "WorkerState":
        """Return the state after the engine was paused in `mode`. A weaker mode does not undo a stronger one."""
        strongest = max(mode, self.held or mode, key=_HOLD_MODES.index)
        return msgspec.structs.replace(self, held=strongest)


class Drain(NamedTuple):
    """Wait until no request runs."""

    timeout_s: float


class Hold(NamedTuple):
    """Pause the engine for the worker's own purpose: no operator's pause begins."""

    mode: HoldMode


Preparation = Drain | Hold


class Settlement(enum.Enum):
    """A step that brings engine and discovery in line with the state."""

    CONTINUE = "continue"  # nothing holds the engine any more
    REGISTER = "register"  # COMMANDED is no reason any more


class Plan(NamedTuple):
    """How a command is executed: leave discovery or not, the preparations, the command as the engine gets it, settle.

    A plan that `deregisters` settles after a failure too. Without `calls_engine` there is nothing for the engine to do;
    if the call is `optional`, an engine that does not support the command is no failure. A `message` replaces the
    engine's.
    """

    command: Command
    deregisters: bool = False
    preparations: tuple[Preparation, ...] = ()
    calls_engine: bool = True
    optional: bool = False
    settles: bool = False
    message: str | None = None


def plan_command(state: WorkerState, command: Command, can: Capabilities) -> Plan:
    """Return how to execute `command`, which `can` covers, in `state`. Raises Conflict."""
    match command:
        case Pause():
            return _plan_pause(command)
        case Continue():
            return _plan_continue(state, command)
        case ReleaseMemory(tags=tags):
            return _plan_release(state, tags or _all_tags(can), can)
        case ResumeMemory(tags=tags):
            return _plan_resume(state, tags or _all_tags(can))
        case UpdateWeights() if WEIGHTS in state.released:
            raise Conflict("the weights are released; resume them before an update")
        case SetWeightVersion(version=version):
            # The worker keeps the name; engines with weights that can be updated may want to know it.
            message = f"the weight version is {version}"
            return Plan(command, calls_engine=bool(can.weight_sources), optional=True, message=message)
        case _:
            return Plan(command)


def _plan_pause(command: Pause) -> Plan:
    if command.mode == "drain":
        drain = Drain(command.timeout_s)
        return Plan(Pause(mode="keep"), deregisters=True, preparations=(drain,), settles=True)
    return Plan(command, deregisters=True, settles=True)


def _plan_continue(state: WorkerState, command: Continue) -> Plan:
    if not state.paused and state.held is None:
        return Plan(command, calls_engine=False, message="nothing to do: not paused")
    if state.released:
        return Plan(command, calls_engine=False, message=f"requests wait for {' and '.join(state.released)}")
    return Plan(command, settles=True)


def _all_tags(can: Capabilities) -> tuple[str, ...]:
    return tuple(sorted(can.memory_tags))


def _plan_release(state: WorkerState, tags: tuple[str, ...], can: Capabilities) -> Plan:
    allocated = tuple(tag for tag in dict.fromkeys(tags) if tag not in state.released)
    command = ReleaseMemory(tags=allocated)
    if not allocated:
        return Plan(command, calls_engine=False, message="nothing to do: already released")
    return Plan(command, deregisters=True, preparations=_hold_for(state, allocated, can), settles=True)


def _hold_for(state: WorkerState, tags: tuple[str, ...], can: Capabilities) -> tuple[Preparation, ...]:
    """Return what ensures that no request runs in the memory of `tags`: a hold, unless one is in place, or a drain."""
    if KV_CACHE in tags and "retract" in can.pause_modes:
        return () if state.held in ("retract", "abort") else (Hold("retract"),)
    if "keep" in can.pause_modes:
        return () if state.held is not None else (Hold("keep"),)
    return (Drain(DRAIN_TIMEOUT_S),)


def _plan_resume(state: WorkerState, tags: tuple[str, ...]) -> Plan:
    released = tuple(tag for tag in dict.fromkeys(tags) if tag in state.released)
    command = ResumeMemory(tags=released)
    if not released:
        message = "nothing to do: none of it is released"
        return Plan(command, calls_engine=False, settles=True, message=message)
    return Plan(command, settles=True)


def executed(state: WorkerState, command: Command, outcome: Outcome) -> WorkerState:
    """Return the state after the engine executed `command`. What `outcome` does not say is as the command asked."""
    match command:
        case Pause():
            return _after_pause(state, command, outcome)
        case Continue():
            return _after_continue(state, outcome)
        case ReleaseMemory(tags=tags):
            return _with_released(state, tuple(sorted({*state.released, *tags})), outcome)
        case ResumeMemory(tags=tags):
            return _with_released(state, tuple(tag for tag in state.released if tag not in tags), outcome)
        case UpdateWeights(version=version) | SetWeightVersion(version=version):
            return msgspec.structs.replace(state, weight_version=outcome.weight_version or version)
        case _:
            return state


def _after_pause(state: WorkerState, command: Pause, outcome: Outcome) -> WorkerState:
    if outcome.paused is False:
        return msgspec.structs.replace(state, paused=False, held=None)
    mode: HoldMode = "keep" if command.mode == "drain" else command.mode
    return msgspec.structs.replace(state.holding(mode), paused=True)


def _after_continue(state: WorkerState, outcome: Outcome) -> WorkerState:
    paused = outcome.paused is True
    return msgspec.structs.replace(state, paused=paused, held=state.held if paused or state.released else None)


def _with_released(state: WorkerState, expected: tuple[str, ...], outcome: Outcome) -> WorkerState:
    released = expected if outcome.released is None else outcome.released
    return msgspec.structs.replace(state, released=released)


def next_settlement(state: WorkerState) -> Settlement | None:
    """Return the next step that brings engine and discovery in line with `state`; None when they are."""
    if state.paused or state.released:
        return None
    if state.held is not None:
        return Settlement.CONTINUE
    return Settlement.REGISTER if DeregisterReason.COMMANDED in state.reasons else None


def reply_to(state: WorkerState, plan: Plan, outcome: Outcome) -> Outcome:
    """Return the reply to the operator: `outcome`, with the worker's own state where the command concerns it."""
    if plan.message is not None:
        outcome = Outcome(message=plan.message)
    match plan.command:
        case Pause() | Continue() | ReleaseMemory() | ResumeMemory():
            return msgspec.structs.replace(outcome, released=state.released, paused=state.paused)
        case UpdateWeights() | SetWeightVersion():
            return msgspec.structs.replace(outcome, weight_version=state.weight_version)
        case _:
            return outcome
