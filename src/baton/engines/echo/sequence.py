"""One request inside the echo engine: what it says, and where each choice ends."""

from collections.abc import Sequence as Seq
from time import perf_counter_ns
from typing import Literal, NamedTuple

from baton.engine_kit.output_stream import OutputStream
from baton.engines.echo.blocks import HeldBlocks
from baton.engines.echo.images import ROW_SIZE, echo_of, hashed_tokens, kv_numbers
from baton.ports.engine import Work
from baton.protocol.handoff import Consume, Produce
from baton.protocol.outputs import FinishReason, Logprobs, PromptProgress, TopLogprob
from baton.protocol.requests import StopConditions

Numbers = Seq[int]


class _Ending(NamedTuple):
    """How long one choice is and why it ends: known from the start."""

    length: int
    reason: FinishReason
    stop_reason: int | None = None


def _ending(work: Work, source: tuple[int, ...], first: int, repeats: bool) -> _Ending:
    """Return where a choice that starts at token `first` of `source` ends: at a stop token, its end, or the limit."""
    size, minimum = len(source), work.stop.min_tokens or 0
    limit = work.max_tokens if repeats else min(work.max_tokens, max(size, minimum))
    eos = () if work.stop.ignore_eos else work.eos_token_ids
    stops = _stop_tokens(work.stop)
    if not stops.union(eos).isdisjoint(source):
        for position in range(max(minimum - 1, 0), min(limit, minimum + size)):
            token = source[(position + first) % size]
            if token in eos:
                return _Ending(position + 1, FinishReason.EOS)
            if token in stops:
                return _Ending(position + 1, FinishReason.STOP, token)
    return _Ending(limit, FinishReason.LENGTH if limit == work.max_tokens else FinishReason.EOS)


def _stop_tokens(stop: StopConditions) -> set[int]:
    kinds = (stop.stop_token_ids, stop.stop_token_ids_visible, stop.stop_token_ids_hidden)
    return {token for kind in kinds for token in kind or ()}


class Sequence:
    """One request inside the engine."""

    __slots__ = (
        "cached_tokens",
        "endings",
        "fault",
        "fault_at",
        "hashed",
        "held",
        "logprobs",
        "numbers",
        "offered",
        "produced",
        "produces",
        "ready_at",
        "receiving",
        "repeats",
        "reserved",
        "source",
        "step",
        "stream",
        "total",
        "was_received",
        "work",
    )

    def __init__(self, work: Work, stream: OutputStream, answer: tuple[int, ...] | None = None) -> None:
        self.work = work
        self.produces = isinstance(work.handoff, Produce)  # whether another worker reads its KV
        self.stream = stream
        self.logprobs = work.output.logprobs
        self.numbers: Numbers = kv_numbers(work) if work.media else work.token_ids
        self.hashed = hashed_tokens(work)
        self.step = 0 if answer else 1  # between the first tokens of two choices
        self.repeats = not answer and (work.stop.max_tokens is not None or bool(work.stop.ignore_eos))
        self.receiving = False
        self.was_received = False
        self.offered = 0  # blocks of the prompt that another worker may read
        self._say(answer or self._echo(self.numbers))
        self.reserved = self._reserved(bool(answer))
        self.produced = 0
        self.ready_at = 0.0
        self.held: HeldBlocks | None = None
        self.cached_tokens = 0
        self.fault: str | None = None
        self.fault_at = 0

    @property
    def consumes(self) -> bool:
        """Whether its KV comes from another worker."""
        return isinstance(self.work.handoff, Consume)

    def received(self, numbers: Numbers) -> None:
        """The KV of the prompt is there, and says `numbers`."""
        self.receiving = False
        self.was_received = True
        if self.step:
            self._say(self._echo(numbers))

    def report(self, phase: Literal["queued", "first_step", "prefill_chunk"], tokens: int = 0) -> None:
        """Report what has been done with the prompt."""
        self.stream.progressed(PromptProgress(perf_counter_ns(), phase, tokens))

    def _echo(self, numbers: Numbers) -> tuple[int, ...]:
        return echo_of(numbers) if self.work.media else tuple(numbers)

    def _reserved(self, is_scripted: bool) -> int:
        """Return for how many output tokens it needs blocks; what a consuming request says is not known yet."""
        work = self.work
        if self.produces or is_scripted or not self.consumes:
            return 0 if self.produces else self.total
        said = len(self.numbers) * (ROW_SIZE if work.media else 1)
        return work.max_tokens if self.repeats else min(work.max_tokens, max(said, work.stop.min_tokens or 0))

    def _say(self, source: tuple[int, ...]) -> None:
        self.source = source
        choices = range(self.work.sampling.n or 1)
        self.endings = [_ending(self.work, source, index * self.step, self.repeats) for index in choices]
        self.total = max(ending.length for ending in self.endings)

    def emit(self, count: int) -> bool:
        """Generate the next `count` tokens of every choice; return whether the sequence has ended."""
        source, start = self.source, self.produced
        size, stop = len(source), start + count
        if start == 0:
            if not self.offered and not self.was_received:
                self.report("prefill_chunk", len(self.numbers) - self.cached_tokens)
            self.stream.cached(self.cached_tokens)
        for index, ending in enumerate(self.endings):
            if start >= ending.length:
                continue
            first = index * self.step
            if count == 1:
                tokens = [source[(start + first) % size]]
            else:
                tokens = [source[(at + first) % size] for at in range(start, min(stop, ending.length))]
            logprobs = None if self.logprobs is None else _logprobs(tokens, self.logprobs)
            self.stream.push(tokens, index, logprobs)
            if stop >= ending.length:
                self.stream.finish(ending.reason, index, ending.stop_reason, self.cached_tokens)
        self.produced = stop
        return stop >= self.total


def _logprobs(tokens: list[int], top_tokens: int) -> Logprobs:
    """Return fixed log-probabilities: 0 for the generated token, less for the alternatives."""
    top = tuple(
        tuple(TopLogprob(rank + 1, (token + rank) % 256, -float(rank)) for rank in range(top_tokens))
        for token in tokens
    )
    return Logprobs((0.0,) * len(tokens), top)
