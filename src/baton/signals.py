"""What SIGTERM and SIGINT do: the first asks to stop, the second does not wait for an answer."""

import asyncio
import os
import signal
from collections.abc import Callable


def stop_on_signals(last_act: Callable[[], None] | None = None) -> asyncio.Event:
    """Return an event that the first SIGTERM or SIGINT sets; a second one calls `last_act` and ends the process."""
    stop = asyncio.Event()

    def on_signal(number: int) -> None:
        if stop.is_set():
            if last_act is not None:
                last_act()
            os._exit(128 + number)
        stop.set()

    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, on_signal, number)
    return stop
