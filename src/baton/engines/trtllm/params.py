"""From work to the library's SamplingParams and priority. Pure; refuses what they cannot express."""

import math
import re
from collections.abc import Mapping, Sequence

import msgspec

from baton.engines.trtllm.compat import Library
from baton.engines.trtllm.library_types import GuidedFields, SamplingFields13
from baton.errors import InvalidRequest, Unsupported
from baton.models.defaults import SamplingDefaults
from baton.ports.engine import Work
from baton.protocol.requests import GuidedDecoding, OutputOptions, Sampling, StopConditions

MAX_LOGPROBS = 20
MAX_CHOICES = 128
GUIDES = frozenset({"json", "regex", "choice", "grammar", "structural_tag"})
SEED_BITS = 64
NO_END = -1


class Model(msgspec.Struct, frozen=True, kw_only=True):
    """What the parameters of a request depend on."""

    vocab_size: int
    defaults: SamplingDefaults
    thinking: bool = False  # the engine has a reasoning parser
    ignores_options: bool = False  # the engine's sampler accepts penalties, min_p and seeds, and ignores them


def is_greedy(sampling: Sampling) -> bool:
    """Whether every choice is the same."""
    return sampling.temperature == 0.0 or sampling.top_k == 1 or sampling.top_p == 0.0


def engine_choices(work: Work) -> int:
    """Return how many choices the engine computes. It rejects several greedy ones, which would be equal."""
    return 1 if is_greedy(work.sampling) else work.sampling.n or 1


def engine_priority(priority: int) -> float:
    """Return the engine's priority, between 0 and 1, for a router's priority; higher is scheduled first.

    0 becomes the engine's default, 0.5. The result grows with `priority` and never reaches 0 or 1: 1 becomes 0.75, -1
    becomes 0.25, 9 becomes 0.95.
    """
    return 0.5 + priority / (2 * (1 + abs(priority)))


def stop_tokens(stop: StopConditions) -> tuple[int, ...]:
    """Return every stop token of a request, except those of the model."""
    return (
        *(stop.stop_token_ids or ()),
        *(stop.stop_token_ids_visible or ()),
        *(stop.stop_token_ids_hidden or ()),
    )


def sampling_params(work: Work, model: Model, library: Library) -> object:
    """Return SamplingParams for `work`. Raises InvalidRequest or Unsupported, naming the field."""
    if model.ignores_options:
        _refuse_ignored(work.sampling)
    fields = SamplingFields13(
        max_tokens=work.max_tokens,
        detokenize=False,
        add_special_tokens=False,  # prompts are complete, also those that reach the library as text
        # Stop tokens stay in the output, as with every other engine; the frontend hides them.
        include_stop_str_in_output=True,
        **_stop_fields(work),
        **_sampling_fields(work.sampling, model.defaults),
        **_logprob_fields(work.output, library),
        **_thinking_fields(work.stop, model, library),
    )
    choices = engine_choices(work)
    if choices > 1:
        fields["n"] = fields["best_of"] = choices
    if work.sampling.logit_bias:
        fields["embedding_bias"] = library.tensor(_bias(work.sampling.logit_bias, model.vocab_size))
    if (guided := work.sampling.guided_decoding) is not None and guided.kinds():
        fields["guided_decoding"] = library.guided_decoding_params(**_guided_fields(guided))
    try:
        return library.sampling_params(**fields)
    except (ValueError, TypeError) as error:
        raise InvalidRequest(f"sampling_options: {' '.join(str(error).split())}") from error


def _refuse_ignored(sampling: Sampling) -> None:
    """Raise Unsupported for an option that the engine's sampler would ignore. The model's defaults are no request."""
    effects = {
        "min_p": sampling.min_p or None,
        "presence_penalty": sampling.presence_penalty or None,
        "frequency_penalty": sampling.frequency_penalty or None,
        "repetition_penalty": None if sampling.repetition_penalty == 1 else sampling.repetition_penalty,
        "seed": None if is_greedy(sampling) else sampling.seed,
    }
    if asked := [name for name, value in effects.items() if value is not None]:
        raise Unsupported(
            f"{asked[0]}: the default sampler of TensorRT-LLM 1.2 ignores it; add --sampler_type TRTLLMSampler to the"
            " engine's arguments, or use 1.3"
        )


def _stop_fields(work: Work) -> SamplingFields13:
    ends = tuple(dict.fromkeys(work.eos_token_ids))
    stop = work.stop
    # The engine has one end token; further ones are stop tokens, unless end tokens are ignored.
    tokens = (*stop_tokens(stop), *(() if stop.ignore_eos else ends[1:]))
    fields = SamplingFields13(
        end_id=ends[0] if ends else NO_END,
        ignore_eos=bool(stop.ignore_eos),
        stop_token_ids=list(dict.fromkeys(tokens)) or None,
    )
    if stop.min_tokens is not None:
        fields["min_tokens"] = stop.min_tokens
    return fields


def _logprob_fields(output: OutputOptions, library: Library) -> SamplingFields13:
    # Where 0 means no log-probabilities, one alternative is requested and left out of the output.
    least = 0 if library.features.zero_logprobs else 1
    fields = SamplingFields13()
    if output.logprobs is not None:
        fields["logprobs"] = max(least, output.logprobs)
    if output.prompt_logprobs is not None:
        fields["prompt_logprobs"] = max(least, output.prompt_logprobs)
    return fields


def _thinking_fields(stop: StopConditions, model: Model, library: Library) -> SamplingFields13:
    if stop.max_thinking_tokens is None:
        return {}
    if not (library.features.thinking_budget and model.thinking):
        raise Unsupported("max_thinking_tokens: this engine has no thinking budget")
    return {"thinking_token_budget": stop.max_thinking_tokens}


def _sampling_fields(sampling: Sampling, defaults: SamplingDefaults) -> SamplingFields13:
    """Zeros are values. The temperature is always set: without temperature, top_p and top_k the engine is greedy."""
    values: dict[str, float | int | None] = {
        "temperature": _first(sampling.temperature, defaults.temperature, 1.0),
        "top_p": _first(sampling.top_p, defaults.top_p),
        "min_p": _first(sampling.min_p, defaults.min_p),
        "repetition_penalty": _first(sampling.repetition_penalty, defaults.repetition_penalty),
        "presence_penalty": sampling.presence_penalty,
        "frequency_penalty": sampling.frequency_penalty,
        "length_penalty": sampling.length_penalty,
    }
    for name, value in values.items():
        if value is not None and not math.isfinite(value):
            raise InvalidRequest(f"{name}: {value} is not a number")
    fields = msgspec.convert({name: value for name, value in values.items() if value is not None}, SamplingFields13)
    top_k = sampling.top_k if sampling.top_k is not None else defaults.top_k
    if top_k is not None:
        fields["top_k"] = max(0, top_k)  # -1 is every token, which is 0 to the engine
    if sampling.seed is not None:
        fields["seed"] = sampling.seed % 2**SEED_BITS
    return fields


def _first(*values: float | None) -> float | None:
    return next((value for value in values if value is not None), None)


def _guided_fields(guided: GuidedDecoding) -> GuidedFields:
    kinds = guided.kinds()
    if len(kinds) > 1:
        raise InvalidRequest(f"guided_decoding: {' and '.join(kinds)} exclude each other; set one")
    if guided.whitespace_pattern is not None:
        raise Unsupported("guided_decoding.whitespace_pattern: this engine has its own")
    if guided.json is not None:
        return GuidedFields(json=guided.json if isinstance(guided.json, str | dict) else _json(guided.json))
    if guided.regex is not None:
        return GuidedFields(regex=guided.regex)
    if guided.choice is not None:
        return GuidedFields(regex=_choice_regex(guided.choice))
    if guided.grammar is not None:
        return GuidedFields(grammar=guided.grammar)
    tag = guided.structural_tag
    return GuidedFields(structural_tag=tag if isinstance(tag, str) else _json(tag))


def _choice_regex(choices: Sequence[str]) -> str:
    if not choices:
        raise InvalidRequest("guided_decoding.choice: the list of choices is empty")
    return "(" + "|".join(re.escape(choice) for choice in choices) + ")"


def _json(value: object) -> str:
    return msgspec.json.encode(value).decode()


def _bias(logit_bias: Mapping[str, float], vocab_size: int) -> list[float]:
    bias = [0.0] * vocab_size
    for key, value in logit_bias.items():
        if not -100.0 <= value <= 100.0:
            raise InvalidRequest(f"logit_bias of token {key}: {value} is not between -100 and 100")
        bias[int(key)] = float(value)
    return bias
