"""What processes report about themselves and their requests, as far as the view reads it.

Fields that a process does not send have a default, and unknown ones are ignored: processes of a deployment may have
different versions.
"""

import msgspec

Detail = dict[str, object]
Event = tuple[int, str, Detail]


class ProcessInfo(msgspec.Struct, frozen=True, kw_only=True):
    """Which process it is."""

    name: str = ""
    role: str = ""
    model: str | None = None
    engine: str | None = None
    pid: int = 0
    host: str = ""
    started_unix_s: float = 0.0


class ErrorReport(msgspec.Struct, frozen=True, kw_only=True):
    """The error of a request."""

    code: str
    message: str = ""


class PastError(msgspec.Struct, frozen=True, kw_only=True):
    """The error of a request that failed in the process."""

    unix_us: int = 0
    code: str = ""
    message: str = ""
    request_id: str = ""


class RankLoad(msgspec.Struct, frozen=True, kw_only=True):
    """The load of one data-parallel rank, in requests and KV blocks."""

    rank: int = 0
    running: int = 0
    waiting: int = 0
    used_blocks: int = 0
    total_blocks: int = 0


class About(msgspec.Struct, frozen=True, kw_only=True):
    """The reply of `/control/about`."""

    process: ProcessInfo
    settings: Detail = {}
    capabilities: Detail = {}
    load: tuple[RankLoad, ...] = ()
    health: str = "unknown"
    in_flight: int = 0
    rooms: dict[str, int] = {}
    transfers: dict[str, int] = {}
    last_errors: tuple[PastError, ...] = ()
    commands: tuple[str, ...] = ()


class TimelineReport(msgspec.Struct, frozen=True, kw_only=True):
    """One request in one process. `state` is None and `sequence` 0 while it runs.

    Events are (offset in µs, phase, detail). Each of `gaps_us` is the time that `outputs_per_gap` outputs took.
    """

    sequence: int = 0
    request_id: str = ""
    client_id: str | None = None
    trace_id: str | None = None
    span_id: str | None = None
    parent_span_id: str | None = None
    role: str = ""
    model: str | None = None
    started_unix_us: int = 0
    state: str | None = None
    error: ErrorReport | None = None
    duration_us: int | None = None
    prompt_tokens: int = 0
    cached_tokens: int | None = None
    completion_tokens: int = 0
    events: tuple[Event, ...] = ()
    gaps_us: tuple[int, ...] = ()
    outputs_per_gap: int = 1

    @property
    def output_gaps_us(self) -> tuple[int, ...]:
        """The times between two outputs; of a long answer, means of `outputs_per_gap` of them."""
        count = max(1, self.outputs_per_gap)
        return self.gaps_us if count == 1 else tuple(gap // count for gap in self.gaps_us)


class TimelinePage(msgspec.Struct, frozen=True, kw_only=True):
    """The reply of `/control/timelines`."""

    process: ProcessInfo
    now_unix_us: int
    next: int
    dropped: int = 0
    timelines: tuple[TimelineReport, ...] = ()
