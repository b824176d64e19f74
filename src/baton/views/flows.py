"""What has moved between two processes since the last look: requests that were passed on, and KV or media."""

from collections import Counter
from collections.abc import Iterator
from typing import NamedTuple

from baton.views.traces import Hop, Trace

RECENT_US = 10_000_000
CALLED_BY = {
    "router": ("frontend",),
    "process": ("frontend",),
    "encode": ("router", "process", "frontend"),
    "prefill": ("router", "process", "frontend"),
    "decode": ("router", "process", "frontend"),
}
CALLERS = ("router", "process", "frontend")
SOURCES = {"decode": ("prefill", "encode"), "prefill": ("encode",), "aggregated": ("encode", "prefill")}


class Flow(NamedTuple):
    """Something that moved; `kind` is "request" or the name of a transport."""

    source: str
    target: str
    kind: str


class Flows:
    """Counts flows between two updates of the browsers."""

    def __init__(self) -> None:
        self._counts: Counter[Flow] = Counter()
        self._bytes: Counter[Flow] = Counter()

    def add(self, trace: Trace, hop: Hop, before: Hop | None, now_us: int) -> None:
        """Count what a hop shows that was not known before. What happened long ago does not flow now."""
        if hop.started_us < now_us - RECENT_US and before is None:
            return
        if before is None and (source := caller_of(trace, hop)) is not None:
            self._counts[Flow(source, hop.process, "request")] += 1
        for transport, size in list(_moves(hop))[len(list(_moves(before))) if before is not None else 0 :]:
            if (source := sender_of(trace, hop)) is not None:
                flow = Flow(source, hop.process, transport)
                self._counts[flow] += 1
                self._bytes[flow] += size

    def take(self) -> list[list[object]]:
        """Return [source, target, kind, count, bytes] of all flows since the last call."""
        flows: list[list[object]] = [[*flow, count, self._bytes[flow]] for flow, count in self._counts.items()]
        self._counts.clear()
        self._bytes.clear()
        return flows


def caller_of(trace: Trace, hop: Hop) -> str | None:
    """Return the process that sent the request to this hop, by its span or else by its role."""
    others = [other for other in trace.hops if other.process != hop.process]
    parent = hop.report.parent_span_id
    for other in others:
        if parent and other.report.span_id == parent:
            return other.process
    return _of_role(others, CALLED_BY.get(hop.process_role, CALLERS))


def sender_of(trace: Trace, hop: Hop) -> str | None:
    """Return the process that this hop fetches KV or media from."""
    others = [other for other in trace.hops if other.process != hop.process]
    return _of_role(others, SOURCES.get(hop.process_role, ()))


def _of_role(hops: list[Hop], roles: tuple[str, ...]) -> str | None:
    for role in roles:
        found = [hop.process for hop in hops if hop.process_role == role]
        if found:
            return found[-1]
    return None


def _moves(hop: Hop) -> Iterator[tuple[str, int]]:
    for detail in hop.details("kv_moved"):
        size = detail.get("bytes")
        yield str(detail.get("transport", "kv")), size if isinstance(size, int) else 0
