"""The canary: a small request of the worker's own role, sent through its own handler when nobody else has sent one."""

import asyncio
import logging
from collections.abc import Awaitable, Callable

from baton.errors import BatonError, EngineStalled

log = logging.getLogger(__name__)

Probe = Callable[[], Awaitable[None]]


async def try_probe(probe: Probe, timeout_s: float) -> str | None:
    """Run `probe` once; return what is wrong, or None if it answered in time."""
    try:
        await asyncio.wait_for(probe(), timeout_s)
    except TimeoutError:
        return f"no answer within {timeout_s:g} s"
    except BatonError as error:
        return f"{error.code}: {error.message}"
    return None


class Canary:
    """Probes an idle worker; tells when it stops answering and when it answers again, and gives up on it in the end."""

    def __init__(
        self,
        probe: Probe,
        busy: Callable[[], bool],
        on_change: Callable[[bool, str], Awaitable[None]],
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
        self._excused = suspended
        self.healthy = True

    async def run(self) -> None:
        """Probe until no probe has been answered for `give_up_s`, then raise EngineStalled.

        A busy worker is left to the watchdog: its own requests are the probe. One that is excused, before a probe or
        during it, need not answer.
        """
        clock = asyncio.get_running_loop().time
        failing_since: float | None = None
        while True:
            await asyncio.sleep(self._interval_s)
            if self._excused():
                failing_since = None
                continue
            if self._busy() and self.healthy:
                continue
            started = clock()
            problem = await try_probe(self._probe, self._timeout_s)
            if problem is not None and self._excused():
                continue
            if problem is None:
                failing_since = None
            elif failing_since is None:
                failing_since = started
            elif clock() - failing_since >= self._give_up_s:
                raise EngineStalled(f"no probe was answered for {clock() - failing_since:.0f} s; the last: {problem}")
            if (problem is None) != self.healthy:
                self.healthy = problem is None
                log.log(logging.INFO if self.healthy else logging.ERROR, "canary: %s", problem or "answers again")
                await self._on_change(self.healthy, problem or "")
