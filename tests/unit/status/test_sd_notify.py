"""sd_notify: messages, heartbeats, and the exit of the supervisor."""

import asyncio
import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from baton.status.sd_notify import notify, send_heartbeats
from baton.testing import run_bounded


@pytest.fixture
def supervisor(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[socket.socket]:
    """The other end of the notification socket."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sock:
        path = tmp_path / "n.sock"
        sock.bind(str(path))
        sock.settimeout(10)
        monkeypatch.setenv("NOTIFY_SOCKET", str(path))
        yield sock


def never() -> None:
    raise AssertionError("the supervisor has not exited")


def test_message_is_sent_to_the_supervisor(supervisor: socket.socket) -> None:
    notify("READY=1\nSTATUS=health on 127.0.0.1:1")
    assert supervisor.recv(4096) == b"READY=1\nSTATUS=health on 127.0.0.1:1"


def test_message_is_sent_to_an_abstract_socket(monkeypatch: pytest.MonkeyPatch) -> None:
    name = f"baton-test-{os.getpid()}"
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sock:
        sock.bind("\0" + name)
        sock.settimeout(10)
        monkeypatch.setenv("NOTIFY_SOCKET", "@" + name)
        notify("READY=1")
        assert sock.recv(4096) == b"READY=1"


@pytest.mark.parametrize("address", [None, "", "no/such/socket", "/" + "x" * 300])
def test_message_without_a_listening_supervisor_is_dropped(
    address: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("NOTIFY_SOCKET", raising=False)
    if address is not None:
        monkeypatch.setenv("NOTIFY_SOCKET", address)
    notify("READY=1")


def test_supervisor_that_does_not_read_does_not_block(supervisor: socket.socket) -> None:
    for _ in range(10_000):
        notify("STATUS=" + "x" * 1000)


def test_heartbeats_follow_the_interval_of_the_supervisor(
    supervisor: socket.socket, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WATCHDOG_USEC", "20000")

    async def body() -> None:
        heartbeats = asyncio.create_task(send_heartbeats(never))
        for _ in range(5):
            assert await asyncio.to_thread(supervisor.recv, 4096) == b"WATCHDOG=1"
        heartbeats.cancel()

    run_bounded(body())


@pytest.mark.parametrize("missing", ["NOTIFY_SOCKET", "WATCHDOG_USEC"])
def test_no_heartbeats_without_a_watchdog(
    missing: str, supervisor: socket.socket, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WATCHDOG_USEC", "20000")
    monkeypatch.delenv(missing)
    run_bounded(send_heartbeats(never))


CHILD = """
import asyncio
from baton.status.sd_notify import notify, send_heartbeats
asyncio.run(send_heartbeats(lambda: notify("STATUS=orphaned")))
"""

PARENT = f"""
import subprocess, sys, time
subprocess.Popen([sys.executable, "-c", {CHILD!r}])
time.sleep(1.0)
"""


@pytest.mark.process
def test_exit_of_the_supervisor_is_noticed(supervisor: socket.socket, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WATCHDOG_USEC", "40000")
    with subprocess.Popen([sys.executable, "-c", PARENT]):
        while (message := supervisor.recv(4096)) != b"STATUS=orphaned":
            assert message == b"WATCHDOG=1"


LATE_CHILD = """
import asyncio, os, time
from baton.status.sd_notify import notify, send_heartbeats
parent = int(os.environ["SUPERVISOR_PID"])
print("imported", flush=True)
while os.getppid() == parent:
    time.sleep(0.01)
asyncio.run(send_heartbeats(lambda: notify("STATUS=orphaned")))
"""

EARLY_PARENT = f"""
import os, subprocess, sys
environment = {{**os.environ, "SUPERVISOR_PID": str(os.getpid())}}
child = subprocess.Popen([sys.executable, "-c", {LATE_CHILD!r}], env=environment, stdout=subprocess.PIPE)
child.stdout.readline()
"""


@pytest.mark.process
def test_exit_of_the_supervisor_before_the_first_heartbeat_is_noticed(
    supervisor: socket.socket, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WATCHDOG_USEC", "40000")
    with subprocess.Popen([sys.executable, "-c", EARLY_PARENT]):
        while (message := supervisor.recv(4096)) != b"STATUS=orphaned":
            assert message == b"WATCHDOG=1"
