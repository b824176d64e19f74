"""From SGLang's chunks to outputs: the new tokens of each, and the finish reason. Imports no SGLang."""

from collections.abc import Sequence
from typing import Any, NamedTuple

from baton.engines.sglang.params import adapter_stop_tokens, stop_tokens
from baton.engines.sglang.prompt_times import prompt_progress
from baton.engines.sglang.sglang_types import Chunk
from baton.errors import BatonError, Cancelled, EngineFailed, InvalidRequest, Overloaded, PeerLost
from baton.ports.engine import Work
from baton.protocol.handoff import Consume, Produce
from baton.protocol.outputs import Finished, FinishReason, Logprobs, PromptProgress, TopLogprob

BAD_REQUEST = range(400, 500)
BUSY = (429, 503)


class ChoiceUpdate(NamedTuple):
    """What one chunk adds to a choice. With `cut`, the engine still generates and must be aborted.

    The first tokens come with the `cached_tokens` of the prompt and its `progress`, those of the first choice with its
    log-probabilities.
    """

    token_ids: list[int]
    logprobs: Logprobs | None = None
    end: Finished | BatonError | None = None
    cut: bool = False
    cached_tokens: int | None = None
    prompt_logprobs: Logprobs | None = None
    progress: tuple[PromptProgress, ...] = ()


class Choice:
    """Reads the chunks of one choice, which carry everything so far or, `incremental`, only what is new."""

    def __init__(self, work: Work, index: int, incremental: bool) -> None:
        self._work = work
        self._index = index
        self._incremental = incremental
        self._cuts = adapter_stop_tokens(work)
        self._is_plain = not self._cuts and work.output.logprobs is None and work.output.prompt_logprobs is None
        self._seen = 0

    def read(self, chunk: Chunk) -> ChoiceUpdate:
        """Return what is new. A chunk may have neither tokens nor a finish reason: a sign of life."""
        meta = chunk.get("meta_info") or {}
        finish = meta.get("finish_reason")
        if finish is not None and finish.get("type") == "abort":
            # SGLang repeats the last token when it ends a request early.
            return ChoiceUpdate([], None, self._failure(finish))
        ids = chunk.get("output_ids") or []
        start = 0 if self._incremental else self._seen
        cached, progress = self._prompt(meta)
        fresh = list(ids[start:])
        if self._is_plain and finish is None:  # nearly always
            self._seen += len(fresh)
            return ChoiceUpdate(fresh, cached_tokens=cached, progress=progress)
        kept, cut = self._kept(fresh)
        end = self._cut_end(kept, meta) if cut else self._end(finish, meta)
        logprobs = self._logprobs(meta, start, len(kept))
        scores = self._prompt_logprobs(meta, len(kept))
        self._seen += len(kept)
        return ChoiceUpdate(kept, logprobs, end, cut and finish is None, cached, scores, progress)

    def _prompt(self, meta: Chunk) -> tuple[int | None, tuple[PromptProgress, ...]]:
        """Return what comes with the first tokens: how much of the prompt was cached, and what was done with it."""
        if self._seen:
            return None, ()
        return meta.get("cached_tokens"), prompt_progress(meta, len(self._work.token_ids))

    def _kept(self, fresh: list[int]) -> tuple[list[int], bool]:
        """Return the tokens up to a stop token that SGLang ignores, and whether there is one."""
        if self._cuts:
            least = self._work.stop.min_tokens or 0
            for position, token in enumerate(fresh):
                if token in self._cuts and self._seen + position + 1 >= least:
                    return fresh[: position + 1], True
        return fresh, False

    def _cut_end(self, kept: list[int], meta: Chunk) -> Finished:
        return self._finished(FinishReason.STOP, meta, kept[-1])

    def _end(self, finish: Chunk | None, meta: Chunk) -> Finished | None:
        if finish is None:
            return None
        if finish.get("type") == "length":
            return self._finished(FinishReason.LENGTH, meta)
        matched = finish.get("matched")
        token = matched[-1] if isinstance(matched, list) and matched else matched
        if isinstance(token, str) or (token in stop_tokens(self._work) and token not in self._work.eos_token_ids):
            return self._finished(FinishReason.STOP, meta, token)
        return self._finished(FinishReason.EOS, meta)

    def _finished(self, reason: FinishReason, meta: Chunk, stop_reason: int | str | None = None) -> Finished:
        return Finished(reason, self._index, stop_reason, meta.get("cached_tokens"))

    def _failure(self, finish: Chunk) -> BatonError:
        message, status = str(finish.get("message") or "aborted"), finish.get("status_code")
        if status is None:
            return Cancelled(message)
        if status in BUSY:
            return Overloaded(message)
        if status in BAD_REQUEST:
            return InvalidRequest(message)
        if isinstance(self._work.handoff, Produce | Consume) and self._seen == 0:
            # Before the first token only the transfer between the two engines can have failed.
            return PeerLost(f"the KV handoff failed: {message}")
        return EngineFailed(message)

    def _logprobs(self, meta: Chunk, start: int, count: int) -> Logprobs | None:
        asked = self._work.output.logprobs
        if asked is None or count == 0:
            return None
        chosen = (meta.get("output_token_logprobs") or [])[start : start + count]
        if len(chosen) != count:
            raise EngineFailed(f"SGLang returned {len(chosen)} log-probabilities for {count} tokens")
        top = (meta.get("output_top_logprobs") or [])[start : start + count] if asked else []
        return Logprobs(tuple(_score(entry) for entry in chosen), _alternatives(top, asked))

    def _prompt_logprobs(self, meta: Chunk, count: int) -> Logprobs | None:
        asked, following = self._work.output.prompt_logprobs, len(self._work.token_ids) - 1
        if asked is None or self._index or self._seen or not count:
            return None
        chosen = (meta.get("input_token_logprobs") or [])[1:]
        if len(chosen) != following:
            raise EngineFailed(f"SGLang returned {len(chosen)} log-probabilities for {following} tokens of the prompt")
        top = (meta.get("input_top_logprobs") or [])[1:] if asked else []
        return Logprobs(tuple(_score(entry) for entry in chosen), _alternatives(top, asked))


def _score(entry: Sequence[Any]) -> float:
    return float(entry[0]) if entry[0] is not None else 0.0


def _alternatives(positions: Sequence[Any], asked: int) -> tuple[tuple[TopLogprob, ...], ...]:
    return tuple(
        tuple(TopLogprob(rank, int(entry[1]), float(entry[0])) for rank, entry in enumerate(position[:asked], 1))
        for position in (position or () for position in positions)
    )
