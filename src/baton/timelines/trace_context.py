"""W3C trace context: the trace of a request, and the span of this process in it."""

import random
import re
from collections.abc import Callable

import msgspec

TRACEPARENT = "traceparent"
SAMPLED = 1

# Ids are not all zeros. Later versions may have more fields, and version ff is forbidden.
_IDS_AND_FLAGS = r"-(?!0{32})[0-9a-f]{32}-(?!0{16})[0-9a-f]{16}-[0-9a-f]{2}"
_is_version_00 = re.compile("00" + _IDS_AND_FLAGS).fullmatch
_is_later_version = re.compile("(?!00|ff)[0-9a-f]{2}" + _IDS_AND_FLAGS + "(-.*)?").fullmatch
_TRACE_ID = slice(3, 35)
_SPAN_ID = slice(36, 52)
_FLAGS = slice(53, 55)
_BEFORE_SPAN_ID = slice(36)
_AFTER_SPAN_ID = slice(52, 55)
_random_bits = random.Random().getrandbits  # seeded by the system; ids need to be unique, not secret


class TraceContext(msgspec.Struct, frozen=True, gc=False):
    """The span of one request in this process. Few of its ids are asked for, so they are read from headers then."""

    traceparent: str
    """The header for the next process, whose parent is this span."""
    given: str | None = None
    """The header of the caller; None at the root of a trace."""

    @property
    def trace_id(self) -> str:
        """The id that all spans of the trace have."""
        return self.traceparent[_TRACE_ID]

    @property
    def span_id(self) -> str:
        """The id of this span."""
        return self.traceparent[_SPAN_ID]

    @property
    def parent_span_id(self) -> str | None:
        """The id of the caller's span."""
        return None if self.given is None else self.given[_SPAN_ID]

    @property
    def is_sampled(self) -> bool:
        """Whether the spans of the trace are exported."""
        return bool(int(self.traceparent[_FLAGS], 16) & SAMPLED)


def parse_traceparent(value: str) -> TraceContext | None:
    """Return the span that the header names; None if it is not valid, or has no value."""
    header = value if _is_version_00(value) else _from_later_version(value)
    return None if header is None else TraceContext(header)


def continue_trace(given: str | None, samples: Callable[[str], bool] | None = None) -> TraceContext:
    """Return a new span in the trace of `given`, a `traceparent` header, or in a new trace if that is not valid.

    `samples` says whether the spans of a new trace are exported, which they are without it; of others, the one who has
    begun it has decided.
    """
    if given is not None and not _is_version_00(given):
        given = _from_later_version(given)
    if given is not None:
        return TraceContext(f"{given[_BEFORE_SPAN_ID]}{new_span_id()}{given[_AFTER_SPAN_ID]}", given)
    ids = _random_bits(192).to_bytes(24).hex("-", -16)  # 16 bytes, and 8 of the span
    if samples is None or samples(ids[:32]):
        return TraceContext(f"00-{ids}-01")
    return TraceContext(f"00-{ids}-00")


def new_span_id() -> str:
    """Return a random span id."""
    return (_random_bits(64) or 1).to_bytes(8).hex()


def _from_later_version(value: str) -> str | None:
    """Return the header of version 00 that says the same; None if it is not valid."""
    return f"00{value[2:55]}" if _is_later_version(value) else None
