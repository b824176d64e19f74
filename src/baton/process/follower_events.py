"""Engines that are spread over machines: what the nodes that follow see of their engine reaches routers by the leader.

Each node that follows serves what its engine tells; the leader reads all of them and tells it as its own, for routers
know the engine by the leader's name only.
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

LOOK_S = 1.0
MOST_UNREAD = 100_000


def node_path(settings: Settings, role: str, group: str) -> str:
    """Return where the nodes of the engine `group` that follow can be heard."""
    name = hashlib.blake2b(group.encode(), digest_size=8).hexdigest()
    return f"{settings.namespace}.{role}-nodes.{name}"


class FollowerEvents:
    """What a node that follows has to say, for one listener at a time. Event-loop thread only."""

    def __init__(self) -> None:
        self._unread: deque[Reading] = deque()
        self._ranks: set[int] = set()
        self._news = asyncio.Event()

    @property
    def service(self) -> Service[None, Reading]:
        """What the leader calls."""
        return Service(self._say, lambda _: None, msgspec.to_builtins)

    def publish(self, reading: Reading) -> None:
        """Say `reading` to the leader, now or when it listens. Never blocks."""
        self._ranks.add(reading.dp_rank)
        if len(self._unread) >= MOST_UNREAD:
            self._forget()
        self._unread.append(reading)
        self._news.set()

    async def _say(self, _: None, context: Context) -> AsyncGenerator[Reading, None]:
        self._unread.extendleft(KvCleared(rank) for rank in self._ranks)  # whatever another listener has heard
        while True:
            while self._unread:
                yield self._unread.popleft()
            self._news.clear()
            await self._news.wait()

    def _forget(self) -> None:
        """Begin anew: a listener who has missed something would believe in blocks that are gone."""
        self._unread.clear()
        self._unread.extend(KvCleared(rank) for rank in self._ranks)


class Listener:
    """The leader's ear. Event-loop thread only."""

    def __init__(self, runtime: Runtime, path: str, publish: Callable[[Reading], None], look_s: float = LOOK_S) -> None:
        self._runtime = runtime
        self._path = path
        self._publish = publish
        self._look_s = look_s
        self._hearing: dict[int, asyncio.Task[None]] = {}
        self._unheard: set[int] = set()

    async def run(self) -> None:
        """Listen to every node that is there, until cancelled."""
        client = await self._runtime.client(self._path)
        try:
            while True:
                there = client.instances()
                self._unheard.intersection_update(there)
                for instance in there:
                    hearing = self._hearing.get(instance)
                    if hearing is None or hearing.done():
                        self._hearing[instance] = asyncio.create_task(self._hear(client, instance))
                await asyncio.sleep(self._look_s)
        finally:
            for hearing in self._hearing.values():
                hearing.cancel()
            if self._hearing:
                await asyncio.wait(self._hearing.values(), timeout=LOOK_S)

    async def _hear(self, client: Client, instance: int) -> None:
        try:
            async with aclosing(client.call({}, instance)) as replies:
                async for reply in replies:
                    self._publish(msgspec.convert(reply, LoadSnapshot | KvStored | KvRemoved | KvCleared))
                    if instance in self._unheard:
                        self._unheard.remove(instance)
                        log.info("node %x of this engine is heard again", instance)
        except (BatonError, msgspec.ValidationError) as error:
            if instance not in self._unheard:  # once: it is tried again with every look
                self._unheard.add(instance)
                log.warning("node %x of this engine cannot be heard: %s", instance, error)
