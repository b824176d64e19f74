"""A worker's entry in discovery: registering and deregistering, each within its time."""

import asyncio
import logging
from collections.abc import Coroutine
from typing import Any

from baton.errors import BatonError, EngineDead, PeerLost
from baton.ports.runtime import Endpoint

log = logging.getLogger(__name__)


class DiscoveryRegistration:
    """Registers and deregisters one endpoint. One call at a time; `controller.py` decides which."""

    def __init__(self, endpoint: Endpoint, timeout_s: float = 5.0) -> None:
        self._endpoint = endpoint
        self._timeout_s = timeout_s
        self._registered = True
        self._adapters: set[str] = set()

    @property
    def registered(self) -> bool:
        """Whether discovery should have the endpoint; False from the moment it begins to deregister."""
        return self._registered

    async def deregister(self) -> None:
        """Leave discovery; running requests go on. Raises PeerLost, still registered, if discovery does not answer."""
        self._registered = False
        try:
            await self._bounded(self._endpoint.deregister())
        except Exception as error:
            log.warning("could not leave discovery: %r", error)
            await self.register()
            raise PeerLost(f"this worker could not leave discovery, so nothing was done: {error!r}") from error

    async def register(self) -> None:
        """Register again. Raises EngineDead on failure: a restart of the worker registers it."""
        try:
            await self._bounded(self._endpoint.register())
        except Exception as error:
            raise EngineDead(f"this worker could not register in discovery again: {error!r}") from error
        self._registered = True

    async def register_adapter(self, name: str) -> None:
        """Register a LoRA adapter. Raises InvalidRequest, or PeerLost if discovery does not answer; it is not there."""
        try:
            await self._bounded(self._endpoint.register_adapter(name))
            self._adapters.add(name)
        except BatonError:
            raise
        except Exception as error:
            raise PeerLost(f"the adapter could not be registered, so nothing was done: {error!r}") from error

    async def deregister_adapter(self, name: str) -> bool:
        """Deregister a LoRA adapter; return whether it was there. Raises PeerLost if discovery does not answer."""
        try:
            if name in self._adapters:
                await self._bounded(self._endpoint.deregister_adapter(name))
                self._adapters.discard(name)
                return True
        except Exception as error:
            raise PeerLost(f"the adapter could not be deregistered, so nothing was done: {error!r}") from error
        return False

    async def leave(self) -> None:
        """Leave discovery for good. Raises what the endpoint raises."""
        self._registered = False
        await self._bounded(self._endpoint.deregister())

    async def _bounded(self, call: Coroutine[Any, Any, None]) -> None:
        async with asyncio.timeout(self._timeout_s):
            await call
