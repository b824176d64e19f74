"""Looking at the engine from threads of our own: its calls block, and none may end what looks at it."""

import asyncio
import logging
import threading
import time
from collections.abc import Callable
from contextlib import suppress

log = logging.getLogger(__name__)

FIRST_WAIT_S = 0.1
LONGEST_WAIT_S = 5.0

Item = dict[str, object]


class Poll:
    """Asks again and again, from `start` to `stop`, and hands what comes to the event loop.

    An error costs one answer: the next try waits longer, up to `LONGEST_WAIT_S`, and a row of errors is logged once.
    """

    def __init__(
        self,
        name: str,
        ask: Callable[[float], list[Item]],
        tell: Callable[[list[Item]], None],
        pace_s: float,
    ) -> None:
        self._name = name
        self._ask = ask
        self._tell = tell
        self._pace_s = pace_s
        self._over = threading.Event()
        self._loop = asyncio.get_running_loop()
        # A daemon: a call that never returns must not keep the process from ending.
        self._thread = threading.Thread(target=self._run, name=f"trtllm-{name}", daemon=True)
        self.errors = 0

    def start(self) -> None:
        """Begin to ask."""
        self._thread.start()

    def stop(self) -> None:
        """Ask no more; a call that is under way is let be, and what it returns is dropped."""
        self._over.set()

    def _run(self) -> None:
        row = 0
        while not self._over.is_set():
            began = time.monotonic()
            try:
                items = self._ask(self._pace_s)
            except Exception as error:  # noqa: BLE001 - whatever it is, the next try may go well
                self.errors += 1
                if row == 0:
                    log.warning("%s cannot be read: %r; trying again", self._name, error)
                row += 1
                self._over.wait(min(LONGEST_WAIT_S, FIRST_WAIT_S * 2 ** min(row, 10)))
                continue
            if row:
                log.info("%s can be read again, after %d errors", self._name, row)
                row = 0
            if items and not self._over.is_set():
                with suppress(RuntimeError):  # the loop has closed: nobody listens
                    self._loop.call_soon_threadsafe(self._tell, items)
            self._over.wait(max(0.0, self._pace_s - (time.monotonic() - began)))
