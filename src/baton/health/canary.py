"""The canary: a small request of the worker's own role, sent through its own handler while no client sends one."""

import asyncio
import logging
from collections.abc import Awaitable, Callable

from baton.errors import BatonError, EngineStalled

log = logging.getLogger(__name__)

Probe = Callable[[], Awaitable[None]]


async def try_probe(probe: Probe, timeout_s: float) -> str | None:
    """Run `probe` once; return what is wrong, or None if it was answered in time."""
    try:
        async with asyncio.timeout(timeout_s):
            await probe()
    except TimeoutError:
        return f"no answer within {timeout_s:g} s"
    except BatonError as error:
        return f"{error.code}: {error.message}"
    return None


class Canary:
    """Probes an idle worker and calls `on_change` with whether it is healthy, each time that changes."""

    def __init__(
        self,
        probe: Probe,
        busy: Callable[[], bool],
        on_change: Callable[[bool], Awaitable[None]],
        interval_s: float,
        timeout_s: float,
        give_up_s: float,
        suspended: Callable[[], bool] = lambda: False,
    ) -> None:
        self._probe = probe
        self._busy = busy
        self._on_change = on_change
        self._interval_s = interval_s
        self._timeout_s = timeout_s
        self._give_up_s = give_up_s
        self._suspended = suspended
        self._failing_since: float | None = None
        self.healthy = True

    async def run(self) -> None:
        """Probe until no probe has been answered for `give_up_s`, then raise EngineStalled.

        A busy worker is left to the watchdog: its requests are the probe. While the engine is suspended, before a
        probe or during it, a probe may fail.
        """
        while True:
            await asyncio.sleep(self._interval_s)
            if self._suspended():
                self._failing_since = None
            elif not self._busy() or not self.healthy:
                await self._check()

    async def _check(self) -> None:
        started = asyncio.get_running_loop().time()
        problem = await try_probe(self._probe, self._timeout_s)
        if problem is not None and self._suspended():
            return
        self._give_up_after_failures(problem, started)
        if (problem is None) != self.healthy:
            self.healthy = problem is None
            log.log(logging.INFO if self.healthy else logging.ERROR, "canary: %s", problem or "healthy again")
            await self._on_change(self.healthy)

    def _give_up_after_failures(self, problem: str | None, started: float) -> None:
        """Raise EngineStalled if probes have failed for `give_up_s`."""
        if problem is None:
            self._failing_since = None
        elif self._failing_since is None:
            self._failing_since = started
        elif (failing_s := asyncio.get_running_loop().time() - self._failing_since) >= self._give_up_s:
            raise EngineStalled(f"no probe was answered for {failing_s:.0f} s; the last: {problem}")
