"""What a process logs, and what it does when nothing can be written."""

import subprocess
import sys

import pytest

PROGRAM = """
import logging, sys, time
from baton.process.logs import start_logging

start_logging("info")
log = logging.getLogger("one")
{body}
print("still here", flush=True)
"""


def run(body: str, stderr: int | None = None) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", PROGRAM.format(body=body)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE if stderr is None else stderr,
        text=True,
        timeout=30,
        check=False,
    )


@pytest.mark.process
def test_a_process_whose_log_is_on_a_full_disk_goes_on() -> None:
    with open("/dev/full", "wb") as full:
        done = run("for number in range(3): log.warning('%d', number)", full.fileno())
    assert "still here" in done.stdout


@pytest.mark.process
def test_lines_are_written_in_order_however_many_there_are() -> None:
    done = run("for number in range(2000): log.info('number %d', number)")
    assert [int(line.rsplit(" ", 1)[1]) for line in done.stderr.splitlines()] == list(range(2000))


@pytest.mark.process
@pytest.mark.parametrize("log_format", ["text", "json"])
def test_a_call_with_wrong_arguments_does_not_fail_its_caller(log_format: str) -> None:
    body = f"start_logging('info', '{log_format}'); log.info('%d requests', 'many'); log.info('goes on')"
    done = run(body)
    assert "still here" in done.stdout
    assert "goes on" in done.stderr
