"""One request in one process: its phases and the gaps between its outputs, recorded while it runs.

A process that keeps no timelines has `UNRECORDED` in their place. Called in the event loop only.
"""

from array import array
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from time import perf_counter_ns, time_ns
from typing import NamedTuple, Protocol

from baton.protocol.outputs import PromptProgress
from baton.timelines.phases import Phase
from baton.timelines.trace_context import TraceContext

MAX_EVENTS = 256
MAX_GAPS = 512
MAX_MESSAGE_CHARS = 300
MAX_NAME_CHARS = 200

# A copy is made faster than a new one, and to "l" ints are appended faster than to "Q".
_NO_TIMES = array("l")
_TIMELINE_BYTES = 700
_EVENT_BYTES = 160
_TIME_BYTES = _NO_TIMES.itemsize

Detail = Mapping[str, object]
Event = tuple[int, Phase, Detail | None]
"""Nanoseconds since the start, the phase, and a few numbers or names that belong to it."""


class TokenCounts(Protocol):
    """The tokens of a request, which change while it runs."""

    @property
    def prompt_tokens(self) -> int:
        """Tokens of the prompt."""

    @property
    def cached_tokens(self) -> int | None:
        """Those of them that were in the prefix cache; None if that is not known."""

    @property
    def completion_tokens(self) -> int:
        """Tokens that were generated."""


class FinalCounts(NamedTuple):
    """The tokens of a request that has ended, or that this process does not count."""

    prompt_tokens: int = 0
    cached_tokens: int | None = None
    completion_tokens: int = 0


class Failure(NamedTuple):
    """Why a request was not completed."""

    code: str
    message: str


class Recorder(Protocol):
    """Records one request. `Timeline` keeps what it gets; `Unrecorded` does not."""

    def name_model(self, model: str) -> None:
        """The request asks for this model."""

    def mark(self, phase: Phase, detail: Detail | None = None) -> None:
        """The request has reached `phase` now. `detail` is small, and is not changed later."""

    def follow(self, progress: Sequence[PromptProgress]) -> None:
        """What the engine has done with the prompt belongs to the timeline; it is read whenever somebody asks."""

    def output(self, now_ns: int) -> None:
        """Tokens are sent on now, in `perf_counter_ns`. Times between outputs are gaps; of a long answer, those of
        several outputs."""

    def finish(self, state: str, failure: Failure | None = None) -> None:
        """The request has ended. Called once, last."""


class Unrecorded:
    """A Recorder that keeps nothing."""

    __slots__ = ()

    def name_model(self, model: str) -> None:
        """See `Recorder.name_model`."""

    def mark(self, phase: Phase, detail: Detail | None = None) -> None:
        """See `Recorder.mark`."""

    def follow(self, progress: Sequence[PromptProgress]) -> None:
        """See `Recorder.follow`."""

    def output(self, now_ns: int) -> None:
        """See `Recorder.output`."""

    def finish(self, state: str, failure: Failure | None = None) -> None:
        """See `Recorder.finish`."""


UNRECORDED = Unrecorded()


class Timeline:
    """A Recorder with the request's ids, at most `MAX_EVENTS` events and, once it has ended, `MAX_GAPS` gaps."""

    __slots__ = (
        "_events",
        "_on_finish",
        "_output_times_ns",
        "_outputs_per_gap",
        "_progress",
        "_started_ns",
        "client_id",
        "counts",
        "duration_ns",
        "failure",
        "model",
        "output",
        "request_id",
        "role",
        "sequence",
        "size_bytes",
        "started_unix_ns",
        "state",
        "trace",
    )

    def __init__(
        self,
        request_id: str,
        role: str,
        model: str,
        trace: TraceContext,
        client_id: str | None,
        counts: TokenCounts,
        on_finish: Callable[["Timeline"], None],
    ) -> None:
        self._on_finish = on_finish
        self._started_ns = perf_counter_ns()
        self._output_times_ns = _NO_TIMES[:]
        self.output: Callable[[int], None] = self._output_times_ns.append  # no Python is run for each token
        self._outputs_per_gap = 0  # known at the end
        self._progress: Sequence[PromptProgress] = ()
        self.started_unix_ns = time_ns()
        self.request_id = request_id
        self.role = role
        self.model = model[:MAX_NAME_CHARS]
        self.trace = trace
        self.client_id = client_id if client_id is None else client_id[:MAX_NAME_CHARS]
        self.sequence = 0
        self.state: str | None = None
        self.failure: Failure | None = None
        self.counts = counts
        self.duration_ns = 0
        self.size_bytes = 0  # about; known at the end
        self._events: list[Event] = [(0, "received", None)]

    @property
    def events(self) -> list[Event]:
        """The events so far, in the order of their times, those of the engine included."""
        return sorted([*self._events, *map(self._event_of, self._progress)], key=_time_of)

    @property
    def outputs_per_gap(self) -> int:
        """How many outputs there are between two recorded times."""
        return self._outputs_per_gap or _outputs_per_gap(len(self._output_times_ns))

    @property
    def gaps_us(self) -> list[int]:
        """How long each `outputs_per_gap` outputs took."""
        return [(later - earlier) // 1000 for earlier, later in pairwise(self._recorded_times())]

    @property
    def elapsed_ns(self) -> int:
        """How long the request has taken, or takes so far."""
        return self.duration_ns if self.state is not None else perf_counter_ns() - self._started_ns

    def name_model(self, model: str) -> None:
        """See `Recorder.name_model`."""
        self.model = model[:MAX_NAME_CHARS]

    def mark(self, phase: Phase, detail: Detail | None = None) -> None:
        """See `Recorder.mark`. What happens after the end, as KV that arrives for a cancelled request, is ignored."""
        if self.state is None and len(self._events) < MAX_EVENTS:
            self._events.append((perf_counter_ns() - self._started_ns, phase, detail))

    def follow(self, progress: Sequence[PromptProgress]) -> None:
        """See `Recorder.follow`."""
        self._progress = progress

    def _recorded_times(self) -> "array[int]":
        times = self._output_times_ns
        return times if self._outputs_per_gap else times[:: _outputs_per_gap(len(times))]

    def _event_of(self, progress: PromptProgress) -> Event:
        detail = {"tokens": progress.tokens} if progress.tokens else None
        return max(0, progress.at_ns - self._started_ns), progress.phase, detail

    def finish(self, state: str, failure: Failure | None = None) -> None:
        """See `Recorder.finish`."""
        self.duration_ns = perf_counter_ns() - self._started_ns
        self.state = state
        if failure is not None:
            self.failure = Failure(failure.code, failure.message[:MAX_MESSAGE_CHARS])
        progress = self._progress = tuple(self._progress)
        self.output = UNRECORDED.output
        times = self._output_times_ns
        per_gap = self._outputs_per_gap = _outputs_per_gap(len(times))
        if per_gap > 1:
            times = self._output_times_ns = times[::per_gap]
        counts, events = self.counts, self._events
        if type(counts) is not FinalCounts:
            self.counts = FinalCounts(counts.prompt_tokens, counts.cached_tokens, counts.completion_tokens)
        events.append((self.duration_ns, "finished", None))
        self.size_bytes = _TIMELINE_BYTES + _EVENT_BYTES * (len(events) + len(progress)) + _TIME_BYTES * len(times)
        self._on_finish(self)


def _outputs_per_gap(outputs: int) -> int:
    """Return the least power of two with which there are at most `MAX_GAPS` gaps."""
    return 1 if outputs <= MAX_GAPS else 1 << max(0, (outputs - 1) // MAX_GAPS).bit_length()


def _time_of(event: Event) -> int:
    return event[0]
