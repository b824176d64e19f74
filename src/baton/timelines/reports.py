"""What a process tells about itself and its requests over HTTP: `GET /control/timelines` and `GET /control/about`.

Neither has text of prompts or answers.
"""

from collections.abc import Mapping

import msgspec

from baton.timelines.timeline import Timeline


class ProcessReport(msgspec.Struct, frozen=True, kw_only=True):
    """Which process this is. A frontend has no engine, and knows models only by their requests."""

    name: str
    role: str
    model: str | None
    engine: str | None
    pid: int
    host: str
    started_unix_s: float


class FailureReport(msgspec.Struct, frozen=True, kw_only=True):
    """Why a request was not completed."""

    code: str
    message: str


class TimelineReport(msgspec.Struct, frozen=True, kw_only=True):
    """One request. `state` is None, and `sequence` 0, while it runs.

    Each event has its microseconds since the start, its phase and its detail. Each of `gaps_us` is the time that
    `outputs_per_gap` outputs took: 1, and more for a long answer.
    """

    sequence: int
    request_id: str
    client_id: str | None
    trace_id: str
    span_id: str
    parent_span_id: str | None
    role: str
    model: str
    started_unix_us: int
    state: str | None
    error: FailureReport | None
    duration_us: int
    prompt_tokens: int
    cached_tokens: int | None
    completion_tokens: int
    events: list[tuple[int, str, Mapping[str, object]]]
    gaps_us: list[int]
    outputs_per_gap: int


class TimelinesReply(msgspec.Struct, frozen=True, kw_only=True):
    """The reply of `GET /control/timelines`. `dropped` finished after the asked number and are no longer there."""

    process: ProcessReport
    now_unix_us: int
    next: int
    dropped: int
    timelines: list[TimelineReport]


class RankLoad(msgspec.Struct, frozen=True, kw_only=True):
    """The load of one data-parallel rank of an engine, in requests and KV blocks."""

    rank: int
    running: int
    waiting: int
    used_blocks: int
    total_blocks: int


class ErrorReport(msgspec.Struct, frozen=True, kw_only=True):
    """The error of one request that failed."""

    unix_us: int
    code: str
    message: str
    request_id: str


class AboutReply(msgspec.Struct, frozen=True, kw_only=True):
    """The reply of `GET /control/about`.

    `settings` are those that differ from their defaults, without secrets. `rooms` are those with KV or encoded media
    for other workers, by state; `transfers` the bytes fetched from other workers, by transport. `commands` are the
    paths below `/control/` that this process takes.
    """

    process: ProcessReport
    settings: Mapping[str, object]
    capabilities: Mapping[str, object]
    load: list[RankLoad]
    health: str
    in_flight: int
    rooms: Mapping[str, int]
    transfers: Mapping[str, int]
    last_errors: list[ErrorReport]
    commands: list[str]


_NOTHING: Mapping[str, object] = {}


def report_timeline(timeline: Timeline) -> TimelineReport:
    """Return what there is of a request, also while it runs."""
    failure, counts, trace = timeline.failure, timeline.counts, timeline.trace
    return TimelineReport(
        sequence=timeline.sequence,
        request_id=timeline.request_id,
        client_id=timeline.client_id,
        trace_id=trace.trace_id,
        span_id=trace.span_id,
        parent_span_id=trace.parent_span_id,
        role=timeline.role,
        model=timeline.model,
        started_unix_us=timeline.started_unix_ns // 1000,
        state=timeline.state,
        error=None if failure is None else FailureReport(code=failure.code, message=failure.message),
        duration_us=timeline.elapsed_ns // 1000,
        prompt_tokens=counts.prompt_tokens,
        cached_tokens=counts.cached_tokens,
        completion_tokens=counts.completion_tokens,
        events=[(at_ns // 1000, phase, detail or _NOTHING) for at_ns, phase, detail in timeline.events],
        gaps_us=timeline.gaps_us,
        outputs_per_gap=timeline.outputs_per_gap,
    )
