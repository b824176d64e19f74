"""Prometheus text of several sources: labels added, and joined into one page."""

import asyncio
import logging
import re
from collections.abc import Awaitable, Callable, Iterable, Mapping

log = logging.getLogger(__name__)

_DECLARED = re.compile(r"# (?:HELP|TYPE) (\S+)")
_SAMPLE = re.compile(r"[a-zA-Z_:][a-zA-Z0-9_:]*")
_LABELLED = re.compile(r'([a-zA-Z_:][\w:]*)(?:\{((?:[^"}]|"(?:\\.|[^"\\])*")*)\})?(\s.*)')
_LABEL = re.compile(r'([a-zA-Z_]\w*)="(?:\\.|[^"\\])*"')
_SUFFIXES = ("", "_bucket", "_sum", "_count", "_total", "_created", "_info")


def add_labels(text: str, labels: Mapping[str, str]) -> str:
    """Return `text` with `labels` on every sample. A label that a sample has already stays as it is."""
    escaped = {
        name: value.replace("\\", r"\\").replace("\n", r"\n").replace('"', r"\"") for name, value in labels.items()
    }
    return "".join(_add_labels_to(line, escaped) + "\n" for line in text.splitlines())


def _add_labels_to(line: str, labels: Mapping[str, str]) -> str:
    sample = None if line.startswith("#") else _LABELLED.fullmatch(line)
    if sample is None:
        return line
    name, given, rest = sample[1], (sample[2] or "").rstrip(", "), sample[3]
    taken = set(_LABEL.findall(given))
    added = [f'{label}="{value}"' for label, value in labels.items() if label not in taken]
    return f"{name}{{{','.join([given, *added] if given else added)}}}{rest}"


def join(texts: Iterable[str]) -> str:
    """Return `texts` as one, without metrics that an earlier text has."""
    taken: set[str] = set()
    lines: list[str] = []
    for text in texts:
        names: set[str] = set()
        family = ""
        for line in text.splitlines():
            family = _family(line, family)
            if family and family not in taken:
                names.add(family)
                lines.append(line)
        taken |= names
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
    """Scrapes a source that may fail or hang: its metrics are then missing, and no second scrape starts meanwhile."""

    def __init__(self, name: str, scrape: Callable[[], Awaitable[str]], timeout_s: float) -> None:
        self._name = name
        self._scrape = scrape
        self._timeout_s = timeout_s
        self._pending: asyncio.Future[str] | None = None

    async def text(self) -> str:
        """Return the source's metrics, "" if they are not there in time. Concurrent calls share one scrape."""
        if self._pending is None or self._pending.done():
            self._pending = asyncio.ensure_future(self._scrape())
            self._pending.add_done_callback(_retrieve)
        try:
            async with asyncio.timeout(self._timeout_s):
                return await asyncio.shield(self._pending)
        except TimeoutError:
            log.warning("%s has returned no metrics within %g s", self._name, self._timeout_s)
        except Exception as error:  # noqa: BLE001 - the other metrics are still shown
            log.warning("the metrics of %s failed: %r", self._name, error)
        return ""

    def close(self) -> None:
        """Cancel a scrape that runs."""
        if self._pending is not None:
            self._pending.cancel()


def _retrieve(scraped: asyncio.Future[str]) -> None:
    """Mark the error of a scrape that outlived its callers as retrieved."""
    if not scraped.cancelled():
        scraped.exception()
