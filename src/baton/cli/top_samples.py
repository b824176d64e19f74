"""What `baton top` knows of each process: its last report, and its requests of the last seconds."""

import asyncio
import time
from collections import deque
from collections.abc import Sequence
from statistics import quantiles
from typing import Literal

import msgspec

from baton.views.deployment import ProcessAddress, ProcessFinder
from baton.views.process_client import ProcessClient, ProcessUnreachable
from baton.views.reports import About, RankLoad, TimelinePage, TimelineReport

WINDOW_S = 10.0
PAGE = 500
RECENT = 500
MAX_CONCURRENT = 32
FIRST_TOKEN = "first_token"


class Row(msgspec.Struct, frozen=True, kw_only=True):
    """One process as `baton top` shows it. Rates are over the last ten seconds; None where there is nothing to measure.

    `problem` says why the other fields are empty.
    """

    name: str
    url: str
    role: str = ""
    model: str = ""
    engine: str = ""
    state: str = "unreachable"
    in_flight: int = 0
    running: int = 0
    waiting: int = 0
    used_blocks: int = 0
    total_blocks: int = 0
    requests_per_s: float = 0.0
    tokens_per_s: float = 0.0
    failed: int = 0
    ttft_p50_ms: float | None = None
    ttft_p95_ms: float | None = None
    gap_p50_ms: float | None = None
    problem: str | None = None


class ProcessSampler:
    """Reads one process again and again."""

    def __init__(self, address: ProcessAddress) -> None:
        self.address = address
        self._after: int | None = None
        self._ended: deque[TimelineReport] = deque(maxlen=RECENT)

    async def sample(self, client: ProcessClient) -> Row:
        """Return the process as it is now."""
        try:
            about = await client.about(self.address)
            page = await self._read(client)
        except ProcessUnreachable as error:
            return Row(name=self.address.name, url=self.address.url, problem=error.message)
        self._ended.extend(each for each in page.timelines if each.state is not None)
        running = [each for each in page.timelines if each.state is None]
        return build_row(self.address, about, [*self._ended, *running], page.now_unix_us)

    async def _read(self, client: ProcessClient) -> TimelinePage:
        if self._after is None:
            self._after = max(0, (await client.timelines(self.address, 0, 0)).next - RECENT)
        page = await client.timelines(self.address, self._after, PAGE)
        self._after = page.next
        return page


class FleetSampler:
    """Reads all processes that a finder finds, at the same time."""

    def __init__(self, finder: ProcessFinder, client: ProcessClient) -> None:
        self._finder = finder
        self._client = client
        self._samplers: dict[str, ProcessSampler] = {}
        self._limit = asyncio.Semaphore(MAX_CONCURRENT)

    async def sample(self) -> list[Row]:
        """Return all processes by name. Raises OSError if they cannot be found."""
        found = await self._finder.find()
        known = self._samplers
        self._samplers = {
            address.name: sampler
            if (sampler := known.get(address.name)) is not None and sampler.address == address
            else ProcessSampler(address)
            for address in found
        }
        rows = await asyncio.gather(*(self._sample(each) for each in self._samplers.values()))
        return sorted(rows, key=lambda row: row.name)

    async def _sample(self, sampler: ProcessSampler) -> Row:
        async with self._limit:
            return await sampler.sample(self._client)


def build_row(address: ProcessAddress, about: About, requests: list[TimelineReport], now_us: int) -> Row:
    """Return a process with figures of `requests`, those that run and those that have ended. Pure."""
    since_us = now_us - int(WINDOW_S * 1e6)
    recent = [each for each in requests if _end_us(each, now_us) >= since_us]
    ended = [each for each in recent if each.state is not None]
    first_ms = _first_token_times_ms(recent, since_us)
    info = about.process
    return Row(
        name=address.name,
        url=address.url,
        role=info.role,
        model=info.model or "",
        engine=info.engine or "",
        state=about.health,
        in_flight=about.in_flight,
        requests_per_s=len(ended) / WINDOW_S,
        tokens_per_s=sum(_tokens_since(each, since_us, now_us) for each in recent) / WINDOW_S,
        failed=len([each for each in ended if each.error is not None]),
        ttft_p50_ms=_quantile(first_ms, 50),
        ttft_p95_ms=_quantile(first_ms, 95),
        gap_p50_ms=_quantile(_gaps_ms(recent), 50),
        running=_sum(about.load, "running"),
        waiting=_sum(about.load, "waiting"),
        used_blocks=_sum(about.load, "used_blocks"),
        total_blocks=_sum(about.load, "total_blocks"),
    )


def _sum(ranks: Sequence[RankLoad], field: Literal["running", "waiting", "used_blocks", "total_blocks"]) -> int:
    """Return a field of the load, for all ranks together."""
    return sum(getattr(rank, field) for rank in ranks)


def _first_token_times_ms(requests: Sequence[TimelineReport], since_us: int) -> list[float]:
    times = ((each.started_unix_us, _first_token_us(each)) for each in requests)
    return [at_us / 1000 for began_us, at_us in times if at_us is not None and began_us + at_us >= since_us]


def _gaps_ms(requests: Sequence[TimelineReport]) -> list[float]:
    return [gap / 1000 for each in requests for gap in each.output_gaps_us]


def _end_us(request: TimelineReport, now_us: int) -> int:
    return request.started_unix_us + request.duration_us if request.duration_us is not None else now_us


def _first_token_us(request: TimelineReport) -> int | None:
    return next((at for at, phase, _ in request.events if phase == FIRST_TOKEN), None)


def _tokens_since(request: TimelineReport, since_us: int, now_us: int) -> float:
    """Return the tokens of a request after `since_us`, as if they had come at equal distances."""
    begin_us = request.started_unix_us + (_first_token_us(request) or 0)
    end_us = min(_end_us(request, now_us), now_us)
    if end_us < since_us:
        return 0.0
    share = (end_us - max(begin_us, since_us)) / (end_us - begin_us) if end_us > begin_us else 1.0
    return request.completion_tokens * max(0.0, min(1.0, share))


def _quantile(values: list[float], percent: int) -> float | None:
    if len(values) < 2:
        return values[0] if values else None
    return quantiles(values, n=100, method="inclusive")[percent - 1]


def now_unix_s() -> float:
    """Return the time for the output of programs."""
    return round(time.time(), 3)
