"""A supervised process is tracked from the moment that it exists, and ends with what it has started."""

import asyncio
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest

from baton.errors import ConfigError
from baton.testing import eventually, run_bounded
from baton.topology.log_file import LogFile, ProcessOutput
from baton.topology.process import Process
from baton.topology.supervision import keep_running


def output_in(directory: Path) -> ProcessOutput:
    return ProcessOutput("one", LogFile(directory / "one.log", 1 << 20))


@pytest.mark.process
def test_cancelled_start_keeps_track_of_the_process(tmp_path: Path) -> None:
    async def body() -> None:
        process = Process("one", "--version", {}, tmp_path / "one.sock", output_in(tmp_path))
        try:
            for turns in range(6):
                starting = asyncio.create_task(process.start(10))
                for _ in range(turns + 1):
                    await asyncio.sleep(0)
                starting.cancel()
                await asyncio.gather(starting, return_exceptions=True)
                assert await process.wait() == 0, "the process is tracked and can be awaited"
        finally:
            process.close()

    run_bounded(body(), 60)


@pytest.mark.process
def test_a_process_that_cannot_be_started_is_tried_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async def body() -> None:
        process = Process("one", "--version", {}, tmp_path / "one.sock", output_in(tmp_path))
        await process.start(10)
        # The operating system refuses to start a program with a variable that is longer than 128 KiB.
        monkeypatch.setenv("MUCH", "x" * 200_000)
        keeping = asyncio.create_task(keep_running(process, 10, 10))
        try:
            await eventually(lambda: "cannot start one: " in caplog.text)
            monkeypatch.delenv("MUCH")
            await eventually(lambda: process.pid is not None)
        finally:
            keeping.cancel()
            await asyncio.wait([keeping])
            process.send_signal(signal.SIGKILL)
            await process.wait()
            process.close()

    run_bounded(body(), 60)


PROGRAM = """
import subprocess, sys, time
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
print(child.pid, flush=True)
if sys.argv[1:] != ["exit"]:
    time.sleep(600)
"""


@contextmanager
def process_with_a_child(tmp_path: Path, command: str) -> Iterator[Process]:
    """A supervised process whose program, in place of `baton`, starts a process of its own, as engines do."""
    package = tmp_path / "program" / "baton"
    package.mkdir(parents=True)
    (package / "__init__.py").touch()
    (package / "__main__.py").write_text(PROGRAM)
    process = Process(
        "one",
        command,
        {"PYTHONPATH": str(package.parent)},
        tmp_path / "one.sock",
        output_in(tmp_path),
    )
    try:
        yield process
    finally:
        process.close()


def child_is_alive(process: Process) -> bool:
    """Whether the process runs that the supervised process has started; its id is the last line of the log."""
    try:
        return psutil.Process(int(process.exit_reason())).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


@pytest.mark.process
def test_kill_ends_the_processes_that_a_process_has_started(tmp_path: Path) -> None:
    async def body() -> None:
        with process_with_a_child(tmp_path, "stay") as process:
            await process.start(10)
            await eventually(lambda: process.exit_reason().isdigit() and child_is_alive(process))
            process.send_signal(signal.SIGKILL)
            assert await process.wait() == -signal.SIGKILL
            await eventually(lambda: not child_is_alive(process))

    run_bounded(body(), 60)


@pytest.mark.process
def test_processes_left_by_one_that_exits_are_ended(tmp_path: Path) -> None:
    async def body() -> None:
        with process_with_a_child(tmp_path, "exit") as process:
            await process.start(10)
            assert await process.wait() == 0
            await eventually(lambda: not child_is_alive(process))

    run_bounded(body(), 60)


def test_a_path_that_is_too_long_for_a_socket_is_a_config_error(tmp_path: Path) -> None:
    directory = tmp_path / ("x" * 120)
    directory.mkdir()

    async def body() -> None:
        with pytest.raises(ConfigError, match="TMPDIR"):
            Process("one", "--version", {}, directory / "one.sock", output_in(tmp_path))

    run_bounded(body())
