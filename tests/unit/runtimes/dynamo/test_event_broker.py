"""The event broker of one host: it forwards, another process takes over, and no other user can connect."""

import asyncio
import os
import stat
from pathlib import Path

import pytest
import zmq
import zmq.asyncio

from baton.config.runtime import RuntimeOptions
from baton.errors import ConfigError
from baton.runtimes.dynamo.environment import environment
from baton.runtimes.dynamo.event_broker import EventBroker
from baton.runtimes.dynamo.event_sockets import EventSockets, event_sockets
from baton.testing import eventually


@pytest.fixture
def sockets(tmp_path: Path) -> EventSockets:
    sockets = EventSockets(tmp_path)
    sockets.prepare()
    return sockets


class _Peers:
    """A publisher and a subscriber that stay connected while brokers come and go."""

    def __init__(self, sockets: EventSockets) -> None:
        self._context = zmq.asyncio.Context()
        self._publisher = self._context.socket(zmq.PUB)
        self._publisher.connect(sockets.publishers)
        self._subscriber = self._context.socket(zmq.SUB)
        self._subscriber.connect(sockets.subscribers)
        self._subscriber.subscribe(b"kv")

    async def delivered(self, body: bytes) -> list[bytes]:
        """Publish until it arrives, since subscriptions take a moment; return what arrived."""
        while True:
            await self._publisher.send_multipart([b"kv", body])
            if await self._subscriber.poll(20):
                return await self._subscriber.recv_multipart()

    async def __aenter__(self) -> "_Peers":
        return self

    async def __aexit__(self, *_: object) -> None:
        self._context.destroy(linger=0)


def test_a_second_broker_forwards_when_the_first_one_stops(sockets: EventSockets) -> None:
    async def body() -> None:
        first, second = EventBroker(sockets), EventBroker(sockets)
        async with _Peers(sockets) as peers:
            first.start()
            assert await peers.delivered(b"one") == [b"kv", b"one"]
            second.start()
            await first.stop()
            while await peers.delivered(b"two") != [b"kv", b"two"]:
                pass  # copies of the first message that were still on their way
            await second.stop()
            await second.stop()

    asyncio.run(asyncio.wait_for(body(), 30))


def test_a_broker_that_waits_for_its_turn_can_be_stopped(sockets: EventSockets) -> None:
    def names() -> list[str]:
        return os.listdir(sockets.directory)

    async def body() -> None:
        first, second = EventBroker(sockets), EventBroker(sockets)
        first.start()
        await eventually(lambda: "subscribe" in names())
        second.start()
        await second.stop()
        assert sorted(names()) == ["lock", "publish", "subscribe"]
        await first.stop()
        assert names() == ["lock"]

    asyncio.run(asyncio.wait_for(body(), 30))


def test_a_broker_that_cannot_listen_says_so_and_can_be_stopped(
    sockets: EventSockets, caplog: pytest.LogCaptureFixture
) -> None:
    Path(sockets.subscribers.removeprefix("ipc://")).mkdir()

    async def body() -> None:
        broker = EventBroker(sockets)
        broker.start()
        await eventually(lambda: "cannot listen" in caplog.text)
        await broker.stop()

    asyncio.run(asyncio.wait_for(body(), 30))


def test_only_the_owner_reaches_the_sockets(sockets: EventSockets) -> None:
    assert stat.S_IMODE(sockets.directory.stat().st_mode) == 0o700


@pytest.mark.parametrize("name", ["x" * 120, "a,b", "a;b"])
def test_a_directory_that_cannot_have_sockets_is_refused_with_the_flag(tmp_path: Path, name: str) -> None:
    with pytest.raises(ConfigError, match="--runtime-directory"):
        EventSockets(tmp_path / name).prepare()


def test_the_runtime_publishes_through_the_broker_on_one_host_only() -> None:
    options = RuntimeOptions(directory="/tmp/d")
    assert environment(options)["DYN_ZMQ_BROKER_URL"] == (
        "xsub=ipc:///tmp/d/events/publish , xpub=ipc:///tmp/d/events/subscribe"
    )
    assert event_sockets(RuntimeOptions(discovery="etcd")) is None
    assert event_sockets(RuntimeOptions(events="nats")) is None
