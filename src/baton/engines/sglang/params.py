"""From work to the fields of SGLang's requests, as plain values. Imports no SGLang."""

import json
import random
import re
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from baton.engines.sglang.compat import Dialect
from baton.errors import InvalidRequest, Unsupported
from baton.models.reasoning import ends_reasoning
from baton.ports.engine import Work
from baton.protocol.handoff import ROOM_BITS, Bootstrap, Consume, Handoff, LocalProbe, PrefillResult, Produce
from baton.protocol.media import MediaFile
from baton.protocol.requests import GuidedDecoding, Sampling

FAKE_HOST = "2.2.2.2"  # SGLang's bootstrap host for a request that transfers nothing
MIN_TOP_P = 1e-9
_ANY_DP_SIZE = 144403552893600  # a multiple of every number up to 36
ROOM_ZERO = (2**ROOM_BITS - 1) // _ANY_DP_SIZE * _ANY_DP_SIZE
_META = re.compile(r"([\\.^$*+?{}\[\]|()])")


class Setting(msgspec.Struct, frozen=True, kw_only=True):
    """How a started engine takes requests. One that `needs_bootstrap` runs disaggregated.

    `default_priority` is that of requests without one; None if the engine has no priorities.
    """

    dialect: Dialect
    needs_bootstrap: bool = False
    guided: bool = True
    seeds: bool = False
    diffusion: bool = False
    context: int = 0
    grammar_backend: str | None = None
    reasoning_end_token: int | None = None
    default_priority: int | None = None
    defaults: Mapping[str, Any] = {}


def request_fields(work: Work, rid: str, index: int, setting: Setting) -> dict[str, Any]:
    """Return one choice of `work` as the fields of SGLang's GenerateReqInput, media left out.

    Raises InvalidRequest or Unsupported for options that SGLang would accept and ignore.
    """
    prompt_logprobs, logprobs = work.output.prompt_logprobs, work.output.logprobs
    fields: dict[str, Any] = {
        "rid": rid,
        "input_ids": list(work.token_ids),
        "sampling_params": sampling_params(work, index, setting),
        "stream": True,
        "return_logprob": logprobs is not None or prompt_logprobs is not None,
        "top_logprobs_num": max(logprobs or 0, prompt_logprobs or 0),
        "logprob_start_len": -1 if prompt_logprobs is None else 0,
        "priority": work.priority or setting.default_priority,
        "lora_path": work.lora_name,
        "require_reasoning": _reasons(work, setting) or None,
        "max_thinking_tokens": work.stop.max_thinking_tokens,
        "external_trace_header": dict(work.trace_headers) or None,
        setting.dialect.dp_rank: work.dp_rank,
        setting.dialect.salt: work.cache_salt,
    }
    return fields | _bootstrap_fields(work.handoff, setting) | _prefill_rank(work, setting)


def _reasons(work: Work, setting: Setting) -> bool:
    """Return whether SGLang takes the first tokens for reasoning, which alone it holds to a budget."""
    if work.require_reasoning or work.stop.max_thinking_tokens is None:
        return work.require_reasoning
    guided = work.sampling.guided_decoding
    if guided is not None and guided.kinds():
        return False  # the guide applies from the first token
    return not ends_reasoning(work.token_ids, setting.reasoning_end_token)


def sampling_params(work: Work, index: int, setting: Setting) -> dict[str, Any]:
    """Return SGLang's sampling parameters. The model's defaults apply where the request sets nothing; 0 is a value."""
    if work.stop.min_tokens and not setting.guided:
        raise Unsupported("min_tokens: this engine runs without a tokenizer; start it with --sglang-guided")
    if setting.diffusion:
        _refuse_for_diffusion(work)
    chosen = {name: value for name, value in _requested(work, index, setting).items() if value is not None}
    guide = _guide(work.sampling.guided_decoding, setting)
    return {**setting.defaults, **chosen, **guide, "max_new_tokens": _max_new_tokens(work, setting), "n": 1}


def _max_new_tokens(work: Work, setting: Setting) -> int | None:
    """Return the limit; None leaves it to SGLang, which knows how many tokens the files of a prompt take."""
    has_files = any(isinstance(item, MediaFile) for item in work.media)
    return None if has_files and len(work.token_ids) + work.max_tokens >= setting.context else work.max_tokens


def _requested(work: Work, index: int, setting: Setting) -> dict[str, Any]:
    """Return what the request sets; None is left to the model's defaults."""
    sampling, stop = work.sampling, work.stop
    return {
        "temperature": sampling.temperature,
        "top_p": None if sampling.top_p is None else max(sampling.top_p, MIN_TOP_P),
        "top_k": -1 if sampling.top_k == 0 else sampling.top_k,
        "min_p": sampling.min_p,
        "presence_penalty": sampling.presence_penalty,
        "frequency_penalty": sampling.frequency_penalty,
        "repetition_penalty": sampling.repetition_penalty,
        "min_new_tokens": stop.min_tokens,
        "logit_bias": sampling.logit_bias,
        "sampling_seed": _seed(sampling, index, setting),
        "ignore_eos": stop.ignore_eos,
        "stop_regex": _stop_regex(work.stop.stop_regex),
        "stop_token_ids": sorted(stop_tokens(work) | eos_tokens(work)) or None,
    }


def _stop_regex(patterns: str | tuple[str, ...] | None) -> list[str] | None:
    return ([patterns] if isinstance(patterns, str) else list(patterns or ())) or None


def stop_tokens(work: Work) -> frozenset[int]:
    """Return the stop tokens of the request."""
    stop = work.stop
    lists = (stop.stop_token_ids, stop.stop_token_ids_visible, stop.stop_token_ids_hidden)
    return frozenset(token for tokens in lists for token in tokens or ())


def eos_tokens(work: Work) -> frozenset[int]:
    """Return the tokens that end the output because the model chose to."""
    return frozenset() if work.stop.ignore_eos else frozenset(work.eos_token_ids)


def adapter_stop_tokens(work: Work) -> frozenset[int]:
    """Return the stop tokens that the adapter applies: with ignore_eos, SGLang ignores every stop token."""
    return stop_tokens(work) if work.stop.ignore_eos else frozenset()


def _refuse_for_diffusion(work: Work) -> None:
    """Raise Unsupported for options that SGLang silently ignores for diffusion models.

    The output is greedy, as with a `top_k` of 1, which frontends add to a temperature of 0.
    """
    no_effect = {
        "temperature": (None, 0),
        "top_p": (None, 1),
        "top_k": (None, 0, -1, 1),
        "min_p": (None, 0),
        "presence_penalty": (None, 0),
        "frequency_penalty": (None, 0),
        "repetition_penalty": (None, 1),
    }
    asked = {name: getattr(work.sampling, name) for name in no_effect} | {"min_tokens": work.stop.min_tokens}
    for name, value in asked.items():
        if value not in no_effect.get(name, (None, 0)):
            raise Unsupported(f"{name}: {value} has no effect on a diffusion model in SGLang; leave it out")


def _seed(sampling: Sampling, index: int, setting: Setting) -> int | None:
    """Return the seed of one choice. Choices with equal seeds would be equal. Without sampling a seed is no option."""
    if sampling.seed is None or sampling.temperature == 0 or setting.diffusion:
        return None
    if not setting.seeds:
        raise Unsupported(
            "seed: SGLang follows seeds only with --enable-deterministic-inference; add it to the engine's arguments"
        )
    return (sampling.seed + index + 2**63) % 2**64 - 2**63


def _guide(guided: GuidedDecoding | None, setting: Setting) -> dict[str, str]:
    if guided is None or not (kinds := guided.kinds()):
        return {}
    _refuse_guide(guided, kinds, setting)
    match kinds[0]:
        case "json":
            return {"json_schema": _text(guided.json)}
        case "regex":
            return {"regex": _not_empty(guided.regex, "regex")}
        case "choice":
            return {"regex": _not_empty("|".join(f"({escape(choice)})" for choice in guided.choice or ()), "choice")}
        case "grammar":
            return {"ebnf": _not_empty(guided.grammar, "grammar")}
        case _:
            return {"structural_tag": _text(guided.structural_tag)}


def _refuse_guide(guided: GuidedDecoding, kinds: Sequence[str], setting: Setting) -> None:
    if not setting.guided:
        raise Unsupported("guided_decoding: this engine runs without a tokenizer; start it with --sglang-guided")
    if len(kinds) > 1:
        raise InvalidRequest(f"guided_decoding: one kind at a time, not {' and '.join(kinds)}")
    if guided.whitespace_pattern is not None:
        raise Unsupported("guided_decoding.whitespace_pattern: SGLang takes it as an argument, not with a request")
    if guided.backend not in (None, "auto", setting.grammar_backend):
        raise Unsupported(f"guided_decoding.backend: this engine uses {setting.grammar_backend}")


def escape(text: str) -> str:
    """Return a regular expression for exactly `text`. Grammar backends accept no escapes beyond these."""
    return _META.sub(r"\\\1", text)


def _not_empty(text: str | None, kind: str) -> str:
    """Raise InvalidRequest for an empty guide, which SGLang would ignore."""
    if not text:
        raise InvalidRequest(f"guided_decoding.{kind}: it is empty")
    return text


def _text(value: object) -> str:
    return value if isinstance(value, str) else json.dumps(value)


def _bootstrap_fields(handoff: Handoff | None, setting: Setting) -> dict[str, Any]:
    """Return the bootstrap address of this request.

    SGLang takes room 0 for none and waits for ever. Both sides use another room for it, of the same data-parallel rank,
    which is the remainder of the room.
    """
    place = _bootstrap_of(handoff, setting)
    if place is None:
        return {}
    return {"bootstrap_host": place.host, "bootstrap_port": place.port, "bootstrap_room": place.room or ROOM_ZERO}


def _prefill_rank(work: Work, setting: Setting) -> dict[str, Any]:
    """Return the rank of a prefill that was chosen by its room.

    Without it SGLang compares the room with the rank within attention data parallelism, which is 0 for every replica of
    plain data parallelism, and fails the rooms of all other ranks.
    """
    chosen = work.dp_rank is not None and isinstance(work.handoff, Produce) and setting.needs_bootstrap
    return {"disagg_prefill_dp_rank": work.dp_rank} if chosen and setting.dialect.dp_rank == "routed_dp_rank" else {}


def _bootstrap_of(handoff: Handoff | None, setting: Setting) -> Bootstrap | None:
    if not setting.needs_bootstrap:
        if isinstance(handoff, Produce | Consume):
            raise Unsupported("this engine neither produces nor consumes KV: its disaggregation mode is null")
        return None
    match handoff:
        case Produce(bootstrap=Bootstrap() as place) | Consume(source=Bootstrap() as place):
            return place
        case Consume(source=PrefillResult() as result):
            return _bootstrap_in(result)
        case LocalProbe():
            return Bootstrap(host=FAKE_HOST, port=0, room=random.getrandbits(ROOM_BITS))
        case _:
            raise InvalidRequest("this engine runs disaggregated, and the request has no bootstrap address")


def _bootstrap_in(result: PrefillResult) -> Bootstrap:
    try:
        return msgspec.convert(result.disaggregated_params, Bootstrap)
    except msgspec.ValidationError as error:
        raise InvalidRequest(f"prefill_result.disaggregated_params: {error}") from None
