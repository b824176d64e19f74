"""SIGTERM and SIGINT: the first stops the process gracefully, the second ends it at once."""

import asyncio
import faulthandler
import os
import signal
from collections.abc import Callable

STOP_MARGIN_S = 12.0
"""How long a process may take to stop beyond its drain."""


def stop_on_signals(
    last_act: Callable[[], None] | None = None,
    drain_timeout_s: float | None = None,
    stop_margin_s: float = STOP_MARGIN_S,
) -> asyncio.Event:
    """Return an event that the first SIGTERM or SIGINT sets; a second one calls `last_act` and ends the process.

    With `drain_timeout_s` a stop is bounded: a process that still runs `stop_margin_s` after it writes the stacks of
    its threads and exits, even if the event loop is blocked or the interpreter waits for a thread of the runtime.
    """
    stop = asyncio.Event()

    def on_signal(number: int) -> None:
        if stop.is_set():
            if last_act is not None:
                last_act()
            os._exit(128 + number)
        if drain_timeout_s is not None:
            faulthandler.dump_traceback_later(drain_timeout_s + stop_margin_s, exit=True)
        stop.set()

    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, on_signal, number)
    return stop
