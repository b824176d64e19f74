"""Requests across processes: timelines of one trace belong together. Bounded; the oldest traces go first."""

from collections.abc import Iterator, Set
from zlib import crc32

import msgspec

from baton.views.reports import Detail, TimelineReport

MAX_TRACES = 2000
MAX_HOPS = 64
LOST = "lost"
UNKNOWN = "unknown"

HopKey = tuple[str, str, int]
NONE: Set[HopKey] = frozenset()


class Hop(msgspec.Struct, frozen=True, kw_only=True):
    """One request in one process. `started_us` is by the clock of this machine.

    `unreported` is how it ended if its process has not said so: "lost" if the process ended, "unknown" if it has
    replaced the timeline by those of later requests.
    """

    process: str
    process_role: str
    started_us: int
    report: TimelineReport
    unreported: str | None = None

    @property
    def key(self) -> HopKey:
        """What identifies the hop."""
        return self.process, self.report.request_id, self.report.started_unix_us

    @property
    def is_running(self) -> bool:
        """Whether the request has not ended there, as far as is known."""
        return self.report.state is None and self.unreported is None

    @property
    def state(self) -> str | None:
        """The terminal state, "lost" or "unknown" without a report of it; None while the request runs."""
        return self.report.state or self.unreported

    @property
    def end_us(self) -> int:
        """The end, or the last time at which the request was seen to run."""
        return self.started_us + (self.report.duration_us or 0)

    def at(self, phase: str) -> int | None:
        """Return the offset of the first event of `phase`, None if there is none."""
        return next((at for at, name, _ in self.report.events if name == phase), None)

    def details(self, phase: str) -> Iterator[Detail]:
        """Return the details of the events of `phase`."""
        return (detail for _, name, detail in self.report.events if name == phase)

    @property
    def phase(self) -> str:
        """The last phase that the request has reached."""
        return self.report.events[-1][1] if self.report.events else "received"


class Trace:
    """The hops of one request, in the order in which they began.

    `id` is the id of the trace. A client may send several requests in one trace: those after the first have longer ids.
    """

    def __init__(self, identity: str) -> None:
        self.id = identity
        self.client_id: str | None = None
        self._hops: dict[HopKey, Hop] = {}

    @property
    def hops(self) -> list[Hop]:
        """The hops, the outermost first: those of frontends, then by their start."""
        return sorted(self._hops.values(), key=lambda hop: (hop.process_role != "frontend", hop.started_us))

    @property
    def root(self) -> Hop:
        """The outermost hop."""
        return self.hops[0]

    @property
    def is_running(self) -> bool:
        """Whether one of the hops runs."""
        return any(hop.is_running for hop in self._hops.values())

    def hop(self, key: HopKey) -> Hop | None:
        """Return the hop with that key, if it is known."""
        return self._hops.get(key)

    def put(self, hop: Hop) -> bool:
        """Add or replace a hop; return False if there are too many."""
        if hop.key not in self._hops and len(self._hops) >= MAX_HOPS:
            return False
        self._hops[hop.key] = hop
        self.client_id = self.client_id or hop.report.client_id
        return True


class TraceStore:
    """The last `max_traces` traces, the oldest first."""

    def __init__(self, max_traces: int = MAX_TRACES) -> None:
        self._max_traces = max_traces
        self._traces: dict[str, Trace] = {}
        self._running: dict[str, dict[HopKey, str]] = {}  # by process: the trace of each hop that runs

    def __iter__(self) -> Iterator[Trace]:
        return iter(self._traces.values())

    def __len__(self) -> int:
        return len(self._traces)

    def get(self, trace_id: str) -> Trace | None:
        """Return the trace with that id."""
        return self._traces.get(trace_id)

    def put(self, hop: Hop) -> tuple[Trace, Hop | None]:
        """Add or replace a hop; return its trace, and what was there before."""
        trace_id = self._id_of(hop.report)
        trace = self._traces.get(trace_id)
        if trace is None:
            trace = self._traces[trace_id] = Trace(trace_id)
            self._forget_oldest()
        before = trace.hop(hop.key)
        if trace.put(hop):
            running = self._running.setdefault(hop.process, {})
            if hop.is_running:
                running[hop.key] = trace_id
            else:
                running.pop(hop.key, None)
        return trace, before

    def running(self, process: str) -> list[Hop]:
        """Return the hops that run in a process."""
        found = [(self._traces.get(trace_id), key) for key, trace_id in self._running.get(process, {}).items()]
        hops = [trace.hop(key) for trace, key in found if trace is not None]
        return [hop for hop in hops if hop is not None]

    def lose(self, process: str, still_running: Set[HopKey] = NONE, ended: str = LOST) -> list[Trace]:
        """Mark the hops of a process that its report no longer has as `ended`; return their traces."""
        traces = []
        for hop in self.running(process):
            if hop.key not in still_running:
                traces.append(self.put(msgspec.structs.replace(hop, unreported=ended))[0])
        known = self._running.pop(process, {})
        if still_running:
            self._running[process] = {key: known[key] for key in still_running if key in known}
        return traces

    def _id_of(self, report: TimelineReport) -> str:
        """Return the id of a request: of its trace, and for other requests of a client in one trace, of both."""
        identity = report.trace_id or report.client_id or report.request_id
        if not report.client_id:
            return identity
        longer = f"{identity}.{crc32(report.client_id.encode()):08x}"
        first = self._traces.get(identity)
        is_first = first is None or first.client_id in (None, report.client_id)
        return identity if is_first and longer not in self._traces else longer

    def _forget_oldest(self) -> None:
        while len(self._traces) > self._max_traces:
            del self._traces[next(iter(self._traces))]
