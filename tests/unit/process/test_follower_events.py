"""An engine over two machines: routers hear of both, by the name of the leader."""

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
from baton.process import follower_events as nodes
from baton.process.follower_events import FollowerEvents, Listener, node_path
from baton.process.worker import Worker
from baton.protocol.events import KvCleared, KvRemoved, KvStored, LoadSnapshot, Reading
from baton.protocol.outputs import Finished, FinishReason, TokenDelta
from baton.testing import Script, ScriptedEngine, eventually, run_bounded
from baton.testing.fakes import SCRIPTED_INFO
from baton.testing.memory_runtime import MemoryRuntime

WELL: Script = [TokenDelta([1]), Finished(FinishReason.LENGTH)]
PATH = node_path(Settings(), "aggregated", "10.0.0.1:5000")
STORED = KvStored((1, 2), (5,) * 32, 16, dp_rank=1, parent_hash=7, cache_salt="a")
LOAD = LoadSnapshot(1, 0, 3, 8, dp_rank=1)


def info(leader: bool, group: str) -> EngineInfo:
    changed: EngineInfo = msgspec.structs.replace(SCRIPTED_INFO, leader=leader, group=group)
    return changed


def test_what_a_node_sees_is_told_by_its_leader_and_by_no_other() -> None:
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


async def hear(runtime: MemoryRuntime, heard: list[Reading], count: int) -> None:
    """Listen until so much has been heard, and leave."""
    listening = asyncio.create_task(Listener(runtime, PATH, heard.append).run())
    await eventually(lambda: len(heard) >= count)
    listening.cancel()
    with suppress(asyncio.CancelledError):
        await listening


def test_a_new_listener_begins_anew() -> None:
    async def body() -> None:
        runtime, voice = MemoryRuntime(), FollowerEvents()
        await runtime.start()
        await runtime.serve(PATH, voice.service)
        heard: list[Reading] = []
        voice.publish(STORED)
        await hear(runtime, heard, 2)
        assert heard == [KvCleared(1), STORED]
        again: list[Reading] = []
        voice.publish(LOAD)
        await hear(runtime, again, 2)
        assert again == [KvCleared(1), LOAD]
        await runtime.shutdown()

    run_bounded(body())


def test_what_nobody_hears_is_bounded() -> None:
    async def body() -> None:
        voice = FollowerEvents()
        for _ in range(nodes.MOST_UNREAD + 5):
            voice.publish(STORED)
        runtime = MemoryRuntime()
        await runtime.start()
        await runtime.serve(PATH, voice.service)
        heard: list[Reading] = []
        await hear(runtime, heard, 6)
        assert len(heard) < 10
        assert heard[0] == KvCleared(1)
        await runtime.shutdown()

    run_bounded(body())


class Mumbler:
    """A node that can be heard only now and then."""

    def __init__(self) -> None:
        self.clear = False
        self.calls = 0

    async def say(self, _: None, context: Context) -> AsyncGenerator[Reading, None]:
        self.calls += 1
        if not self.clear:
            raise EngineFailed("mumble")
        yield LOAD
        await eventually(lambda: not self.clear)
        raise EngineFailed("mumble")


def test_a_node_that_cannot_be_heard_is_complained_of_once_until_it_is_heard(caplog: pytest.LogCaptureFixture) -> None:
    async def body() -> None:
        runtime, mumbler, heard = MemoryRuntime(), Mumbler(), list[Reading]()
        await runtime.start()
        await runtime.serve(PATH, Service(mumbler.say, lambda _: None, msgspec.to_builtins))
        listening = asyncio.create_task(Listener(runtime, PATH, heard.append, look_s=0.005).run())
        for turn in (1, 2):
            calls = mumbler.calls
            await eventually(lambda before=calls: mumbler.calls >= before + 3)
            mumbler.clear = True
            await eventually(lambda count=turn: len(heard) == count)
            mumbler.clear = False
        await eventually(lambda: len(caplog.messages) == 5)
        listening.cancel()
        with suppress(asyncio.CancelledError):
            await listening
        await runtime.shutdown()

    with caplog.at_level(logging.INFO, "baton.process.follower_events"):
        run_bounded(body())
    assert ["again" in message for message in caplog.messages] == [False, True, False, True, False]
