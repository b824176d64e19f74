"""Only admitted source ports reach a guarded listener."""

import socket

import pytest

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
        guard.admit(port)
        friend.connect(target)
        accepted, _ = listener.accept()
        guard.settle(port)
        guard.admit(1)  # the filter is replaced
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
