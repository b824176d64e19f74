"""One request in one process: its phases and the gaps between its outputs, recorded while it runs.

A process that keeps no timelines has `UNRECORDED` in their place. Called in the event loop only.
"""

from array import array
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from time import perf_counter_ns
from typing import NamedTuple, Protocol

import msgspec

from baton.protocol.outputs import PromptProgress
from baton.timelines.phases import Phase
from baton.timelines.trace_context import TraceContext

MAX_EVENTS = 256
_MAX_MARKS = MAX_EVENTS - 1  # `received` is an event too
MAX_GAPS = 512
MAX_MESSAGE_CHARS = 300
MAX_NAME_CHARS = 200

# A copy is made faster than a new one, and to "l" ints are appended faster than to "Q".
NO_TIMES = array("l")
_TIMELINE_BYTES = 700
_EVENT_BYTES = 160
_TIME_BYTES = NO_TIMES.itemsize

Detail = Mapping[str, object]
Event = tuple[int, Phase, Detail | None]
"""Nanoseconds since the start, the phase, and a few numbers or names that belong to it."""
_RECEIVED: Event = (0, "received", None)


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


class FinalCounts(msgspec.Struct, frozen=True, gc=False):
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
_ignore_output = UNRECORDED.output


class Timeline(msgspec.Struct, gc=False, eq=False):
    """A Recorder with the request's ids, at most `MAX_EVENTS` events and, once it has ended, `MAX_GAPS` gaps.

    A request that runs has a cycle with its `counts`; the end, which always comes, breaks it.
    """

    request_id: str
    role: str
    model: str
    trace: TraceContext
    client_id: str | None
    counts: TokenCounts
    _on_end: "Callable[[Timeline], None]"
    _started_ns: int
    started_unix_ns: int
    _output_times_ns: "array[int]"
    output: Callable[[int], None]
    """See `Recorder.output`. It is `append` of the times, so that no Python is run for each token."""
    _marks: list[Event] = []
    """The events but `received` and `finished`, at times of `perf_counter_ns`."""
    _progress: Sequence[PromptProgress] = ()
    _merged: int = 0
    """`outputs_per_gap`, once the times were merged."""
    sequence: int = 0
    state: str | None = None
    failure: Failure | None = None
    duration_ns: int = 0
    size_bytes: int = 0
    """About; known at the end."""

    @property
    def events(self) -> list[Event]:
        """The events so far, in the order of their times, those of the engine included."""
        marks = [(at_ns - self._started_ns, phase, detail) for at_ns, phase, detail in self._marks]
        ends: list[Event] = [] if self.state is None else [(self.duration_ns, "finished", None)]
        return sorted([_RECEIVED, *marks, *ends, *map(self._event_of, self._progress)], key=_time_of)

    @property
    def outputs_per_gap(self) -> int:
        """How many outputs there are between two recorded times."""
        return self._merged or _outputs_per_gap(len(self._output_times_ns))

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
        if self.state is None and len(self._marks) < _MAX_MARKS:
            self._marks.append((perf_counter_ns(), phase, detail))

    def follow(self, progress: Sequence[PromptProgress]) -> None:
        """See `Recorder.follow`."""
        self._progress = progress

    def _recorded_times(self) -> "array[int]":
        times = self._output_times_ns
        return times if self._merged else times[:: _outputs_per_gap(len(times))]

    def _event_of(self, progress: PromptProgress) -> Event:
        detail = {"tokens": progress.tokens} if progress.tokens else None
        return max(0, progress.at_ns - self._started_ns), progress.phase, detail

    def finish(self, state: str, failure: Failure | None = None) -> None:
        """See `Recorder.finish`."""
        self.duration_ns = perf_counter_ns() - self._started_ns
        self.state = state
        self.output = _ignore_output
        if failure is not None:
            self.failure = Failure(failure.code, failure.message[:MAX_MESSAGE_CHARS])
        counts = self.counts
        if type(counts) is not FinalCounts:
            self.counts = FinalCounts(counts.prompt_tokens, counts.cached_tokens, counts.completion_tokens)
        events = len(self._marks)
        if self._progress:
            self._progress = tuple(self._progress)
            events += len(self._progress)
        times = len(self._output_times_ns)
        if times > MAX_GAPS:
            self._merged = _outputs_per_gap(times)
            self._output_times_ns = self._output_times_ns[:: self._merged]
            times = len(self._output_times_ns)
        self.size_bytes = _TIMELINE_BYTES + _EVENT_BYTES * events + _TIME_BYTES * times
        self._on_end(self)


def _outputs_per_gap(outputs: int) -> int:
    """Return the least power of two with which there are at most `MAX_GAPS` gaps."""
    return 1 if outputs <= MAX_GAPS else 1 << max(0, (outputs - 1) // MAX_GAPS).bit_length()


def _time_of(event: Event) -> int:
    return event[0]
