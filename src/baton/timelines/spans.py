"""Spans from a finished timeline: one for the request in this process, and one for each part of it with a begin and an
end. Knows no OpenTelemetry.
"""

from collections.abc import Mapping
from typing import NamedTuple

from baton.timelines.phases import Phase
from baton.timelines.timeline import Event, Timeline
from baton.timelines.trace_context import new_span_id

Attributes = Mapping[str, str | int | float | bool]

_PARTS: tuple[tuple[str, Phase, Phase], ...] = (
    ("media fetch", "admitted", "media_fetched"),
    ("encode", "media_fetched", "encoded"),
    ("queue", "queued", "first_step"),
    ("kv transfer", "kv_claimed", "kv_moved"),
    ("prefill", "first_step", "first_token"),
    ("decode", "first_token", "finished"),
)
_ERROR_STATES = frozenset({"failed", "expired", "cancelled"})


class SpanEvent(NamedTuple):
    """A point in time within a span."""

    name: str
    at_unix_ns: int
    attributes: Attributes


class Span(NamedTuple):
    """One span. `error` is the description of a failure, None without one."""

    name: str
    trace_id: str
    span_id: str
    parent_span_id: str | None
    start_unix_ns: int
    end_unix_ns: int
    attributes: Attributes
    events: tuple[SpanEvent, ...] = ()
    error: str | None = None
    is_server: bool = False


def spans_of(timeline: Timeline) -> list[Span]:
    """Return the spans of a finished timeline, the one of the request first."""
    events = timeline.events
    return [_request_span(timeline, events), *_part_spans(timeline, events)]


def _request_span(timeline: Timeline, events: list[Event]) -> Span:
    trace, start = timeline.trace, timeline.started_unix_ns
    return Span(
        name=f"baton {timeline.role}",
        trace_id=trace.trace_id,
        span_id=trace.span_id,
        parent_span_id=trace.parent_span_id,
        start_unix_ns=start,
        end_unix_ns=start + timeline.duration_ns,
        attributes=_attributes(timeline),
        events=tuple(SpanEvent(phase, start + at_ns, _plain(detail or {})) for at_ns, phase, detail in events),
        error=_error(timeline),
        is_server=True,
    )


def _attributes(timeline: Timeline) -> Attributes:
    counts, failure = timeline.counts, timeline.failure
    attributes: dict[str, str | int | float | bool] = {
        "baton.role": timeline.role,
        "baton.request_id": timeline.request_id,
        "baton.state": timeline.state or "",
    }
    if timeline.model:
        attributes["gen_ai.request.model"] = timeline.model
    if timeline.client_id is not None:
        attributes["baton.client_id"] = timeline.client_id
    if counts.prompt_tokens:
        attributes["gen_ai.usage.input_tokens"] = counts.prompt_tokens
        attributes["gen_ai.usage.output_tokens"] = counts.completion_tokens
    if counts.cached_tokens is not None:
        attributes["baton.cached_tokens"] = counts.cached_tokens
    if failure is not None:
        attributes["error.type"] = failure.code
    return attributes


def _error(timeline: Timeline) -> str | None:
    """Return what went wrong. A request that was refused is an error of its client, not of the server."""
    if timeline.state not in _ERROR_STATES:
        return None
    failure = timeline.failure
    reason = "" if failure is None else f"{failure.code}: {failure.message}"
    return f"{timeline.state} {reason}".strip()


def _part_spans(timeline: Timeline, events: list[Event]) -> list[Span]:
    """Return a span for each part whose begin and end are known."""
    first: dict[str, int] = {}
    details: dict[str, Mapping[str, object]] = {}
    for at_ns, phase, detail in events:
        if phase not in first:
            first[phase] = at_ns
            details[phase] = detail or {}
    spans = []
    for name, begin, end in _PARTS:
        if begin in first and end in first and first[begin] <= first[end]:
            spans.append(
                Span(
                    name=name,
                    trace_id=timeline.trace.trace_id,
                    span_id=new_span_id(),
                    parent_span_id=timeline.trace.span_id,
                    start_unix_ns=timeline.started_unix_ns + first[begin],
                    end_unix_ns=timeline.started_unix_ns + first[end],
                    attributes=_plain(details[end]),
                )
            )
    return spans


def _plain(detail: Mapping[str, object]) -> Attributes:
    return {
        f"baton.{name}": value if isinstance(value, str | int | float | bool) else str(value)
        for name, value in detail.items()
    }
