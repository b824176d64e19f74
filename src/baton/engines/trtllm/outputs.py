"""From results to a stream: a result has all tokens so far, a stream gets the new ones.

The tokens that have been pushed are counted for each choice. The engine may remove tokens again, those of a stop
sequence; pushed tokens stay pushed, and none is pushed twice.
"""

import math
from collections.abc import Mapping, Sequence

from baton.engine_kit.output_stream import OutputStream
from baton.engines.trtllm import handoff
from baton.engines.trtllm.compat import Library
from baton.engines.trtllm.generate_args import has_media
from baton.engines.trtllm.library_types import CompletionOutput, DisaggregatedParams, Result, TokenLogprob
from baton.engines.trtllm.params import stop_tokens
from baton.engines.trtllm.prompt_times import prompt_progress
from baton.errors import EngineFailed
from baton.ports.engine import Work
from baton.protocol.handoff import Produce
from baton.protocol.outputs import FinishReason, Logprobs, TopLogprob

# Stands for a log-probability that is missing or not a number: every token must have one, and JSON has no infinity. No
# sampled token is this unlikely.
UNKNOWN_LOGPROB = -9999.0


class ResultReader:
    """Pushes the results of one request to its stream.

    The prompt and one choice have at most `context` tokens. `sent` are the parameters of the submitted request.
    """

    def __init__(
        self, work: Work, stream: OutputStream, library: Library, context: int, sent: DisaggregatedParams | None = None
    ) -> None:
        self._work = work
        self._stream = stream
        self._library = library
        self._context = context
        self._sent = sent
        self._pushed: dict[int, int] = {}
        self._ended: set[int] = set()
        self._scored = work.output.prompt_logprobs is None
        # The engine computes greedy choices once, because they are equal.
        self._copies = range(work.sampling.n or 1)

    def push(self, result: Result) -> None:
        """Push what is new in `result`. Raises EngineFailed when it is not valid."""
        outputs = result.outputs
        if isinstance(self._work.handoff, Produce) and result.finished and outputs:
            prompt = result.prompt_token_ids if has_media(self._work) else None
            self._stream.hand_off(handoff.encode(outputs[0].disaggregated_params, self._library, self._sent, prompt))
        for output in outputs:
            for index in self._copies if len(outputs) == 1 else (output.index,):
                self._push_choice(output, index, result)

    def _push_choice(self, output: CompletionOutput, index: int, result: Result) -> None:
        if index in self._ended:
            return
        ends = result.finished or output.finish_reason is not None
        prompt_tokens = len(result.prompt_token_ids)  # with the tokens that stand for media
        cached = min(prompt_tokens, max(0, result.cached_tokens))
        if not self._pushed:
            self._stream.cached(cached, prompt_tokens)
        if index == 0 and not self._scored and (output.prompt_logprobs or ends):
            self._score(output)
        self._push_new(output, index, ends)
        if ends:
            self._ended.add(index)
            if index == 0:
                self._report_progress(output, prompt_tokens - cached)
            reason, stop_reason = self._finish_reason(output, prompt_tokens)
            self._stream.finish(reason, index, stop_reason, cached)

    def _report_progress(self, output: CompletionOutput, computed_tokens: int) -> None:
        for progress in prompt_progress(output.request_perf_metrics, computed_tokens):
            self._stream.progressed(progress)

    def _push_new(self, output: CompletionOutput, index: int, ends: bool) -> None:
        tokens, start = output.token_ids or [], self._pushed.get(index, 0)
        end, logprobs = len(tokens), None
        if self._work.output.logprobs is not None:
            given = output.logprobs or []
            if ends and tokens and not given:
                raise EngineFailed("logprobs: the engine has returned none")
            if not ends:
                end = min(end, len(given))  # a token waits for its log-probability
            if end > start:
                logprobs = _logprobs(tokens[start:end], given[start:end], self._work.output.logprobs)
        if end > start:
            self._pushed[index] = end
            self._stream.push(list(tokens[start:end]), index, logprobs)

    def _finish_reason(self, output: CompletionOutput, prompt_tokens: int) -> tuple[FinishReason, int | str | None]:
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
                return FinishReason.LENGTH, None  # the one token of a context-only request
            case None:
                return self._infer_finish_reason(output, prompt_tokens)
            case reason:
                raise EngineFailed(f"the engine ended the request with {reason!r}")

    def _infer_finish_reason(
        self, output: CompletionOutput, prompt_tokens: int
    ) -> tuple[FinishReason, int | str | None]:
        """Of several choices the engine gives a reason for the last one only; the others follow from their tokens."""
        tokens, stop = output.token_ids or [], self._work.stop
        last = tokens[-1] if tokens else None
        if last in self._work.eos_token_ids and not stop.ignore_eos:
            return FinishReason.EOS, None
        if last in stop_tokens(stop):
            return FinishReason.STOP, last
        if len(tokens) >= min(self._work.max_tokens, self._context - prompt_tokens):
            return FinishReason.LENGTH, None
        raise EngineFailed("the engine ended the request without a reason")

    def _score(self, output: CompletionOutput) -> None:
        """The engine's entry i is of the token after prompt token i; its last entry is of the first new token."""
        requested, following = self._work.output.prompt_logprobs or 0, self._work.token_ids[1:]
        if following and not output.prompt_logprobs:
            raise EngineFailed("prompt_logprobs: the engine has returned none")
        self._scored = True
        self._stream.scored(_logprobs(following, (output.prompt_logprobs or ())[: len(following)], requested))


def _logprobs(tokens: Sequence[int], given: Sequence[TokenLogprob], requested: int) -> Logprobs:
    """Return one log-probability for each token; a missing one is UNKNOWN_LOGPROB."""
    entries = [given[at] if at < len(given) else None for at in range(len(tokens))]
    chosen = tuple(_chosen(token, entry) for token, entry in zip(tokens, entries, strict=True))
    top = tuple(_top(entry, requested) for entry in entries) if requested else ()
    return Logprobs(chosen, top)


def _chosen(token: int, entry: TokenLogprob) -> float:
    if isinstance(entry, Mapping):
        found = entry.get(token)
        return UNKNOWN_LOGPROB if found is None else _finite(found.logprob)
    return UNKNOWN_LOGPROB if entry is None else _finite(entry)


def _top(entry: TokenLogprob, requested: int) -> tuple[TopLogprob, ...]:
    """The best first. The chosen token may be an entry without being among the best."""
    if not isinstance(entry, Mapping):
        return ()
    best = sorted(entry.items(), key=lambda item: (item[1].rank or math.inf, -_finite(item[1].logprob)))
    ranked = [TopLogprob(each.rank or at, token, _finite(each.logprob)) for at, (token, each) in enumerate(best, 1)]
    return tuple(each for each in ranked if each.rank <= requested)


def _finite(value: float) -> float:
    return min(0.0, max(UNKNOWN_LOGPROB, value)) if not math.isnan(value) else UNKNOWN_LOGPROB
