"""Engines that are spread over machines: KV events and load of the follower nodes reach routers through the leader.

Each follower serves the readings of its engine. The leader reads all of them and publishes them as its own, since
routers know the engine by the leader's instance only.
"""

import asyncio
import hashlib
import logging
from collections import deque
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing

import msgspec

from baton.config.settings import Settings
from baton.errors import BatonError
from baton.ports.runtime import Client, Context, Runtime, Service
from baton.protocol.events import KvCleared, KvRemoved, KvStored, LoadSnapshot, Reading

log = logging.getLogger(__name__)

POLL_INTERVAL_S = 1.0
MAX_UNREAD = 100_000


def follower_path(settings: Settings, role: str, group: str) -> str:
    """Return the path at which the followers of the engine `group` serve their readings."""
    name = hashlib.blake2b(group.encode(), digest_size=8).hexdigest()
    return f"{settings.namespace}.{role}-nodes.{name}"


class FollowerEvents:
    """The readings of a follower, for one subscriber at a time. Event-loop thread only."""

    def __init__(self, max_unread: int = MAX_UNREAD) -> None:
        self._max_unread = max_unread
        self._unread: deque[Reading] = deque()
        self._ranks: set[int] = set()
        self._added = asyncio.Event()

    @property
    def service(self) -> Service[None, Reading]:
        """What the leader calls."""
        return Service(self._stream, lambda _: None, msgspec.to_builtins)

    def publish(self, reading: Reading) -> None:
        """Send `reading` to the leader, now or when it subscribes. Never blocks."""
        self._ranks.add(reading.dp_rank)
        if len(self._unread) >= self._max_unread:
            self._restart()
        self._unread.append(reading)
        self._added.set()

    async def _stream(self, _: None, context: Context) -> AsyncGenerator[Reading, None]:
        # Blocks that an earlier subscriber has published may be gone.
        self._unread.extendleft(KvCleared(rank) for rank in self._ranks)
        while True:
            while self._unread:
                yield self._unread.popleft()
            self._added.clear()
            await self._added.wait()

    def _restart(self) -> None:
        """Drop what is unread and clear every rank: a gap would leave blocks in the routers' index that are gone."""
        self._unread.clear()
        self._unread.extend(KvCleared(rank) for rank in self._ranks)


class FollowerSubscriber:
    """Publishes the readings of every follower, in the leader. Event-loop thread only."""

    def __init__(
        self,
        runtime: Runtime,
        path: str,
        publish: Callable[[Reading], None],
        poll_interval_s: float = POLL_INTERVAL_S,
    ) -> None:
        self._runtime = runtime
        self._path = path
        self._publish = publish
        self._poll_interval_s = poll_interval_s
        self._subscriptions: dict[int, asyncio.Task[None]] = {}
        self._unreachable: set[int] = set()

    async def run(self) -> None:
        """Subscribe to every follower that discovery has, until cancelled."""
        client = await self._runtime.client(self._path)
        try:
            while True:
                instances = client.instances()
                self._unreachable.intersection_update(instances)
                for instance in instances:
                    subscription = self._subscriptions.get(instance)
                    if subscription is None or subscription.done():
                        self._subscriptions[instance] = asyncio.create_task(self._read(client, instance))
                await asyncio.sleep(self._poll_interval_s)
        finally:
            for subscription in self._subscriptions.values():
                subscription.cancel()
            if self._subscriptions:
                await asyncio.wait(self._subscriptions.values(), timeout=POLL_INTERVAL_S)

    async def _read(self, client: Client, instance: int) -> None:
        try:
            async with aclosing(client.call({}, instance)) as replies:
                async for reply in replies:
                    self._publish(msgspec.convert(reply, LoadSnapshot | KvStored | KvRemoved | KvCleared))
                    if instance in self._unreachable:
                        self._unreachable.remove(instance)
                        log.info("follower %x of this engine is reachable again", instance)
        except (BatonError, msgspec.ValidationError) as error:
            if instance not in self._unreachable:  # logged once: every poll tries again
                self._unreachable.add(instance)
                log.warning("cannot read the events of follower %x of this engine: %s", instance, error)
