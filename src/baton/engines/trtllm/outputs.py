"""From results to a stream: the engine repeats everything at every step, a stream is told what is new.

A cursor for each choice counts what has been told. The engine may cut tokens off again, of a stop word that became
whole; what was told stays told, and nothing is told twice.
"""

import math
from collections.abc import Mapping, Sequence

from baton.engine_kit.output_stream import OutputStream
from baton.engines.trtllm import handoff
from baton.engines.trtllm.compat import Library
from baton.engines.trtllm.library_types import CompletionOutput, Result, TokenLogprob
from baton.engines.trtllm.media_handles import handles_of
from baton.errors import EngineFailed
from baton.ports.engine import Work
from baton.protocol.handoff import Produce
from baton.protocol.outputs import FinishReason, Logprobs, TopLogprob

# Stands for a log-probability that the engine has left out, or that is no number. One for every token there must be:
# whoever reads them counts on it. JSON has no infinity, and nothing that is sampled is as unlikely as this.
UNKNOWN_LOGPROB = -9999.0


class ResultReader:
    """Tells one stream what the results of one request hold."""

    def __init__(self, work: Work, stream: OutputStream, library: Library) -> None:
        self._work = work
        self._stream = stream
        self._library = library
        self._handles = handles_of(work)
        self._told: dict[int, int] = {}
        self._ended: set[int] = set()
        # The engine computes greedy choices once, for they are all the same.
        self._copies = range(work.sampling.n or 1)

    def take(self, result: Result) -> None:
        """Tell what is new in `result`. Raises EngineFailed when it makes no sense."""
        outputs = result.outputs
        if isinstance(self._work.handoff, Produce) and result.finished and outputs:
            media = (self._handles, result.prompt_token_ids) if self._handles is not None else None
            self._stream.hand_off(handoff.encode(outputs[0].disaggregated_params, self._library, media))
        for output in outputs:
            for index in self._copies if len(outputs) == 1 else (output.index,):
                self._take_choice(output, index, result)

    def _take_choice(self, output: CompletionOutput, index: int, result: Result) -> None:
        if index in self._ended:
            return
        ends = result.finished or output.finish_reason is not None
        self._push_new(output, index, ends)
        if ends:
            self._ended.add(index)
            reason, stop_reason = self._why(output)
            scores = self._prompt_logprobs(output) if index == 0 else None
            cached = min(len(self._work.token_ids), max(0, result.cached_tokens))
            self._stream.finish(reason, index, stop_reason, cached, scores)

    def _push_new(self, output: CompletionOutput, index: int, ends: bool) -> None:
        tokens, told = output.token_ids or [], self._told.get(index, 0)
        upto, logprobs = len(tokens), None
        if self._work.output.logprobs is not None:
            given = output.logprobs or []
            if ends and tokens and not given:
                raise EngineFailed("logprobs: the engine has returned none")
            if not ends:
                upto = min(upto, len(given))  # tokens wait for theirs
            if upto > told:
                logprobs = _logprobs(tokens[told:upto], given[told:upto], self._work.output.logprobs)
        if upto > told:
            self._told[index] = upto
            self._stream.push(list(tokens[told:upto]), index, logprobs)

    def _why(self, output: CompletionOutput) -> tuple[FinishReason, int | str | None]:
        match output.finish_reason:
            case "length":
                return FinishReason.LENGTH, None
            case "cancelled":
                return FinishReason.CANCELLED, None
            case "stop" if output.stop_reason is not None:
                if output.stop_reason in self._work.eos_token_ids:
                    return FinishReason.EOS, None
                return FinishReason.STOP, output.stop_reason
            case "stop":
                return FinishReason.EOS, None
            case "not_finished" if isinstance(self._work.handoff, Produce):
                return FinishReason.LENGTH, None  # the one token that a prefill makes
            case None:
                return self._guess(output)
            case reason:
                raise EngineFailed(f"the engine ended the request with {reason!r}")

    def _guess(self, output: CompletionOutput) -> tuple[FinishReason, int | str | None]:
        """Several choices end one by one, and the engine says why only of the last: its tokens tell of the others."""
        tokens, stop = output.token_ids or [], self._work.stop
        if tokens and tokens[-1] in self._work.eos_token_ids and not stop.ignore_eos:
            return FinishReason.EOS, None
        if tokens and tokens[-1] in (
            *(stop.stop_token_ids or ()),
            *(stop.stop_token_ids_visible or ()),
            *(stop.stop_token_ids_hidden or ()),
        ):
            return FinishReason.STOP, tokens[-1]
        if len(tokens) >= self._work.max_tokens:
            return FinishReason.LENGTH, None
        raise EngineFailed("the engine ended the request without saying why")

    def _prompt_logprobs(self, output: CompletionOutput) -> Logprobs | None:
        """The engine's entry i is about the token after prompt token i; its last one is about the first new token."""
        asked, following = self._work.output.prompt_logprobs, self._work.token_ids[1:]
        if asked is None:
            return None
        if following and not output.prompt_logprobs:
            raise EngineFailed("prompt_logprobs: the engine has returned none")
        return _logprobs(following, (output.prompt_logprobs or ())[: len(following)], asked)


def _logprobs(tokens: Sequence[int], given: Sequence[TokenLogprob], asked: int) -> Logprobs:
    """Return one log-probability for each token, whatever `given` holds: a hole gets UNKNOWN_LOGPROB."""
    entries = [given[at] if at < len(given) else None for at in range(len(tokens))]
    chosen = tuple(_chosen(token, entry) for token, entry in zip(tokens, entries, strict=True))
    top = tuple(_top(entry, asked) for entry in entries) if asked else ()
    return Logprobs(chosen, top)


def _chosen(token: int, entry: TokenLogprob) -> float:
    if isinstance(entry, Mapping):
        told = entry.get(token)
        return UNKNOWN_LOGPROB if told is None else _finite(told.logprob)
    return UNKNOWN_LOGPROB if entry is None else _finite(entry)


def _top(entry: TokenLogprob, asked: int) -> tuple[TopLogprob, ...]:
    """The best first. The chosen token may be among the entries without being among the best."""
    if not isinstance(entry, Mapping):
        return ()
    best = sorted(entry.items(), key=lambda item: (item[1].rank or math.inf, -_finite(item[1].logprob)))
    ranked = [TopLogprob(told.rank or at, token, _finite(told.logprob)) for at, (token, told) in enumerate(best, 1)]
    return tuple(place for place in ranked if place.rank <= asked)


def _finite(value: float) -> float:
    return min(0.0, max(UNKNOWN_LOGPROB, value)) if not math.isnan(value) else UNKNOWN_LOGPROB
