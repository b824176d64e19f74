"""W3C trace context: the trace of a request, and the span of this process in it."""

import random
import re
from collections.abc import Callable

import msgspec

TRACEPARENT = "traceparent"
SAMPLED = 1

# Version ff is forbidden, and ids are not all zeros.
_PATTERN = re.compile(r"(?!ff)[0-9a-f]{2}-(?!0{32})[0-9a-f]{32}-(?!0{16})[0-9a-f]{16}-[0-9a-f]{2}(-.*)?")
_LENGTH = 55  # of version 00; later versions may have more fields
_TRACE_ID = slice(3, 35)
_SPAN_ID = slice(36, 52)
_FLAGS = slice(53, 55)
_BETWEEN_VERSION_AND_SPAN_ID = slice(2, 36)
_AFTER_SPAN_ID = slice(52, 55)
_random_bits = random.Random().getrandbits  # seeded by the system; ids need to be unique, not secret


class TraceContext(msgspec.Struct, frozen=True, gc=False):
    """The span of one request in this process. `parent_span_id` is None for the root of a trace.

    Its ids are read from the header, since few of them are asked for.
    """

    traceparent: str
    """The header for the next process, whose parent is this span."""
    parent_span_id: str | None = None

    @property
    def trace_id(self) -> str:
        """The id that all spans of the trace have."""
        return self.traceparent[_TRACE_ID]

    @property
    def span_id(self) -> str:
        """The id of this span."""
        return self.traceparent[_SPAN_ID]

    @property
    def is_sampled(self) -> bool:
        """Whether the spans of the trace are exported."""
        return bool(int(self.traceparent[_FLAGS], 16) & SAMPLED)


def parse_traceparent(value: str) -> TraceContext | None:
    """Return the span that the header names; None if it is not valid, or has no value."""
    return TraceContext(value[:_LENGTH]) if _is_valid(value) else None


def continue_trace(given: str | None, samples: Callable[[str], bool] | None = None) -> TraceContext:
    """Return a new span in the trace of `given`, a `traceparent` header, or in a new trace if that is not valid.

    `samples` says whether the spans of a new trace are exported, which they are without it; of others, the one who has
    begun it has decided.
    """
    if given is not None and _is_valid(given):
        span_id = new_span_id()
        return TraceContext(f"00{given[_BETWEEN_VERSION_AND_SPAN_ID]}{span_id}{given[_AFTER_SPAN_ID]}", given[_SPAN_ID])
    ids = _random_bits(192).to_bytes(24).hex("-", -16)  # 16 bytes, and 8 of the span
    if samples is None or samples(ids[:32]):
        return TraceContext(f"00-{ids}-01")
    return TraceContext(f"00-{ids}-00")


def new_span_id() -> str:
    """Return a random span id."""
    return (_random_bits(64) or 1).to_bytes(8).hex()


def _is_valid(value: str) -> bool:
    return _PATTERN.fullmatch(value) is not None and (len(value) == _LENGTH or not value.startswith("00-"))
