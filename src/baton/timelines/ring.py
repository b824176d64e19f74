"""The timelines of one process: those of requests that run, and the last finished ones, bounded in number and bytes."""

from collections import deque
from collections.abc import Callable
from itertools import islice
from time import perf_counter_ns, time_ns

from baton.timelines.reports import ErrorReport, ProcessReport, TimelinesReply, report_timeline
from baton.timelines.timeline import (
    MAX_MESSAGE_CHARS,
    MAX_NAME_CHARS,
    NO_TIMES,
    UNRECORDED,
    Failure,
    Recorder,
    Timeline,
    TokenCounts,
)
from baton.timelines.trace_context import TraceContext

MAX_BYTES = 32 << 20
MAX_ERRORS = 20
MAX_PAGE = 1000


class TimelineRing:
    """Holds `max_requests` finished timelines; with 0, it records nothing but errors. Event-loop thread only.

    `on_finish` is called with each finished timeline, for exporters; `samples` says whether they export a new trace,
    which they do without it. `is_on` says whether requests are recorded.
    """

    def __init__(self, max_requests: int, role: str = "", max_bytes: int = MAX_BYTES) -> None:
        self._role = role
        self._max_requests = max_requests
        self._max_bytes = max_bytes
        self._running: dict[Timeline, None] = {}
        self._finished: deque[Timeline] = deque()
        self._bytes = 0
        self._sequence = 0
        self._errors: deque[ErrorReport] = deque(maxlen=MAX_ERRORS)
        self.on_finish: Callable[[Timeline], None] | None = None
        self.samples: Callable[[str], bool] | None = None
        self.is_on = max_requests > 0
        self._on_end = self._end  # a method is looked up once

    @property
    def running(self) -> int:
        """How many recorded requests run."""
        return len(self._running)

    @property
    def last_errors(self) -> list[ErrorReport]:
        """The errors of the last requests that failed, the oldest first."""
        return list(self._errors)

    def start(
        self, request_id: str, model: str, trace: TraceContext, client_id: str | None, counts: TokenCounts
    ) -> Recorder:
        """Return the recorder of a request that has arrived now. `counts` are read whenever somebody asks."""
        if not self.is_on:
            return UNRECORDED
        times = NO_TIMES[:]
        timeline = Timeline(
            request_id,
            self._role,
            model[:MAX_NAME_CHARS],
            trace,
            client_id if client_id is None else client_id[:MAX_NAME_CHARS],
            counts,
            self._on_end,
            perf_counter_ns(),
            time_ns(),
            times,
            times.append,
        )
        self._running[timeline] = None
        return timeline

    def note_error(self, request_id: str, failure: Failure) -> None:
        """Keep the error of a request that failed, for operators."""
        message = failure.message[:MAX_MESSAGE_CHARS]
        self._errors.append(
            ErrorReport(unix_us=time_ns() // 1000, code=failure.code, message=message, request_id=request_id)
        )

    def page(self, process: ProcessReport, after: int = 0, limit: int = MAX_PAGE) -> TimelinesReply:
        """Return the requests that run, and those that finished after number `after`; at most `limit` of each.

        The oldest come first. The next page begins after `next`.
        """
        if after > self._sequence:  # a number of the process that this one has replaced
            after = 0
        oldest = self._finished[0].sequence if self._finished else self._sequence + 1
        skipped = max(0, after + 1 - oldest)
        finished = list(islice(self._finished, skipped, skipped + limit))
        running = islice(self._running, limit)
        return TimelinesReply(
            process=process,
            now_unix_us=time_ns() // 1000,
            next=finished[-1].sequence if finished else self._sequence,
            dropped=max(0, oldest - 1 - after),
            timelines=[report_timeline(each) for each in (*finished, *running)],
        )

    def _end(self, timeline: Timeline) -> None:
        del self._running[timeline]
        self._sequence += 1
        timeline.sequence = self._sequence
        self._finished.append(timeline)
        self._bytes += timeline.size_bytes
        while len(self._finished) > self._max_requests or self._bytes > self._max_bytes:
            self._bytes -= self._finished.popleft().size_bytes
        if self.on_finish is not None:
            self.on_finish(timeline)
