"""The gate: admits requests up to a limit, pauses and drains. Synchronous except for `idle`."""

import asyncio
import enum

from baton.errors import BatonError, Draining, Overloaded, Paused
from baton.request.cancel_scope import CancelScope


class GateState(enum.StrEnum):
    """Whether new requests are admitted."""

    OPEN = "open"
    PAUSED = "paused"
    DRAINING = "draining"


class Gate:
    """Counts the requests of one worker. A pause ends; draining does not."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.state = GateState.OPEN
        self._scopes: set[CancelScope] = set()
        self._engine_died = False
        self._empty = asyncio.Event()
        self._empty.set()

    @property
    def in_flight(self) -> int:
        """How many admitted requests have not ended."""
        return len(self._scopes)

    def enter(self, scope: CancelScope) -> None:
        """Admit a request, or raise Draining, Paused or Overloaded. Each `enter` has one `leave`."""
        if self.state is GateState.DRAINING:
            raise Draining("this worker is shutting down")
        if self.state is GateState.PAUSED:
            raise Paused("this worker is paused")
        if len(self._scopes) >= self.limit:
            raise Overloaded(f"this worker serves at most {self.limit} requests at a time")
        self._scopes.add(scope)
        self._empty.clear()

    def leave(self, scope: CancelScope) -> None:
        """A request has ended, or was refused."""
        self._scopes.discard(scope)
        if not self._scopes:
            self._empty.set()

    def pause(self) -> None:
        """Refuse new requests until `resume`; admitted ones continue."""
        if self.state is GateState.OPEN:
            self.state = GateState.PAUSED

    def resume(self) -> None:
        """End a pause."""
        if self.state is GateState.PAUSED:
            self.state = GateState.OPEN

    def drain(self) -> None:
        """Refuse new requests from now on; admitted ones continue."""
        self.state = GateState.DRAINING

    def fire_all(self, error: BatonError) -> None:
        """End every admitted request early with `error`."""
        for scope in tuple(self._scopes):
            scope.fire(error)

    def alone_when_engine_died(self) -> bool:
        """An admitted request has seen its engine die: return whether it is the first to see that, and alone.

        The requests of a dead engine leave one after the other, so only the first can know how many there were.
        """
        first, self._engine_died = not self._engine_died, True
        return first and len(self._scopes) == 1

    async def idle(self, timeout_s: float) -> bool:
        """Wait until no request is in flight; return False if that takes longer than `timeout_s`."""
        if not self._scopes:
            return True
        try:
            async with asyncio.timeout(timeout_s):
                await self._empty.wait()
        except TimeoutError:
            return False
        return True
