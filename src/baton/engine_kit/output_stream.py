"""The stream that engines write and handlers read: outputs that have not been read yet are merged.

One writer and one reader, both on the event-loop thread; an engine that computes on another thread posts its outputs
with `loop.call_soon_threadsafe`, once per step.
"""

import asyncio
from collections.abc import Sequence
from weakref import WeakKeyDictionary

from baton.ports.engine import ReceiveTokens
from baton.protocol.outputs import (
    Finished,
    FinishReason,
    HandoffReady,
    KvComputed,
    KvWanted,
    Logprobs,
    Output,
    PromptCached,
    PromptProgress,
    PromptScored,
    TokenDelta,
)

# An event loop that is late with its timers has more to do than it can: the next tokens of a stream wait for as many
# times as long as the loop was late, so that fewer and larger chunks are sent.
LATE_FACTOR = 32
MAX_EXTRA_DELAY_S = 0.05
MAX_PROGRESS = 200


class _NextTurn:
    """The streams that have got tokens in this turn of an event loop: one callback passes all of them on in the next.

    They are not passed on as they are written: the engine may be about to write more, or the end. It does not hold its
    loop, which would never be freed then.
    """

    _of_loops: "WeakKeyDictionary[asyncio.AbstractEventLoop, _NextTurn]" = WeakKeyDictionary()

    def __init__(self) -> None:
        self.streams: list[OutputStream] = []

    @classmethod
    def of(cls, loop: asyncio.AbstractEventLoop) -> "_NextTurn":
        """Return the one of `loop`."""
        turn = cls._of_loops.get(loop)
        if turn is None:
            turn = cls._of_loops[loop] = cls()
        return turn

    def pass_on(self, loop: asyncio.AbstractEventLoop) -> None:
        """Let `streams` pass their tokens on. Scheduled by the first of them."""
        streams, self.streams = self.streams, []
        now = loop.time()
        for stream in streams:
            stream.pass_on(now)


class OutputStream:
    """A Stream (see `ports/engine.py`) with its writing side.

    Pending outputs are kept per choice, so a read costs one object for each choice and not one for each step.
    """

    __slots__ = (
        "_error",
        "_finished",
        "_handoff",
        "_interval_s",
        "_kv",
        "_late_delay_s",
        "_logprobs",
        "_loop",
        "_next_turn",
        "_not_before",
        "_open",
        "_prompt",
        "_receive",
        "_scheduled",
        "_timer",
        "_tokens",
        "_urgent",
        "_waiter",
        "progress",
    )

    def __init__(self, choices: int = 1) -> None:
        self._loop = asyncio.get_running_loop()
        self._next_turn = _NextTurn.of(self._loop)
        self._open = choices
        self._prompt: tuple[Output, ...] = ()  # read with the first tokens
        self._tokens: dict[int, list[int]] = {}
        self._logprobs: dict[int, list[Logprobs]] = {}
        self._finished: list[Finished] = []
        self._handoff: HandoffReady | None = None
        self._kv: KvComputed | KvWanted | None = None
        self._error: BaseException | None = None
        self._urgent = False  # whether there is output that `not_before` does not delay
        self._waiter: asyncio.Future[None] | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._not_before = 0.0
        self._late_delay_s = 0.0  # because the last timer was late
        self._scheduled = False  # for the next turn of the loop, or by the timer
        self._receive: ReceiveTokens | None = None
        self._interval_s = 0.0
        self.progress: list[PromptProgress] = []

    @property
    def ended(self) -> bool:
        """Whether nothing more can be written."""
        return self.finished or self._error is not None

    @property
    def finished(self) -> bool:
        """Whether every choice has ended, and none with an error."""
        return self._open == 0

    def progressed(self, progress: PromptProgress) -> None:
        """Add what the engine has done with the prompt. Wakes no reader; what exceeds `MAX_PROGRESS` is dropped."""
        if len(self.progress) < MAX_PROGRESS:
            self.progress.append(progress)

    def cached(self, tokens: int, prompt_tokens: int | None = None) -> None:
        """Add how much of the prompt was in the prefix cache, and how long an engine's own prompt is.

        It is read with the first tokens.
        """
        self._prompt += (PromptCached(tokens, prompt_tokens),)

    def scored(self, logprobs: Logprobs) -> None:
        """Add the log-probabilities of the prompt; they are read with the first tokens."""
        self._prompt += (PromptScored(logprobs),)

    def push(self, token_ids: list[int], index: int = 0, logprobs: Logprobs | None = None) -> None:
        """Add new tokens of a choice; the stream owns the list from now on. Ignored after the end."""
        if self._open == 0 or self._error is not None:
            return
        pending = self._tokens.get(index)
        if pending is None:
            self._tokens[index] = token_ids
        else:
            pending += token_ids
        if logprobs is not None:
            self._logprobs.setdefault(index, []).append(logprobs)
        if self._waiter is not None and not self._scheduled:
            if self._receive is not None:
                self._scheduled = True
                streams = self._next_turn.streams
                if not streams:
                    self._loop.call_soon(self._next_turn.pass_on, self._loop)
                streams.append(self)
            elif self._loop.time() < self._not_before:
                self._start_timer()
            else:
                self._wake()

    def hand_off(self, params: dict[str, object]) -> None:
        """Add the parameters with which the KV can be claimed."""
        if not self.ended:
            self._handoff = HandoffReady(params)
            self._wake_at_once()

    def computed(self, output: KvComputed) -> None:
        """Add blocks whose KV is computed."""
        if not self.ended:
            before = self._kv
            if isinstance(before, KvComputed):
                output = KvComputed(before.blocks + output.blocks, output.complete, output.cached_tokens)
            self._kv = output
            self._wake_at_once()

    def want(self, output: KvWanted) -> None:
        """Add the blocks into which KV is to be written."""
        if not self.ended:
            self._kv = output
            self._wake_at_once()

    def finish(
        self,
        reason: FinishReason,
        index: int = 0,
        stop_reason: int | str | None = None,
        cached_tokens: int | None = None,
    ) -> None:
        """End a choice; with the last one the stream ends."""
        if not self.ended:
            self._finished.append(Finished(reason, index, stop_reason, cached_tokens))
            self._open -= 1
            self._wake_at_once()

    def fail(self, error: BaseException) -> None:
        """End the stream with `error`; the first end wins."""
        if not self.ended:
            self._error = error
            self._wake_at_once()

    def pass_to(self, receive: ReceiveTokens, interval_s: float) -> None:
        """See `Stream.pass_to`."""
        self._receive = receive
        self._interval_s = interval_s

    async def read(self, not_before: float = 0.0) -> list[Output]:
        """See `Stream.read`."""
        self._not_before = not_before + self._late_delay_s
        if not self._urgent and (not self._tokens or self._loop.time() < self._not_before):
            self._waiter = self._loop.create_future()
            if self._tokens and not self._scheduled:
                self._start_timer()
            try:
                await self._waiter
            finally:
                self._waiter = None
                if self._timer is not None:
                    self._timer.cancel()
                    self._timer = None
                    self._scheduled = False
        if outputs := self._take():
            return outputs
        if self._error is not None:
            raise self._error
        return []

    def _start_timer(self) -> None:
        self._scheduled = True
        self._timer = self._loop.call_at(self._not_before, self._timer_fired)

    def _timer_fired(self) -> None:
        self._timer = None
        now = self._loop.time()
        self._late_delay_s = min(LATE_FACTOR * (now - self._not_before), MAX_EXTRA_DELAY_S)
        self._not_before = now
        self.pass_on(now)

    def pass_on(self, now: float) -> None:
        """If they are due, pass the tokens to the receiver, or let the reader take them. Called by the event loop."""
        self._scheduled = False
        if self._waiter is None or self._waiter.done():
            return
        if now < self._not_before:
            self._start_timer()
        elif self._receive is None or self._prompt:
            self._wake()
        else:
            try:
                self._pass_tokens(self._receive)
            except Exception as error:  # noqa: BLE001 - raised to the reader
                self.fail(error)
            self._not_before = now + self._interval_s + self._late_delay_s

    def _pass_tokens(self, receive: ReceiveTokens) -> None:
        tokens = self._tokens
        while tokens:
            index = next(iter(tokens))
            delta = TokenDelta(tokens.pop(index), index, self._joined_logprobs(index) if self._logprobs else None)
            if not receive(delta):
                self._put_back(delta)
                self._wake()
                return

    def _put_back(self, delta: TokenDelta) -> None:
        self._tokens[delta.index] = delta.token_ids
        if delta.logprobs is not None:
            self._logprobs[delta.index] = [delta.logprobs]

    def _wake_at_once(self) -> None:
        self._urgent = True
        self._wake()

    def _wake(self) -> None:
        if self._waiter is not None:
            _resolve(self._waiter)

    def _take(self) -> list[Output]:
        tokens, self._tokens = self._tokens, {}
        if len(tokens) == 1 and not (self._urgent or self._prompt or self._logprobs):  # nearly always
            ((index, token_ids),) = tokens.items()
            return [TokenDelta(token_ids, index)]
        outputs: list[Output] = []
        if self._prompt and (tokens or self._finished):
            outputs += self._prompt
            self._prompt = ()
        deltas = [TokenDelta(ids, index, self._joined_logprobs(index)) for index, ids in tokens.items()]
        if not self._urgent:
            return [*outputs, *deltas]
        return [*outputs, *self._take_urgent(deltas)]

    def _take_urgent(self, deltas: list[TokenDelta]) -> list[Output]:
        """Return what `not_before` does not delay, with the tokens before the ends."""
        about_kv = [output for output in (self._handoff, self._kv) if output is not None]
        outputs: list[Output] = [*about_kv, *deltas, *self._finished]
        self._handoff = self._kv = None
        self._finished = []
        self._urgent = self.ended  # every later read returns the end again
        return outputs

    def _joined_logprobs(self, index: int) -> Logprobs | None:
        parts = self._logprobs.pop(index, None) if self._logprobs else None
        return None if parts is None else join_logprobs(parts)


def join_logprobs(parts: Sequence[Logprobs]) -> Logprobs:
    """Return the log-probabilities of consecutive tokens as one value."""
    chosen = tuple(value for part in parts for value in part.chosen)
    return Logprobs(chosen, tuple(position for part in parts for position in part.top))


def _resolve(future: "asyncio.Future[None]") -> None:
    if not future.done():
        future.set_result(None)
