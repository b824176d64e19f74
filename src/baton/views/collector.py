"""Asks every process what it is doing, as long as a browser watches, and publishes what has changed.

Processes are asked independently, so that one that does not reply delays nothing. With many processes each is asked
less often: the number of requests per second is bounded.
"""

import asyncio
import logging
import time
from collections.abc import Iterator
from contextlib import contextmanager

import msgspec

from baton.errors import BatonError
from baton.views.deployment import ProcessAddress, ProcessFinder
from baton.views.flows import Flows
from baton.views.process_client import ProcessClient, ProcessUnreachable
from baton.views.process_state import ProcessState
from baton.views.reports import TimelinePage, TimelineReport
from baton.views.series import Group, Series
from baton.views.subscribers import Subscribers
from baton.views.summaries import Summary, summarize
from baton.views.traces import LOST, UNKNOWN, Hop, Trace, TraceStore

log = logging.getLogger(__name__)

FIND_INTERVAL_S = 1.0
PUBLISH_INTERVAL_S = 0.25
POLL_INTERVAL_S = 0.4
MAX_POLLS_PER_S = 250.0
MAX_CONCURRENT_POLLS = 32
UNWATCHED_S = 20.0
GONE_SHOWN_S = 60.0
UNREACHABLE_FAILURES = 2
PAGE = 1000
HISTORY = 2000
SNAPSHOT_REQUESTS = 600
UPDATE_REQUESTS = 600

Json = dict[str, object]


class Collector:
    """The state of one deployment. Used in one event loop; `run` is a task of its owner."""

    def __init__(self, finder: ProcessFinder, client: ProcessClient) -> None:
        self._finder = finder
        self._client = client
        self._watchers = 0
        self._watched = asyncio.Event()
        self._polls = asyncio.Semaphore(MAX_CONCURRENT_POLLS)
        self._pollers: dict[str, asyncio.Task[None]] = {}
        self._flows = Flows()
        self._changed: dict[str, Trace] = {}
        self._removed: list[str] = []
        self._finding_problem: str | None = None
        self._has_looked = False
        self._has_published_look = False
        self.processes: dict[str, ProcessState] = {}
        self.traces = TraceStore()
        self.series = Series()
        self.subscribers = Subscribers()

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Within the block, somebody watches, so processes are asked."""
        self._watchers += 1
        self._watched.set()
        try:
            yield
        finally:
            self._watchers -= 1

    async def run(self) -> None:
        """Collect while somebody watches, until cancelled. An error that nothing handles is logged."""
        while True:
            await self._watched.wait()
            try:
                await self._collect()
            except ExceptionGroup:
                log.exception("the view could not read the processes, and tries again")
                self._finding_problem = "the view has failed, and tries again; its log has the error"
                await asyncio.sleep(FIND_INTERVAL_S)
            if not self._watchers:  # a browser may have come while the tasks ended
                self._watched.clear()

    async def _collect(self) -> None:
        """Find and ask processes, and publish changes, until nobody has watched for a while."""
        async with asyncio.TaskGroup() as tasks:
            finding = tasks.create_task(self._find_forever(tasks), name="find-processes")
            try:
                await self._publish_while_watched()
            finally:
                for task in (finding, *self._pollers.values()):
                    task.cancel()
                self._pollers.clear()

    async def _publish_while_watched(self) -> None:
        last_watched = time.monotonic()
        while time.monotonic() - last_watched < UNWATCHED_S:
            self._publish()
            await asyncio.sleep(PUBLISH_INTERVAL_S)
            if self._watchers:
                last_watched = time.monotonic()

    async def _find_forever(self, tasks: asyncio.TaskGroup) -> None:
        """Find processes. It may take seconds, as when one in discovery does not reply, and delays no update."""
        while True:
            await self._find(tasks)
            await asyncio.sleep(FIND_INTERVAL_S)

    async def _find(self, tasks: asyncio.TaskGroup) -> None:
        try:
            found = {address.name: address for address in await self._finder.find()}
            self._finding_problem = None
        except (OSError, BatonError) as error:
            self._finding_problem = f"processes cannot be found: {error}"
            self._has_looked = True
            return
        self._has_looked = True
        for address in found.values():
            self._adopt(address, tasks)
        now = time.monotonic()
        for name, state in list(self.processes.items()):
            if name not in found:
                self._miss(state, now)

    def _adopt(self, address: ProcessAddress, tasks: asyncio.TaskGroup) -> None:
        """Ask a process that was found, unless that is done already. A new address is that of a new process."""
        state = self.processes.get(address.name)
        if state is None or state.address != address or state.gone_at_s is not None:
            self._stop_polling(address.name)
            if state is not None:
                self._note(self.traces.lose(address.name))
            state = self.processes[address.name] = ProcessState(address)
        if address.name not in self._pollers:
            self._pollers[address.name] = tasks.create_task(self._poll_forever(state), name=f"poll-{address.name}")

    def _miss(self, state: ProcessState, now: float) -> None:
        """Show a process that was not found as gone for a while, then no more."""
        if state.gone_at_s is None:
            state.gone_at_s = now
            self._stop_polling(state.name)
            self._note(self.traces.lose(state.name))
        elif now - state.gone_at_s > GONE_SHOWN_S:
            del self.processes[state.name]
            self._removed.append(state.name)

    def _stop_polling(self, name: str) -> None:
        if (poller := self._pollers.pop(name, None)) is not None:
            poller.cancel()

    async def _poll_forever(self, state: ProcessState) -> None:
        while True:
            async with self._polls:
                await self._poll(state)
            await asyncio.sleep(max(POLL_INTERVAL_S, 2 * len(self.processes) / MAX_POLLS_PER_S))

    async def _poll(self, state: ProcessState) -> None:
        try:
            state.about = await self._client.about(state.address)
            await self._read_timelines(state)
            state.failures, state.problem = 0, None
        except ProcessUnreachable as problem:
            # One reply that is late, as on a busy machine, says nothing about the process.
            state.failures += 1
            if state.failures >= UNREACHABLE_FAILURES or state.about is None:
                state.problem = problem.message

    async def _read_timelines(self, state: ProcessState) -> None:
        """Read what has ended since the last time, and what runs. Of older requests, the first read takes a share."""
        if state.after is None:
            page = await self._client.timelines(state.address, 0, 0)
            state.after = max(0, page.next - max(4, HISTORY // max(1, len(self.processes))))
        ended = LOST
        while True:
            asked_us = time.time_ns() // 1000
            page = await self._client.timelines(state.address, state.after, PAGE)
            self._take(state, page, clock_difference_us(page.now_unix_us, asked_us, time.time_ns() // 1000))
            state.after = page.next
            if page.dropped:
                ended = UNKNOWN
            if sum(1 for each in page.timelines if each.state is not None) < PAGE:
                break
        # Those that ended may be on any of the pages, so only the last one says which are missing.
        running = {_key(state.name, report) for report in page.timelines if report.state is None}
        self._note(self.traces.lose(state.name, running, ended))

    def _take(self, state: ProcessState, page: TimelinePage, ahead_us: int) -> None:
        now_us = time.time_ns() // 1000
        for report in page.timelines:
            hop = Hop(
                process=state.name,
                process_role=state.role,
                started_us=report.started_unix_us - ahead_us,
                report=report,
            )
            self._put(state, hop, now_us)

    def _put(self, state: ProcessState, hop: Hop, now_us: int) -> None:
        trace, before = self.traces.put(hop)
        if before is not None and before.report == hop.report:
            return
        self._note([trace])
        self._flows.add(trace, hop, before, now_us)
        group = Group(state.role, state.pool)
        self._count_tokens(group, hop, before, now_us)
        if not hop.is_running and (before is None or before.is_running):
            self.series.add(group, hop)

    def _count_tokens(self, group: Group, hop: Hop, before: Hop | None, now_us: int) -> None:
        tokens = hop.report.completion_tokens - (before.report.completion_tokens if before is not None else 0)
        if tokens <= 0:
            return
        begin_us = hop.started_us + (hop.at("first_token") or 0)
        self.series.add_tokens(group, begin_us if before is None else before.end_us, min(hop.end_us, now_us), tokens)

    def _note(self, traces: list[Trace]) -> None:
        for trace in traces:
            self._changed[trace.id] = trace

    # What browsers get

    def snapshot(self) -> Json:
        """Return all processes and the latest requests."""
        latest = list(self.traces)[-SNAPSHOT_REQUESTS:]
        return {
            "now_us": time.time_ns() // 1000,
            "problem": self._finding_problem,
            "has_looked": self._has_looked,
            "processes": [state.to_json(self.traces.running(state.name)) for state in self.processes.values()],
            "requests": [summarize(trace) for trace in latest],
        }

    def _publish(self) -> None:
        """Send what has changed since the last time to all browsers."""
        processes = []
        for state in self.processes.values():
            shown = state.to_json(self.traces.running(state.name))
            if shown != state.sent:
                state.sent = shown
                processes.append(shown)
        removed, self._removed = self._removed, []
        requests = self._take_changed()
        flows = self._flows.take()
        is_first_look = self._has_looked and not self._has_published_look
        if processes or requests or removed or flows or self._finding_problem or is_first_look:
            self._has_published_look = self._has_looked
            update = {
                "now_us": time.time_ns() // 1000,
                "problem": self._finding_problem,
                "has_looked": self._has_looked,
                "processes": processes,
                "removed": removed,
                "requests": requests,
                "flows": flows,
            }
            self.subscribers.send("update", msgspec.json.encode(update))

    def _take_changed(self) -> list[Summary]:
        """Return requests that have changed, at most `UPDATE_REQUESTS`; the others follow with the next updates.

        Those that have ended come first: no process reports them again.
        """
        waiting = sorted(self._changed.values(), key=lambda trace: trace.is_running)
        later = waiting[UPDATE_REQUESTS:]
        self._changed = {trace.id: trace for trace in later if self.traces.get(trace.id) is trace}
        return [summarize(trace) for trace in waiting[:UPDATE_REQUESTS]]


def clock_difference_us(theirs_us: int, asked_us: int, answered_us: int) -> int:
    """Return how far the clock of a process is ahead of ours; 0 if it is within what the exchange took."""
    middle_us = (asked_us + answered_us) // 2
    return 0 if asked_us <= theirs_us <= answered_us else theirs_us - middle_us


def _key(process: str, report: TimelineReport) -> tuple[str, str, int]:
    return process, report.request_id, report.started_unix_us
