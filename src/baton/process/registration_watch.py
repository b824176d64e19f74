"""Watches the entry of a process in discovery, and restores it when discovery has lost it.

Discovery drops the entry of a process that was frozen for too long, or all entries when its data are lost, and does not
notify the processes. A fleet that loses its entries together must neither register nor restart together.
"""

import asyncio
import logging
import random
from collections.abc import Awaitable, Callable

from baton.errors import BatonError, EngineDead, PeerLost

log = logging.getLogger(__name__)

RESTORE_TRIES = 4
FIRST_PAUSE_S = 1.0
RESTORE_TIMEOUT_S = 10.0


class RegistrationWatch:
    """Checks every `interval_s`. When `checks` in a row find the entry lost, it is restored.

    If that fails `RESTORE_TRIES` times, after pauses that double, `retire` is called once with the reason: the process
    drains and restarts. Pauses vary at random by a half, from process to process.
    """

    def __init__(
        self,
        name: str,
        is_lost: Callable[[], bool],
        restore: Callable[[], Awaitable[None]],
        retire: Callable[[BatonError], None],
        *,
        interval_s: float,
        checks: int,
    ) -> None:
        self._name = name
        self._is_lost = is_lost
        self._restore = restore
        self._retire = retire
        self._interval_s = interval_s
        self._checks = checks

    async def run(self) -> None:
        """Watch until the entry cannot be restored."""
        while True:
            await self._wait_until_lost()
            if (problem := await self._restore_or_give_up()) is not None:
                break
        self._retire(
            EngineDead(f"discovery has lost this {self._name}, and it could not register again: {problem}; restarting")
        )

    async def _wait_until_lost(self) -> None:
        missed = 0
        while missed < self._checks:
            await asyncio.sleep(self._interval_s)
            missed = missed + 1 if self._is_lost() else 0

    async def _restore_or_give_up(self) -> str | None:
        """Return None when the entry is there again, or what prevents it."""
        problem = None
        for attempt in range(RESTORE_TRIES):
            await asyncio.sleep(min(self._interval_s, FIRST_PAUSE_S) * 2**attempt * random.uniform(0.5, 1.5))
            if not self._is_lost():
                return None
            problem = await self._try_restore()
            if problem is None:
                log.warning("discovery had lost this %s; it has registered again", self._name)
                return None
            log.warning("discovery has lost this %s: %s", self._name, problem)
        return problem

    async def _try_restore(self) -> str | None:
        try:
            async with asyncio.timeout(RESTORE_TIMEOUT_S):
                await self._restore()
        except TimeoutError:
            return f"no answer within {RESTORE_TIMEOUT_S:g} s"
        except PeerLost as error:
            return error.message
        return None
