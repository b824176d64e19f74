"""The stop of `baton serve` on the terminal: what it waits for, and how to end it at once."""

import asyncio
import signal
from collections.abc import Callable, Sequence

from baton.topology.process import Process

POLL_INTERVAL_S = 0.1


def stop_on_hangup(stop: asyncio.Event) -> None:
    """Set `stop` when the terminal is closed (SIGHUP), unless the signal is ignored, as under nohup."""
    if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:
        asyncio.get_running_loop().add_signal_handler(signal.SIGHUP, stop.set)


async def report_stop(processes: Sequence[Process], drain_timeout_s: float, say: Callable[[str], None]) -> None:
    """Say that `processes` stop and, as they report it, how many requests they wait for. Runs until cancelled."""
    running = [process for process in processes if process.pid is not None]
    if not running:
        return
    say(f"Stopping {_count(len(running), 'process', 'processes')}. Press Ctrl-C again to end at once.")
    said = ""
    while True:
        text = _about_requests(running)
        if text not in ("", said):
            say(f"Waiting up to {drain_timeout_s:g} s for {text}.")
            said = text
        await asyncio.sleep(POLL_INTERVAL_S)


def _about_requests(processes: Sequence[Process]) -> str:
    by_name = {each.name: each.running_requests for each in processes if each.pid and each.running_requests}
    if not by_name:
        return ""
    where = ", ".join(f"{name}: {number}" for name, number in by_name.items())
    return f"{_count(sum(by_name.values()), 'running request', 'running requests')} ({where})"


def _count(number: int, noun: str, plural: str) -> str:
    return f"1 {noun}" if number == 1 else f"{number} {plural}"
