"""Only admitted source ports reach a guarded listener."""

import asyncio
import socket
from contextlib import ExitStack, suppress

import pytest
import uvloop

from baton.edge.messages import Headers
from baton.edge.upstream import UpstreamConnection, UpstreamPool
from baton.errors import BatonError
from baton.runtimes.dynamo.port_guard import PortGuard


def listening() -> socket.socket:
    listener = socket.socket()
    listener.bind(("127.0.0.1", 0))
    listener.listen()
    listener.settimeout(10)
    return listener


def bound(address: str = "127.0.0.1", port: int = 0) -> socket.socket:
    client = socket.socket()
    client.bind((address, port))
    client.settimeout(0.3)
    return client


def test_only_admitted_ports_connect_and_they_stay_connected() -> None:
    with listening() as listener, bound() as stranger, bound() as friend:
        target = listener.getsockname()
        guard = PortGuard(target[1])
        port = friend.getsockname()[1]
        guard.admit([port])
        friend.connect(target)
        accepted, _ = listener.accept()
        guard.settle(port)
        guard.admit([1])  # the filter is replaced
        with pytest.raises(TimeoutError):
            stranger.connect(target)
        with accepted, bound("127.0.0.2", port) as impostor:
            with pytest.raises(TimeoutError):
                impostor.connect(target)
            friend.sendall(b"question")
            assert accepted.recv(100) == b"question"
            accepted.sendall(b"answer")
            assert friend.recv(100) == b"answer"
        guard.close()
        guard.close()


def test_a_closed_guard_does_not_keep_the_port() -> None:
    with listening() as listener:
        port = listener.getsockname()[1]
        guard = PortGuard(port)
        guard.close()
    with bound() as client, pytest.raises(ConnectionRefusedError):
        client.connect(("127.0.0.1", port))


def test_more_ports_than_a_filter_has_room_for_are_refused_and_the_others_stay() -> None:
    with listening() as listener, bound() as friend:
        target = listener.getsockname()
        guard = PortGuard(target[1])
        guard.admit([friend.getsockname()[1]])
        with pytest.raises(OSError):
            guard.admit(range(1, 5000))
        friend.connect(target)
        guard.close()


BATCH = 50


class Waiting:
    """A request that gets no answer."""

    def __init__(self) -> None:
        self.connection: UpstreamConnection | None = None

    def on_connected(self, connection: UpstreamConnection) -> None:
        self.connection = connection
        connection.send(self, b"GET / HTTP/1.1\r\n\r\n", b"")

    def on_lost(self, error: BatonError) -> None:
        pass

    def on_head(self, status: int, headers: Headers) -> None:
        pass

    def on_data(self, data: bytes) -> None:
        pass

    def flush(self) -> None:
        pass

    def on_end(self) -> None:
        pass


def test_requests_that_wait_for_their_answers_keep_nobody_out() -> None:
    async def body() -> None:
        loop = asyncio.get_running_loop()
        with listening() as listener, ExitStack() as accepted:
            listener.listen(BATCH)  # a connection that does not fit is tried again after a second
            listener.setblocking(False)

            def accept_all() -> None:
                with suppress(BlockingIOError):
                    while True:
                        accepted.enter_context(listener.accept()[0])

            loop.add_reader(listener, accept_all)
            port = listener.getsockname()[1]
            guard = PortGuard(port)
            pool = UpstreamPool("127.0.0.1", port, guard)
            waiting = [Waiting() for _ in range(2200)]
            try:
                for first in range(0, len(waiting), BATCH):
                    await asyncio.wait([pool.connect(each) for each in waiting[first : first + BATCH]])
                assert all(each.connection is not None for each in waiting)
            finally:
                loop.remove_reader(listener)
                pool.close()
                guard.close()

    uvloop.run(body())
