"""W3C trace context: the trace of a request, and the span of this process in it."""

import random
import re
from collections.abc import Callable, Mapping

import msgspec

TRACEPARENT = "traceparent"
SAMPLED = 1

# Version ff is forbidden, and ids are not all zeros.
_PATTERN = re.compile(r"(?!ff)[0-9a-f]{2}-(?!0{32})([0-9a-f]{32})-(?!0{16})([0-9a-f]{16})-([0-9a-f]{2})(-.*)?")
_random = random.Random()  # seeded by the system; ids need to be unique, not secret


class ParentSpan(msgspec.Struct, frozen=True, gc=False):
    """What a valid `traceparent` header names."""

    trace_id: str
    span_id: str
    flags: int


class TraceContext(msgspec.Struct, frozen=True, gc=False):
    """The span of one request in this process. `parent_span_id` is None for the root of a trace."""

    trace_id: str
    span_id: str
    parent_span_id: str | None
    flags: int

    @property
    def traceparent(self) -> str:
        """The header for the next process, whose parent is this span."""
        flags = "01" if self.flags == SAMPLED else f"{self.flags:02x}"
        return f"00-{self.trace_id}-{self.span_id}-{flags}"

    @property
    def is_sampled(self) -> bool:
        """Whether the spans of the trace are exported."""
        return bool(self.flags & SAMPLED)


def parse_traceparent(value: str) -> ParentSpan | None:
    """Return what the header names; None if it is not valid, or has no value."""
    match = _PATTERN.fullmatch(value)
    if match is None or (match[4] and value.startswith("00-")):  # later versions may have more fields
        return None
    return ParentSpan(match[1], match[2], int(match[3], 16))


def continue_trace(headers: Mapping[str, str], samples: Callable[[str], bool]) -> TraceContext:
    """Return a new span in the trace of `headers`, or in a new trace if they have none.

    `samples` says whether the spans of a new trace are exported; of others, the one who has begun it has decided.
    """
    given = headers.get(TRACEPARENT)
    parent = None if given is None else parse_traceparent(given)
    if parent is not None:
        return TraceContext(parent.trace_id, new_span_id(), parent.span_id, parent.flags)
    ids = f"{_random.getrandbits(192):048x}"
    trace_id, span_id = ids[:32], ids[32:]
    return TraceContext(trace_id, span_id, None, SAMPLED if samples(trace_id) else 0)


def new_span_id() -> str:
    """Return a random span id."""
    return f"{_random.getrandbits(64) or 1:016x}"
