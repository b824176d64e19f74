"""An engine over two machines: routers get the KV events of both from the leader."""

import asyncio
import logging
from collections.abc import AsyncGenerator
from contextlib import suppress

import msgspec
import pytest

from baton.config.settings import Settings
from baton.errors import EngineFailed
from baton.ports.engine import EngineInfo
from baton.ports.runtime import Context, Service
from baton.process.follower_events import FollowerEvents, FollowerSubscriber, follower_path
from baton.process.worker import Worker
from baton.protocol.events import KvCleared, KvRemoved, KvStored, LoadSnapshot, Reading
from baton.protocol.outputs import Finished, FinishReason, TokenDelta
from baton.testing import Script, ScriptedEngine, eventually, run_bounded
from baton.testing.fakes import SCRIPTED_INFO
from baton.testing.memory_runtime import MemoryRuntime

WELL: Script = [TokenDelta([1]), Finished(FinishReason.LENGTH)]
PATH = follower_path(Settings(), "aggregated", "10.0.0.1:5000")
STORED = KvStored((1, 2), (5,) * 32, 16, dp_rank=1, parent_hash=7, cache_salt="a")
LOAD = LoadSnapshot(1, 0, 3, 8, dp_rank=1)


def info(leader: bool, group: str) -> EngineInfo:
    changed: EngineInfo = msgspec.structs.replace(SCRIPTED_INFO, leader=leader, group=group)
    return changed


def test_events_of_a_follower_are_published_by_its_leader_only() -> None:
    async def body() -> None:
        runtimes = [MemoryRuntime() for _ in range(3)]
        for runtime in runtimes[1:]:
            runtime.endpoints = runtimes[0].endpoints  # one cluster
        stop, ready = asyncio.Event(), [asyncio.Event() for _ in runtimes]
        engines = [
            ScriptedEngine(WELL, info=info(leader, group)) for leader, group in ((True, "a"), (False, "a"), (True, "b"))
        ]
        engines[1].readings_to_give = [LOAD, STORED, KvRemoved((2,), dp_rank=1)]
        running = [
            asyncio.create_task(Worker(Settings(engine="echo"), engine, runtime).run(stop, event.set))
            for engine, runtime, event in zip(engines, runtimes, ready, strict=True)
        ]
        for event in ready:
            await event.wait()
        leader, other = runtimes[0].endpoints["baton.worker.generate"]
        await eventually(lambda: leader.published[-2:] == [STORED, KvRemoved((2,), dp_rank=1)])
        assert LOAD in leader.published
        assert other.published == []
        stop.set()
        await asyncio.gather(*running)

    run_bounded(body())


async def subscribe(runtime: MemoryRuntime, received: list[Reading], count: int) -> None:
    """Subscribe until `count` readings have arrived."""
    subscription = asyncio.create_task(FollowerSubscriber(runtime, PATH, received.append).run())
    await eventually(lambda: len(received) >= count)
    subscription.cancel()
    with suppress(asyncio.CancelledError):
        await subscription


def test_a_new_subscriber_starts_with_cleared_ranks() -> None:
    async def body() -> None:
        runtime, events = MemoryRuntime(), FollowerEvents()
        await runtime.start()
        await runtime.serve(PATH, events.service)
        received: list[Reading] = []
        events.publish(STORED)
        await subscribe(runtime, received, 2)
        assert received == [KvCleared(1), STORED]
        again: list[Reading] = []
        events.publish(LOAD)
        await subscribe(runtime, again, 2)
        assert again == [KvCleared(1), LOAD]
        await runtime.shutdown()

    run_bounded(body())


def test_unread_events_are_bounded() -> None:
    async def body() -> None:
        events = FollowerEvents(max_unread=100)
        for _ in range(105):
            events.publish(STORED)
        runtime = MemoryRuntime()
        await runtime.start()
        await runtime.serve(PATH, events.service)
        received: list[Reading] = []
        await subscribe(runtime, received, 6)
        assert len(received) < 10
        assert received[0] == KvCleared(1)
        await runtime.shutdown()

    run_bounded(body())


class FlakyFollower:
    """A follower that fails while `reachable` is not set."""

    def __init__(self) -> None:
        self.reachable = False
        self.calls = 0

    async def stream(self, _: None, context: Context) -> AsyncGenerator[Reading, None]:
        self.calls += 1
        if not self.reachable:
            raise EngineFailed("unreachable")
        yield LOAD
        await eventually(lambda: not self.reachable)
        raise EngineFailed("unreachable")


def test_an_unreachable_follower_is_logged_once_until_it_is_reachable(caplog: pytest.LogCaptureFixture) -> None:
    async def body() -> None:
        runtime, follower, received = MemoryRuntime(), FlakyFollower(), list[Reading]()
        await runtime.start()
        await runtime.serve(PATH, Service(follower.stream, lambda _: None, msgspec.to_builtins))
        subscription = asyncio.create_task(
            FollowerSubscriber(runtime, PATH, received.append, poll_interval_s=0.005).run()
        )
        for turn in (1, 2):
            calls = follower.calls
            await eventually(lambda before=calls: follower.calls >= before + 3)
            follower.reachable = True
            await eventually(lambda count=turn: len(received) == count)
            follower.reachable = False
        await eventually(lambda: len(caplog.messages) == 5)
        subscription.cancel()
        with suppress(asyncio.CancelledError):
            await subscription
        await runtime.shutdown()

    with caplog.at_level(logging.INFO, "baton.process.follower_events"):
        run_bounded(body())
    assert ["again" in message for message in caplog.messages] == [False, True, False, True, False]
