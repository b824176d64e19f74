"""One page of Prometheus text from several sources: whoever comes first with a name keeps it."""

import asyncio
import logging
import re
from collections.abc import Awaitable, Callable, Iterable

log = logging.getLogger(__name__)

_DECLARED = re.compile(r"# (?:HELP|TYPE) (\S+)")
_SAMPLE = re.compile(r"[a-zA-Z_:][a-zA-Z0-9_:]*")
_SUFFIXES = ("", "_bucket", "_sum", "_count", "_total", "_created", "_info")


def join(texts: Iterable[str]) -> str:
    """Return `texts` as one, without metrics that an earlier one has."""
    taken: set[str] = set()
    lines: list[str] = []
    for text in texts:
        mine: set[str] = set()
        family = ""
        for line in text.splitlines():
            family = _family(line, family)
            if family and family not in taken:
                mine.add(family)
                lines.append(line)
        taken |= mine
    return "".join(f"{line}\n" for line in lines)


def _family(line: str, current: str) -> str:
    """Return the name of the metric that `line` belongs to, if the line before belongs to `current`."""
    if declared := _DECLARED.match(line):
        return declared[1]
    sample = _SAMPLE.match(line)
    if sample is None or sample[0] in {current + suffix for suffix in _SUFFIXES}:
        return current
    return sample[0]


class TimedScrape:
    """Asks a source that may fail or hang: then it says nothing, and is not asked again before it has answered."""

    def __init__(self, name: str, ask: Callable[[], Awaitable[str]], limit_s: float) -> None:
        self._name = name
        self._ask = ask
        self._limit_s = limit_s
        self._asking: asyncio.Future[str] | None = None

    async def text(self) -> str:
        """Return what the source says, "" if it does not in time. Whoever asks meanwhile gets the same answer."""
        if self._asking is None or self._asking.done():
            self._asking = asyncio.ensure_future(self._ask())
            self._asking.add_done_callback(_look_at)
        try:
            return await asyncio.wait_for(asyncio.shield(self._asking), self._limit_s)
        except TimeoutError:
            log.warning("%s has not told its metrics within %g s", self._name, self._limit_s)
        except Exception as error:  # noqa: BLE001 - the other metrics are worth telling
            log.warning("%s cannot tell its metrics: %r", self._name, error)
        return ""

    def close(self) -> None:
        """Wait for no answer any more."""
        if self._asking is not None:
            self._asking.cancel()


def _look_at(asked: asyncio.Future[str]) -> None:
    """An answer that came too late for everybody may be an error."""
    if not asked.cancelled():
        asked.exception()
