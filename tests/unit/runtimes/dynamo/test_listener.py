"""Listeners of this process, found by their port."""

import os
import socket
from pathlib import Path

from baton.runtimes.dynamo.listener import set_nodelay


def open_files() -> int:
    return len(os.listdir("/proc/self/fd"))


def test_the_listener_at_a_port_gets_the_option() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        assert set_nodelay(listener.getsockname()[1])
        assert listener.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)


def test_a_search_leaves_no_file_open(tmp_path: Path) -> None:
    with (tmp_path / "no socket").open("w"):
        before = open_files()
        for _ in range(3):
            assert not set_nodelay(1)
        assert open_files() == before
