"""The first SIGTERM stops a process, a second one ends it at once, and a stop is bounded."""

import signal
import subprocess
import sys
import time

import pytest

pytestmark = pytest.mark.process

PROGRAM = """
import asyncio, time
from baton.process.signals import stop_on_signals

async def main():
    stop = stop_on_signals({arguments})
    print("ready", flush=True)
    await stop.wait()
    print("stopping", flush=True)
    {then}

asyncio.run(main())
"""


def run(arguments: str, then: str, signals: int = 1) -> tuple[int, str, str]:
    """Run a process that runs `then` when it is stopped; return its exit code and output."""
    program = PROGRAM.format(arguments=arguments, then=then)
    process = subprocess.Popen(
        [sys.executable, "-c", program], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        for _ in range(signals):
            process.send_signal(signal.SIGTERM)
            time.sleep(0.1)
        output, errors = process.communicate(timeout=30)
        return process.returncode, output, errors
    finally:
        process.kill()
        process.wait()


def test_the_first_signal_stops_the_process() -> None:
    assert run("", "pass") == (0, "stopping\n", "")


def test_the_second_signal_ends_the_process_after_its_last_act() -> None:
    act = "lambda: print('last', flush=True)"
    code, output, _ = run(act, "await asyncio.sleep(60)", signals=2)
    assert (code, output) == (128 + signal.SIGTERM, "stopping\nlast\n")


def test_a_blocked_process_writes_its_stacks_and_exits() -> None:
    code, _, errors = run("drain_timeout_s=0.2, stop_margin_s=0.3", "time.sleep(60)")
    assert code == 1
    assert "in main" in errors


def test_a_process_that_stops_in_time_exits_with_0() -> None:
    assert run("drain_timeout_s=5", "await asyncio.sleep(0.1)") == (0, "stopping\n", "")
