"""The processes of a deployment on several hosts: each serves its location at one path of the runtime."""

import asyncio
import logging
from collections.abc import Iterable, Sequence
from contextlib import aclosing

from baton.errors import BatonError
from baton.ports.runtime import Client, Runtime
from baton.protocol.codec import DecodeError, convert
from baton.protocol.locations import ProcessLocation
from baton.views.deployment import ProcessAddress

log = logging.getLogger(__name__)

REPLY_TIMEOUT_S = 3.0


class DiscoveredProcesses:
    """Finds the processes whose namespace begins with `namespace`, as those of pools do. The runtime is started."""

    def __init__(self, runtime: Runtime, path: str, namespace: str, token: str) -> None:
        self._runtime = runtime
        self._path = path
        self._namespace = namespace
        self._token = token
        self._client: Client | None = None
        self._known: dict[int, ProcessLocation] = {}

    async def find(self) -> Sequence[ProcessAddress]:
        """See `ProcessFinder.find`."""
        if self._client is None:
            self._client = await self._runtime.client(self._path)
        instances = self._client.instances()
        new = [instance for instance in instances if instance not in self._known]
        found = await asyncio.gather(*(self._ask(self._client, instance) for instance in new))
        known = self._known | {instance: each for instance, each in zip(new, found, strict=True) if each is not None}
        self._known = {instance: known[instance] for instance in instances if instance in known}
        return addresses(self._known.values(), self._namespace, self._token)

    async def _ask(self, client: Client, instance: int) -> ProcessLocation | None:
        """Return where an instance is; None if it does not reply, and it is asked again."""
        try:
            async with asyncio.timeout(REPLY_TIMEOUT_S), aclosing(client.call({}, instance)) as replies:
                async for reply in replies:
                    return convert(reply, ProcessLocation)
        except (TimeoutError, DecodeError, BatonError) as error:
            log.debug("a process in discovery does not reply: %r", error)
        return None


def addresses(locations: Iterable[ProcessLocation], namespace: str, token: str) -> list[ProcessAddress]:
    """Return the addresses of a deployment's processes; those of one name are told apart by their hosts."""
    found = [each for each in locations if each.namespace.startswith(namespace)]
    names = [each.name for each in found]
    return [
        ProcessAddress(
            name=each.name if names.count(each.name) == 1 else f"{each.name}@{each.url.partition('://')[2]}",
            url=each.url,
            token=token or None,
        )
        for each in found
    ]
