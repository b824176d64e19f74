"""The control socket of a supervisor: typed replies, its own user only, and requests that make no sense."""

import asyncio
import json
import os
import stat
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from baton.config.settings import Settings
from baton.errors import ConfigError
from baton.testing import run_bounded
from baton.topology.control_client import read_status
from baton.topology.control_messages import OperationError
from baton.topology.control_socket import ControlSocket
from baton.topology.fleet import Fleet
from baton.topology.operations import Operations


def mode_of(path: Path) -> int:
    """Return the permissions of a file."""
    return stat.S_IMODE(path.stat().st_mode)


def let_others_reach(path: Path, mode: int) -> None:
    """Give the socket those permissions, and its directories the permission to pass."""
    path.chmod(mode)
    for parent in path.parents:
        if parent not in (Path("/"), Path("/tmp")) and parent.stat().st_uid == os.geteuid():
            parent.chmod(mode_of(parent) | 0o011)


async def exchange(path: Path, data: bytes) -> list[dict[str, Any]]:
    """Send `data` and return the replies."""
    reader, writer = await asyncio.open_unix_connection(str(path))
    writer.write(data)
    writer.write_eof()
    lines = (await reader.read()).splitlines()
    writer.close()
    return [json.loads(line) for line in lines]


def with_socket(directory: Path, body: Any, **changes: Any) -> None:
    """Run `body` with the path of a socket of a `baton serve` that has not started its processes."""

    async def run() -> None:
        given = {"engine": "echo", "name": "echo", "prefill": 1, "decode": 2, "api_key": "k", **changes}
        settings = Settings(log_dir=str(directory / "logs"), **given)
        fleet = Fleet(settings, directory)
        control = ControlSocket(directory / "control.sock", Operations(settings, fleet))
        await control.start()
        try:
            await body(directory / "control.sock", control.url)
        finally:
            await control.aclose()
            await fleet.stop()
        assert not (directory / "control.sock").exists()

    run_bounded(run(), 30)


def test_status_has_processes_counts_and_a_key(tmp_path: Path) -> None:
    async def body(path: Path, url: str) -> None:
        status = await asyncio.to_thread(read_status, url)
        assert status.counts == {"prefill": 1, "decode": 2}
        assert [each.name for each in status.processes] == ["frontend", "prefill-0", "decode-0", "decode-1"]
        assert {each.state for each in status.processes} == {"stopped"}
        assert (status.url, status.models, status.api_key) == ("http://127.0.0.1:8000", ("echo",), "k")
        assert Path(status.processes[1].log).name == "127.0.0.1-8000-prefill-0.log"
        assert mode_of(path) == 0o600

    with_socket(tmp_path, body)


@pytest.mark.parametrize(
    ("request_line", "code"),
    [
        (b"", "invalid_request"),
        (b"{}\n", "invalid_request"),
        (b"\xff\xfe\n", "invalid_request"),
        (b'{"command": "format_disk"}\n', "invalid_request"),
        (b'{"command": "scale", "counts": {"decode": "many"}}\n', "invalid_request"),
        (b"x" * 200_000, "invalid_request"),
        (b'{"command": "scale", "counts": {"decode": 3}}\n', "not_serving"),
        (b'{"command": "drain", "worker": "decode-0"}\n', "not_serving"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_bad_requests_get_a_typed_error(tmp_path: Path, request_line: bytes, code: str) -> None:
    async def body(path: Path, _: str) -> None:
        (reply,) = await exchange(path, request_line)
        assert (reply["kind"], reply["code"]) == ("failed", code)
        assert reply["message"]

    with_socket(tmp_path, body)


def test_a_command_that_fails_has_a_last_reply_too(tmp_path: Path) -> None:
    async def body(path: Path, _: str) -> None:
        (reply,) = await exchange(path, b'{"command": "status"}\n')
        assert (reply["kind"], reply["code"]) == ("failed", "internal")
        assert "keys.txt" in reply["message"]

    with_socket(tmp_path, body, api_key="", api_key_file=str(tmp_path / "keys.txt"))


def test_a_socket_that_is_gone_is_an_error_of_the_client(tmp_path: Path) -> None:
    with pytest.raises(OperationError, match="cannot reach"):
        read_status(f"unix:{tmp_path / 'none.sock'}")


def test_a_path_that_is_too_long_is_refused(tmp_path: Path) -> None:
    async def body() -> None:
        settings = Settings(log_dir=str(tmp_path))
        control = ControlSocket(tmp_path / ("d" * 200), Operations(settings, None))  # type: ignore[arg-type]
        with pytest.raises(ConfigError, match="TMPDIR"):
            await control.start()

    run_bounded(body())


CONNECT_AS_ANOTHER = """
import os, socket, sys
os.setgid(65534); os.setuid(65534)
sock = socket.socket(socket.AF_UNIX)
try:
    sock.connect(sys.argv[1])
    sock.sendall(b'{"command": "status"}\\n')
    print(sock.makefile().readline())
except PermissionError:
    print("no permission")
"""


@pytest.mark.process
@pytest.mark.skipif(os.geteuid() != 0, reason="only root can be another user")
@pytest.mark.parametrize(("mode", "answer"), [(0o600, "no permission"), (0o666, '"code":"forbidden"')])
def test_another_user_is_refused(tmp_path: Path, mode: int, answer: str) -> None:
    async def body(path: Path, _: str) -> None:
        let_others_reach(path, mode)
        command = [sys.executable, "-c", CONNECT_AS_ANOTHER, str(path)]
        done = await asyncio.to_thread(subprocess.run, command, capture_output=True, text=True, timeout=20)
        assert answer in done.stdout, done.stderr

    with_socket(tmp_path, body)
