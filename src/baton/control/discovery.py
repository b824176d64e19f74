"""Whether this worker takes requests: its place in discovery, by the reasons that keep it out."""

import asyncio
import enum
import logging
from collections.abc import Coroutine
from typing import Any, Protocol

from baton.errors import EngineDead, PeerLost
from baton.ports.runtime import Endpoint

log = logging.getLogger(__name__)


class AdmissionGate(Protocol):
    """What lets requests in, one by one; those on their way when the worker leaves discovery meet it shut."""

    @property
    def in_flight(self) -> int:
        """How many requests are inside."""

    def pause(self) -> None:
        """Let nobody in, for now."""

    def resume(self) -> None:
        """Let requests in again."""

    async def idle(self, timeout_s: float) -> bool:
        """Wait until nobody is inside; return False if that takes longer than `timeout_s`."""


class DeregisterReason(enum.Enum):
    """Why a worker is out of discovery."""

    UNHEALTHY = "unhealthy"  # the canary has no answer
    COMMANDED = "command"  # an operator has paused it or released its memory


class DiscoveryRegistration:
    """Lists a worker in discovery while there is no reason against it.

    `leave` and `come_back` are for several callers; each waits until discovery has been told.
    """

    def __init__(self, endpoint: Endpoint, gate: AdmissionGate, limit_s: float = 5.0) -> None:
        self._endpoint = endpoint
        self._gate = gate
        self._limit_s = limit_s
        self._reasons: set[DeregisterReason] = set()
        self._closed = False
        self._registered = True
        self._lock = asyncio.Lock()

    @property
    def registered(self) -> bool:
        """Whether discovery has this worker; False from the moment it begins to leave."""
        return self._registered and not self._closed

    @property
    def _wanted(self) -> bool:
        return not self._reasons and not self._closed

    async def deregister(self, reason: DeregisterReason) -> None:
        """Be out of discovery for `reason`. Raises PeerLost, and the worker is as it was, if discovery does not answer.

        Requests that run go on. By order, those that come all the same are refused, so that they move on.
        """
        async with self._lock:
            if reason in self._reasons:
                return
            if self._wanted:
                await self._deregister()
            self._reasons.add(reason)
            if reason is DeregisterReason.COMMANDED:
                self._gate.pause()

    async def register(self, reason: DeregisterReason) -> None:
        """Forget `reason`; with none left, be in discovery again.

        Raises EngineDead if that fails: a worker that cannot be found is of no use, and a restart mends it.
        """
        async with self._lock:
            if reason not in self._reasons:
                return
            self._reasons.discard(reason)
            if reason is DeregisterReason.COMMANDED:
                self._gate.resume()
            if self._wanted:
                await self._restore()

    async def aclose(self) -> None:
        """Leave discovery for good: from now on nothing brings the worker back."""
        self._closed = True
        async with self._lock:
            await self._told(self._endpoint.deregister())

    async def _deregister(self) -> None:
        self._registered = False
        try:
            await self._told(self._endpoint.deregister())
        except Exception as error:
            log.warning("could not leave discovery: %r", error)
            await self._restore()
            raise PeerLost(f"this worker could not leave discovery, so nothing was done: {error!r}") from error

    async def _restore(self) -> None:
        try:
            await self._told(self._endpoint.register())
        except Exception as error:
            raise EngineDead(f"this worker could not come back into discovery: {error!r}") from error
        self._registered = True

    async def _told(self, telling: Coroutine[Any, Any, None]) -> None:
        await asyncio.wait_for(telling, self._limit_s)
