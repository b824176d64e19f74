"""The sampling parameters of a request, validated once, with the model's defaults filled in. Knows no torch."""

import math
import secrets
from collections.abc import Iterable
from typing import Protocol, TypeVar

import msgspec

from baton.errors import InvalidRequest, Unsupported
from baton.models.defaults import SamplingDefaults
from baton.ports.engine import Work
from baton.protocol.outputs import FinishReason
from baton.protocol.requests import Sampling, StopConditions

T = TypeVar("T", int, float)

# Below this a softmax equals an argmax, and dividing by it loses digits.
MIN_TEMPERATURE = 1e-5
MAX_BIAS = 100.0


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True):
    """How one choice is sampled and when it ends. Every id in it is a token of the model."""

    temperature: float
    top_k: int  # 0 is off
    top_p: float
    min_p: float
    presence_penalty: float
    frequency_penalty: float
    repetition_penalty: float
    seed: int
    logit_bias: tuple[tuple[int, float], ...]
    bad_words: tuple[tuple[int, ...], ...]
    logprobs: int | None
    prompt_logprobs: int | None
    min_tokens: int
    max_tokens: int
    eos_token_ids: frozenset[int]
    stop_token_ids: frozenset[int]

    @property
    def greedy(self) -> bool:
        """Whether the token with the highest logit is taken."""
        return self.temperature < MIN_TEMPERATURE or self.top_k == 1 or self.top_p == 0.0

    @property
    def filters_tokens(self) -> bool:
        """Whether top_k or top_p exclude tokens."""
        return bool(self.top_k) or self.top_p < 1.0

    @property
    def has_penalties(self) -> bool:
        """Whether logits depend on the tokens so far."""
        return self.presence_penalty != 0.0 or self.frequency_penalty != 0.0 or self.repetition_penalty != 1.0

    @property
    def edits_logits(self) -> bool:
        """Whether the request changes logits in every step."""
        return bool(self.logit_bias) or bool(self.bad_words) or self.has_penalties

    @property
    def argmax_only(self) -> bool:
        """Whether the argmax of the raw logits is enough, once `min_tokens` are generated."""
        return self.greedy and not self.edits_logits and self.logprobs is None


class Guide(Protocol):
    """Constrains one sequence to its grammar. Used by one thread at a time."""

    @property
    def done(self) -> bool:
        """Whether the text is complete and only an end token can follow.

        The engine ends such a sequence with STOP, whatever `min_tokens` is. Without an end token in the model, `mask`
        raises from then on.
        """

    def mask(self) -> bytes:
        """Return one bit for each token of the model, lowest bit first; 1 means allowed. At least one is.

        Raises InvalidRequest if no token can follow, or if the grammar is too complex at this position.
        """

    def accept(self, token: int) -> None:
        """Advance by `token`, which the mask allows. Raises InvalidRequest as `mask` does."""


def make_sampling_params(work: Work, defaults: SamplingDefaults, vocab: int) -> SamplingParams:
    """Return how one choice of `work` is sampled. Raises InvalidRequest or Unsupported, naming the field."""
    sampling, stop = work.sampling, work.stop
    if sampling.use_beam_search:
        raise Unsupported("use_beam_search: this engine has no beam search")
    if stop.max_thinking_tokens is not None:
        raise Unsupported("max_thinking_tokens: this engine does not count thinking tokens separately")
    eos = () if stop.ignore_eos else (*work.eos_token_ids, *defaults.eos_token_ids)
    return SamplingParams(
        temperature=_within("temperature", _first(sampling.temperature, defaults.temperature, 1.0), 0.0, 100.0),
        top_k=_top_k(_first(sampling.top_k, defaults.top_k, 0), vocab),
        top_p=_within("top_p", _first(sampling.top_p, defaults.top_p, 1.0), 0.0, 1.0),
        min_p=_within("min_p", _first(sampling.min_p, defaults.min_p, 0.0), 0.0, 1.0),
        presence_penalty=_within("presence_penalty", sampling.presence_penalty or 0.0, -2.0, 2.0),
        frequency_penalty=_within("frequency_penalty", sampling.frequency_penalty or 0.0, -2.0, 2.0),
        repetition_penalty=_repetition(_first(sampling.repetition_penalty, defaults.repetition_penalty, 1.0)),
        seed=_seed(sampling.seed),
        logit_bias=_bias(sampling, vocab),
        bad_words=tuple(word for word in work.bad_words if max(word) < vocab),
        logprobs=_at_most(work.output.logprobs, vocab),
        prompt_logprobs=_at_most(work.output.prompt_logprobs, vocab),
        min_tokens=stop.min_tokens or 0,
        max_tokens=work.max_tokens,
        eos_token_ids=_known_tokens(eos, vocab),
        stop_token_ids=_known_tokens(_stop_tokens(stop), vocab),
    )


def finish_of(params: SamplingParams, token: int, generated: int) -> tuple[FinishReason, int | str | None] | None:
    """Return why a choice ends with `token`, its `generated`-th (from 1), and which stop matched; else None."""
    if generated >= params.min_tokens:
        if token in params.eos_token_ids:
            return FinishReason.EOS, None
        if token in params.stop_token_ids:
            return FinishReason.STOP, token
    if generated >= params.max_tokens:
        return FinishReason.LENGTH, None
    return None


def _first(requested: T | None, default: T | None, otherwise: T) -> T:
    if requested is not None:
        return requested
    return otherwise if default is None else default


def _at_most(requested: int | None, vocab: int) -> int | None:
    return None if requested is None else min(requested, vocab)


def _within(field: str, value: float, low: float, high: float) -> float:
    if not low <= value <= high:  # false for NaN too
        raise InvalidRequest(f"{field}: {value} is not between {low:g} and {high:g}")
    return value


def _top_k(value: int, vocab: int) -> int:
    if value < -1:
        raise InvalidRequest(f"top_k: {value} is not -1, 0 or a number of tokens")
    return value if 0 < value < vocab else 0


def _stop_tokens(stop: StopConditions) -> tuple[int, ...]:
    kinds = (stop.stop_token_ids, stop.stop_token_ids_visible, stop.stop_token_ids_hidden)
    return tuple(token for kind in kinds for token in kind or ())


def _known_tokens(tokens: Iterable[int], vocab: int) -> frozenset[int]:
    return frozenset(token for token in tokens if 0 <= token < vocab)


def _repetition(value: float) -> float:
    if not (math.isfinite(value) and value > 0.0):
        raise InvalidRequest(f"repetition_penalty: {value} is not a number above 0")
    return value


def _seed(requested: int | None) -> int:
    if requested is None:
        return secrets.randbits(63)
    if not -(2**63) <= requested < 2**63:
        raise InvalidRequest(f"seed: {requested} does not fit 64 bits")
    return requested


def _bias(sampling: Sampling, vocab: int) -> tuple[tuple[int, float], ...]:
    pairs = []
    for key, value in (sampling.logit_bias or {}).items():
        if not (key.isascii() and key.isdigit() and len(key) <= 10 and int(key) < vocab):
            raise InvalidRequest(f"logit_bias: {key[:32]!r} is not a token id of this model; it has {vocab}")
        _within(f"logit_bias of token {key}", value, -MAX_BIAS, MAX_BIAS)
        pairs.append((int(key), float(value)))
    if len(pairs) != len(dict(pairs)):
        raise InvalidRequest("logit_bias: a token is given twice")
    return tuple(pairs)
