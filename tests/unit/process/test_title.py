"""The title of a process in `ps`."""

import subprocess
import sys

import pytest

PROGRAM = """
import sys, pathlib
from baton.process.title import set_process_title
before = pathlib.Path("/proc/self/environ").read_bytes()
set_process_title("worker", "decode-1", sys.argv[1])
print(pathlib.Path("/proc/self/comm").read_text().strip())
print(pathlib.Path("/proc/self/cmdline").read_bytes().rstrip(b"\\0").decode())
print(pathlib.Path("/proc/self/environ").read_bytes() == before, sys.argv[1])
"""


@pytest.mark.process
@pytest.mark.parametrize("model", ["smollm2", "a/" + "long" * 100])
def test_title_replaces_the_command_line_and_nothing_else(model: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, model], capture_output=True, text=True, timeout=30, check=True
    )
    name, title, rest = done.stdout.splitlines()
    assert name == "baton:decode-1"
    assert title == f"baton worker decode-1 {model}"
    assert rest == f"True {model}"


@pytest.mark.process
def test_title_is_cut_to_the_room_that_there_is() -> None:
    program = PROGRAM.replace("sys.argv[1])\nprint", "'m' * 5000)\nprint").replace(", sys.argv[1])", ")")
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=30, check=True)
    _, title, rest = done.stdout.splitlines()
    assert title.startswith("baton worker decode-1 mmm")
    assert rest == "True"
