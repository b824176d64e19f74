"""Hops of requests for tests of the view."""

from baton.views.reports import ErrorReport, TimelineReport
from baton.views.traces import Hop

START_US = 1_700_000_000_000_000


def hop(
    process: str,
    role: str,
    events: dict[str, int],
    *,
    trace: str = "t",
    at: int = 0,
    duration: int = 1000,
    state: str | None = "completed",
    error: ErrorReport | None = None,
    details: dict[str, dict[str, object]] | None = None,
    **fields: object,
) -> Hop:
    """Return a hop that began `at` µs after START_US; `events` are offsets by phase, `details` theirs by phase."""
    report = TimelineReport(
        request_id=f"{process} {trace}",
        trace_id=trace,
        role=role,
        started_unix_us=START_US + at,
        state=state,
        error=error,
        duration_us=duration,
        events=tuple((offset, phase, (details or {}).get(phase, {})) for phase, offset in events.items()),
        **fields,  # type: ignore[arg-type]
    )
    return Hop(process=process, process_role=role, started_us=START_US + at, report=report)
