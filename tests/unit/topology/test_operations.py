"""Workers of a running `baton serve` are scaled, drained and restarted; those that are ready stay."""

import asyncio
import os
import signal
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import msgspec
import pytest

from baton.config.directories import process_directory
from baton.config.settings import Settings
from baton.control.process_entries import ProcessEntry, published_entry, read_all_entries
from baton.testing import eventually, run_bounded
from baton.topology.control_messages import OperationError
from baton.topology.fleet import Fleet
from baton.topology.operations import Operations, serves_without, surplus

PROGRAM = """
import os, pathlib, signal, socket, sys, time

if (pathlib.Path(os.environ["FAULTS"]) / os.environ["SUPERVISED_PROCESS_NAME"].rpartition("/")[2]).exists():
    sys.exit("out of order")
signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
notifications = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
while True:
    notifications.sendto(b"READY=1", os.environ["NOTIFY_SOCKET"])
    time.sleep(0.1)
"""

Body = Callable[[Fleet, Operations, Path], Awaitable[None]]


@pytest.fixture
def serve(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[Body], None]:
    """Return a function that runs a body with two workers, and a directory: those named by a file in it cannot start.

    The processes run a program in place of `baton` that is ready at once.
    """
    package = tmp_path / "program" / "baton"
    package.mkdir(parents=True)
    (package / "__init__.py").touch()
    (package / "__main__.py").write_text(PROGRAM)
    faults = tmp_path / "faults"
    faults.mkdir()
    monkeypatch.setenv("PYTHONPATH", str(package.parent))
    monkeypatch.setenv("FAULTS", str(faults))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    settings = Settings(engine="echo", name="echo", workers=2, log_dir=str(tmp_path / "logs"), drain_timeout_s=5.0)

    def run(body: Body) -> None:
        async def main() -> None:
            async with _serving(settings, tmp_path) as fleet:
                await body(fleet, Operations(settings, fleet), faults)

        run_bounded(main(), 60)

    return run


@asynccontextmanager
async def _serving(settings: Settings, directory: Path) -> AsyncIterator[Fleet]:
    fleet, stop = Fleet(settings, directory), asyncio.Event()
    await fleet.start()
    try:
        await asyncio.gather(*(fleet.wait_ready(process) for process in fleet.processes()))
        keeping = asyncio.create_task(fleet.keep_until(stop))
        await eventually(lambda: fleet.is_kept)
        yield fleet
        stop.set()
        await keeping
    finally:
        await fleet.stop()


def ignore(_: str) -> None:
    """Take a line of progress."""


async def let_crash(fleet: Fleet, name: str, faults: Path) -> None:
    """Kill a worker, which cannot start again."""
    (faults / name).touch()
    fleet.workers[name].process.send_signal(signal.SIGKILL)
    await eventually(lambda: fleet.workers[name].process.state == "stopped")


@pytest.mark.process
def test_a_worker_that_does_not_start_again_after_a_drain_is_tried_again(serve: Callable[[Body], None]) -> None:
    async def body(fleet: Fleet, operations: Operations, faults: Path) -> None:
        (faults / "worker-0").touch()
        with pytest.raises(OperationError, match="out of order; `baton serve` tries again") as failed:
            await operations.drain("worker-0", True, ignore)
        assert failed.value.code == "start_failed"
        (faults / "worker-0").unlink()
        await eventually(lambda: fleet.workers["worker-0"].process.state == "ready")
        assert operations.status().counts == {"worker": 2}

    serve(body)


@pytest.mark.process
def test_the_only_worker_that_is_ready_is_not_drained(serve: Callable[[Body], None]) -> None:
    async def body(fleet: Fleet, operations: Operations, faults: Path) -> None:
        await let_crash(fleet, "worker-1", faults)
        with pytest.raises(OperationError, match="baton scale worker=3") as refused:
            await operations.drain("worker-0", False, ignore)
        assert refused.value.code == "last_worker"
        await operations.drain("worker-1", False, ignore)
        assert operations.status().counts == {"worker": 1}

    serve(body)


@pytest.mark.process
def test_fewer_workers_are_those_that_are_ready(serve: Callable[[Body], None]) -> None:
    async def body(fleet: Fleet, operations: Operations, faults: Path) -> None:
        await let_crash(fleet, "worker-0", faults)
        await operations.scale({"worker": 1}, ignore)
        assert list(fleet.workers) == ["worker-1"]
        assert fleet.workers["worker-1"].process.state == "ready"

    serve(body)


@pytest.mark.process
def test_a_worker_that_cannot_start_is_removed_and_the_others_stay(serve: Callable[[Body], None]) -> None:
    async def body(fleet: Fleet, operations: Operations, faults: Path) -> None:
        (faults / "worker-3").touch()
        with pytest.raises(OperationError, match="worker-3 did not start: out of order"):
            await operations.scale({"worker": 4}, ignore)
        assert operations.status().counts == {"worker": 3}

    serve(body)


@pytest.mark.process
def test_a_drained_worker_that_had_been_killed_before_is_no_target_of_metrics(serve: Callable[[Body], None]) -> None:
    async def body(_: Fleet, operations: Operations, __: Path) -> None:
        child = await asyncio.create_subprocess_exec("true")
        await child.wait()
        with published_entry(process_directory(), "8000/worker-0", "http://127.0.0.1:1"):
            killed = ProcessEntry(
                name="8000/worker-1", url="http://127.0.0.1:2", pid=child.pid, host=os.uname().nodename
            )
            (process_directory() / f"{child.pid}.json").write_bytes(msgspec.json.encode(killed))
            assert killed in read_all_entries(process_directory())
            await operations.drain("worker-1", False, ignore)
            assert [entry.name for entry in read_all_entries(process_directory())] == ["8000/worker-0"]

    serve(body)


def test_workers_that_are_not_ready_go_first_and_then_the_last() -> None:
    assert surplus({"a-0": True, "a-1": True, "a-2": True}, 1) == ["a-1", "a-2"]
    assert surplus({"a-0": False, "a-1": True, "a-2": True}, 2) == ["a-0"]
    assert surplus({"a-0": True, "a-1": True}, 2) == []


def test_a_worker_that_does_not_serve_is_not_the_last() -> None:
    assert not serves_without({"a-0": True}, "a-0")
    assert not serves_without({"a-0": False}, "a-0")
    assert not serves_without({"a-0": True, "a-1": False}, "a-0")
    assert serves_without({"a-0": True, "a-1": False}, "a-1")
    assert serves_without({"a-0": False, "a-1": False}, "a-1")
