"""SIGTERM asks to stop, a second one insists, and a process that cannot stop does not stay."""

import signal
import subprocess
import sys
import time

import pytest

pytestmark = pytest.mark.process

PROGRAM = """
import asyncio, time
import baton.process.signals

baton.process.signals.STOP_MARGIN_S = 0.3

async def main():
    stop = baton.process.signals.stop_on_signals({arguments})
    print("ready", flush=True)
    await stop.wait()
    print("stopping", flush=True)
    {then}

asyncio.run(main())
"""


def run(arguments: str, then: str, signals: int = 1) -> tuple[int, str, str]:
    """Run a process that stops as `then` says; return its exit code and what it wrote."""
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


def test_the_first_signal_asks() -> None:
    assert run("", "pass") == (0, "stopping\n", "")


def test_the_second_signal_insists_and_does_the_last_act_first() -> None:
    act = "lambda: print('last', flush=True)"
    code, output, _ = run(act, "await asyncio.sleep(60)", signals=2)
    assert (code, output) == (128 + signal.SIGTERM, "stopping\nlast\n")


def test_a_process_that_is_stuck_says_where_and_ends() -> None:
    code, _, errors = run("drain_timeout_s=0.2", "time.sleep(60)")
    assert code == 1
    assert "in main" in errors


def test_one_that_stops_in_time_ends_well() -> None:
    assert run("drain_timeout_s=5", "await asyncio.sleep(0.1)") == (0, "stopping\n", "")
