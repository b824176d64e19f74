"""An operator's orders to one worker: one at a time, each within its time, and never half done.

order                 discovery     engine         afterwards
pause, release        leave first   then obeys     a failure brings the worker back as it was
continue, resume      -             obeys first    back when nothing is released and nothing is paused
all others            stays         obeys          -
"""

import asyncio
import logging
from collections.abc import Callable

import msgspec

from baton.control.presence import Absence, Door, Presence
from baton.control.support import refuse_unsupported
from baton.errors import BatonError, Draining, EngineFailed, EngineStalled
from baton.ports.engine import Capabilities, Engine
from baton.protocol.control import (
    Continue,
    FromGroup,
    JoinGroup,
    Outcome,
    Pause,
    ReleaseMemory,
    ResumeMemory,
    UpdateWeights,
    Verb,
)

log = logging.getLogger(__name__)

MARGIN_S = 30.0
"""What an order with a time of its own may take beyond that."""
INITIAL = "initial"


class Status(msgspec.Struct, frozen=True, kw_only=True):
    """Where a worker stands with its orders."""

    weight_version: str
    paused: bool
    released: tuple[str, ...]
    doing: str | None
    listed: bool
    in_flight: int
    capabilities: Capabilities


class Orders:
    """Gives verbs to an engine and keeps the worker's place in discovery in step with them."""

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
        self._paused = False
        self._released: tuple[str, ...] = ()
        self._weight_version = INITIAL
        self._closed = False

    @property
    def idle(self) -> bool:
        """Whether an operator has told this worker not to serve."""
        return self._paused or bool(self._released)

    @property
    def excused(self) -> bool:
        """Whether it is no wonder that the engine answers no request now: it is idle by order, or at an order."""
        return self.idle or self._doing is not None

    def status(self) -> Status:
        """Return where the worker stands; answers while an order is being carried out."""
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
        """Have `verb` done, after those that came before it.

        Raises Draining while the worker shuts down and what `Engine.control` raises: then nothing has changed. An
        engine that does not return in time is stuck, and ends the worker: EngineStalled.
        """
        refuse_unsupported(verb, self._engine.capabilities)
        async with self._lock:
            if self._closed:
                raise Draining("this worker is shutting down")
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
        if isinstance(verb, Pause | ReleaseMemory):
            await self.presence.leave(Absence.ORDERED)
        try:
            outcome = await self._ask(verb)
        except BatonError as error:
            if error.scope == "request":
                await self._come_back()
            raise
        self._note(verb, outcome)
        await self._come_back()
        return outcome

    async def _come_back(self) -> None:
        if not self.idle and not self._closed:
            await self.presence.come_back(Absence.ORDERED)

    async def _ask(self, verb: Verb) -> Outcome:
        limit_s = _limit_s(verb, self._limit_s)
        try:
            return await asyncio.wait_for(self._engine.control(verb), limit_s)
        except TimeoutError:
            raise EngineStalled(f"the engine has not done {name_of(verb)} within {limit_s:g} s") from None
        except BatonError:
            raise
        except Exception as error:
            log.exception("%s failed in a way that the engine should have told", name_of(verb))
            raise EngineFailed(f"{name_of(verb)} failed: {error!r}") from error

    def _note(self, verb: Verb, outcome: Outcome) -> None:
        """Remember what holds from now on; what the engine says goes before what the verb asked for."""
        match verb:
            case Pause() | Continue():
                self._paused = isinstance(verb, Pause)
            case ReleaseMemory(tags=tags):
                self._released = tuple(sorted({*self._released, *tags}))
            case ResumeMemory(tags=tags):
                self._released = tuple(tag for tag in self._released if tag not in tags)
            case UpdateWeights(version=version):
                self._weight_version = version
            case _:
                pass
        if outcome.paused is not None:
            self._paused = outcome.paused
        if outcome.released is not None:
            self._released = outcome.released


def name_of(verb: Verb) -> str:
    """Return what `verb` is called on the wire."""
    return str(verb.__struct_config__.tag)


def _limit_s(verb: Verb, usual_s: float) -> float:
    match verb:
        case JoinGroup(timeout_s=own_s) | UpdateWeights(source=FromGroup(timeout_s=own_s)):
            return own_s + MARGIN_S
        case _:
            return usual_s
