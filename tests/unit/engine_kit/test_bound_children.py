"""A process that still imports does not outlive its parent, and Python's resource tracker does."""

import multiprocessing
import multiprocessing.connection
import multiprocessing.spawn
import os
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from baton.engine_kit.bound_children import children_bound_to_this_thread

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="asks the Linux kernel")
WAIT_S = 30.0


def wait_for(file: Path) -> int:
    """Return the number in a file that another process writes."""
    deadline = time.monotonic() + WAIT_S
    while not (file.exists() and file.read_text()):
        assert time.monotonic() < deadline
        time.sleep(0.02)
    return int(file.read_text())


@pytest.mark.process
def test_a_child_that_still_imports_dies_with_its_parent(tmp_path: Path) -> None:
    started = tmp_path / "started"
    parent = subprocess.Popen(
        [sys.executable, str(Path(__file__).with_name("slow_parent.py")), str(tmp_path)],
        env=os.environ | {"STARTED": str(started)},
    )
    try:
        child = psutil.Process(wait_for(started))
    finally:
        parent.kill()
        parent.wait()
    assert psutil.wait_procs([child], timeout=WAIT_S)[1] == []


def answer(pipe: "multiprocessing.connection.Connection[object, object]") -> None:
    """Send what a process has got from its parent."""
    pipe.send(sys.executable)


@pytest.mark.process
def test_processes_start_and_answer_as_without_it(tmp_path: Path) -> None:
    before = multiprocessing.spawn.get_executable()
    context = multiprocessing.get_context("spawn")
    receiver, sender = context.Pipe(duplex=False)
    with children_bound_to_this_thread(tmp_path):
        process = context.Process(target=answer, args=(sender,))
        process.start()
    assert receiver.poll(WAIT_S)
    assert receiver.recv() == sys.executable
    process.join(WAIT_S)
    assert process.exitcode == 0
    assert multiprocessing.spawn.get_executable() == before
