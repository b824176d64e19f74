"""From work to the library's words: sampling, guidance, priority, adapters. Pure; what it cannot say, it refuses."""

import math
import re
from collections.abc import Mapping

import msgspec

from baton.engines.trtllm.compat import Library
from baton.engines.trtllm.library_types import GuidedFields, SamplingFields13
from baton.errors import InvalidRequest, Unsupported
from baton.models.defaults import SamplingDefaults
from baton.ports.engine import Work
from baton.protocol.media import MediaHandles
from baton.protocol.requests import GuidedDecoding, Sampling

MAX_LOGPROBS = 20
MAX_CHOICES = 128
GUIDES = frozenset({"json", "regex", "choice", "grammar", "structural_tag"})
SEED_BITS = 64
NO_END = -1


class Model(msgspec.Struct, frozen=True, kw_only=True):
    """What requests are checked against."""

    vocabulary: int
    defaults: SamplingDefaults
    thinking: bool = False  # the engine knows where thinking ends


def is_greedy(sampling: Sampling) -> bool:
    """Whether every choice is the same, for there is no chance in it."""
    return sampling.temperature == 0.0 or sampling.top_k == 1 or sampling.top_p == 0.0


def engine_choices(work: Work) -> int:
    """Return how many choices the engine computes. It refuses several greedy ones, which would be one and the same."""
    return 1 if is_greedy(work.sampling) else work.sampling.n or 1


def engine_priority(priority: int) -> float:
    """Return a priority of the engine's, between 0 and 1, for one of the router's, where more is sooner.

    0 is the engine's own default of 0.5; beyond that it grows with `priority` and never reaches the ends: 1 is 0.75,
    -1 is 0.25, 9 is 0.95.
    """
    return 0.5 + priority / (2 * (1 + abs(priority)))


def sampling_params(work: Work, model: Model, library: Library) -> object:
    """Return SamplingParams for `work`. Raises InvalidRequest or Unsupported, naming the field."""
    _refuse(work)
    fields = SamplingFields13(
        max_tokens=work.max_tokens,
        detokenize=False,
        # Stop tokens stay in the answer, as with every other engine; who shows it knows which to hide.
        include_stop_str_in_output=True,
        **_stops(work),
        **_chances(work.sampling, model.defaults),
    )
    choices = engine_choices(work)
    if choices > 1:
        fields["n"] = fields["best_of"] = choices
    least = 0 if library.features.zero_logprobs else 1  # where 0 is "none", one alternative is asked for and left out
    if work.output.logprobs is not None:
        fields["logprobs"] = max(least, work.output.logprobs)
    if work.output.prompt_logprobs is not None:
        fields["prompt_logprobs"] = max(least, work.output.prompt_logprobs)
    if work.sampling.logit_bias:
        fields["embedding_bias"] = library.tensor(_bias(work.sampling.logit_bias, model.vocabulary))
    if work.stop.max_thinking_tokens is not None:
        if not (library.features.thinking_budget and model.thinking):
            raise Unsupported("max_thinking_tokens: this engine does not count thinking apart")
        fields["thinking_token_budget"] = work.stop.max_thinking_tokens
    if (guided := work.sampling.guided_decoding) is not None and guided.kinds():
        fields["guided_decoding"] = library.guided_decoding_params(**_guided(guided))
    try:
        return library.sampling_params(**fields)
    except (ValueError, TypeError) as error:
        raise InvalidRequest(f"sampling_options: {' '.join(str(error).split())}") from error


def _refuse(work: Work) -> None:
    sampling = work.sampling
    if sampling.use_beam_search:
        raise Unsupported("use_beam_search: this engine has no beam search")
    if sampling.best_of not in (None, 1, sampling.n or 1):
        raise Unsupported("best_of: this engine does not rank candidates")
    if not all(isinstance(item, MediaHandles) for item in work.media):
        raise Unsupported("multi_modal_data: this engine takes media from encode workers only")


def _stops(work: Work) -> SamplingFields13:
    ends = tuple(dict.fromkeys(work.eos_token_ids))
    stop = work.stop
    # The engine has one end token; the others are stop tokens to it, unless no end counts.
    asked = (
        *(stop.stop_token_ids or ()),
        *(stop.stop_token_ids_visible or ()),
        *(stop.stop_token_ids_hidden or ()),
        *(() if stop.ignore_eos else ends[1:]),
    )
    fields = SamplingFields13(
        end_id=ends[0] if ends else NO_END,
        ignore_eos=bool(stop.ignore_eos),
        stop_token_ids=list(dict.fromkeys(asked)) or None,
    )
    if stop.min_tokens is not None:
        fields["min_tokens"] = stop.min_tokens
    return fields


def _chances(sampling: Sampling, defaults: SamplingDefaults) -> SamplingFields13:
    """Zeros are values. A temperature is always set: with none of the three set the engine would be greedy."""
    asked: dict[str, float | int | None] = {
        "temperature": _first(sampling.temperature, defaults.temperature, 1.0),
        "top_p": _first(sampling.top_p, defaults.top_p),
        "min_p": _first(sampling.min_p, defaults.min_p),
        "repetition_penalty": _first(sampling.repetition_penalty, defaults.repetition_penalty),
        "presence_penalty": sampling.presence_penalty,
        "frequency_penalty": sampling.frequency_penalty,
        "length_penalty": sampling.length_penalty,
    }
    for name, value in asked.items():
        if value is not None and not math.isfinite(value):
            raise InvalidRequest(f"{name}: {value} is not a number")
    fields = msgspec.convert({name: value for name, value in asked.items() if value is not None}, SamplingFields13)
    top_k = sampling.top_k if sampling.top_k is not None else defaults.top_k
    if top_k is not None:
        fields["top_k"] = max(0, top_k)  # -1 is every token, which is 0 to the engine
    if sampling.seed is not None:
        fields["seed"] = sampling.seed % 2**SEED_BITS
    return fields


def _first(*values: float | None) -> float | None:
    return next((value for value in values if value is not None), None)


def _guided(guided: GuidedDecoding) -> GuidedFields:
    kinds = guided.kinds()
    if len(kinds) > 1:
        raise InvalidRequest(f"guided_decoding: {' and '.join(kinds)} cannot both hold; ask for one")
    if guided.whitespace_pattern is not None:
        raise Unsupported("guided_decoding.whitespace_pattern: this engine has its own")
    if guided.json is not None:
        return GuidedFields(json=guided.json if isinstance(guided.json, str | dict) else _json(guided.json))
    if guided.regex is not None:
        return GuidedFields(regex=guided.regex)
    if guided.choice is not None:
        if not guided.choice:
            raise InvalidRequest("guided_decoding.choice: there is nothing to choose from")
        return GuidedFields(regex="(" + "|".join(re.escape(choice) for choice in guided.choice) + ")")
    if guided.grammar is not None:
        return GuidedFields(grammar=guided.grammar)
    tag = guided.structural_tag
    return GuidedFields(structural_tag=tag if isinstance(tag, str) else _json(tag))


def _json(value: object) -> str:
    return msgspec.json.encode(value).decode()


def _bias(asked: Mapping[str, float], vocabulary: int) -> list[float]:
    bias = [0.0] * vocabulary
    for key, value in asked.items():
        if not (key.isascii() and key.isdigit() and len(key) <= 10 and int(key) < vocabulary):
            raise InvalidRequest(f"logit_bias: {key[:32]!r} is not a token id of this model; it has {vocabulary}")
        if not -100.0 <= value <= 100.0:
            raise InvalidRequest(f"logit_bias of token {key}: {value} is not between -100 and 100")
        bias[int(key)] = float(value)
    return bias
