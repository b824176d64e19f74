"""From work to SGLang's words. Imports no SGLang: what it returns are the fields of a request, as plain values."""

import json
import random
import re
from collections.abc import Mapping
from typing import Any

import msgspec

from baton.engines.sglang.compat import Dialect
from baton.errors import InvalidRequest, Unsupported
from baton.ports.engine import Work
from baton.protocol.handoff import ROOM_BITS, Bootstrap, Consume, Handoff, LocalProbe, PrefillResult, Produce
from baton.protocol.requests import GuidedDecoding, Sampling

NOBODY = "2.2.2.2"  # SGLang's name for the other side of a hand-off that is only tried
LEAST_TOP_P = 1e-9
_ANY_DP_SIZE = 144403552893600  # what every number up to 36 divides
ROOM_ZERO = (2**ROOM_BITS - 1) // _ANY_DP_SIZE * _ANY_DP_SIZE
_META = re.compile(r"([\\.^$*+?{}\[\]|()])")


class Setting(msgspec.Struct, frozen=True, kw_only=True):
    """What of a started engine decides how work is put to it."""

    dialect: Dialect
    part: str
    guided: bool = True
    seeds: bool = False
    diffusion: bool = False
    grammar_backend: str | None = None
    defaults: Mapping[str, Any] = {}


def request_fields(work: Work, rid: str, index: int, setting: Setting) -> dict[str, Any]:
    """Return one choice of `work` as the fields of SGLang's GenerateReqInput, media left out.

    Raises InvalidRequest or Unsupported for what SGLang would take and not do.
    """
    scored, asked = work.output.prompt_logprobs, work.output.logprobs
    fields: dict[str, Any] = {
        "rid": rid,
        "input_ids": list(work.token_ids),
        "sampling_params": sampling_params(work, index, setting),
        "stream": True,
        "return_logprob": asked is not None or scored is not None,
        "top_logprobs_num": max(asked or 0, scored or 0),
        "logprob_start_len": -1 if scored is None else 0,
        "priority": work.priority or None,
        "lora_path": work.lora_name,
        "max_thinking_tokens": work.stop.max_thinking_tokens,
        "external_trace_header": dict(work.trace_headers) or None,
        setting.dialect.dp_rank: work.dp_rank,
        setting.dialect.salt: work.cache_salt,
    }
    return fields | _meeting(work.handoff, setting.part)


def sampling_params(work: Work, index: int, setting: Setting) -> dict[str, Any]:
    """Return how to choose tokens, and when to stop. What a request leaves open is the model's own; 0 is a value."""
    sampling, stop = work.sampling, work.stop
    if stop.min_tokens and not setting.guided:
        raise Unsupported("min_tokens: this engine runs without a tokenizer; start it with --sglang-guided true")
    if setting.diffusion:
        _refuse_choosing(sampling)
    asked = {
        "temperature": sampling.temperature,
        "top_p": None if sampling.top_p is None else max(sampling.top_p, LEAST_TOP_P),
        "top_k": -1 if sampling.top_k == 0 else sampling.top_k,
        "min_p": sampling.min_p,
        "presence_penalty": sampling.presence_penalty,
        "frequency_penalty": sampling.frequency_penalty,
        "repetition_penalty": sampling.repetition_penalty,
        "min_new_tokens": stop.min_tokens,
        "logit_bias": sampling.logit_bias,
        "sampling_seed": _seed(sampling, index, setting),
        "ignore_eos": stop.ignore_eos,
        "stop_token_ids": sorted(stop_tokens(work) | ends_of(work)) or None,
    }
    chosen = {name: value for name, value in asked.items() if value is not None}
    guide = _guide(sampling.guided_decoding, setting)
    return {**setting.defaults, **chosen, **guide, "max_new_tokens": work.max_tokens, "n": 1}


def stop_tokens(work: Work) -> frozenset[int]:
    """Return the tokens that the client, or the frontend in its name, wants to stop at."""
    stop = work.stop
    lists = (stop.stop_token_ids, stop.stop_token_ids_visible, stop.stop_token_ids_hidden)
    return frozenset(token for tokens in lists for token in tokens or ())


def ends_of(work: Work) -> frozenset[int]:
    """Return the tokens that end an answer of their own accord."""
    return frozenset() if work.stop.ignore_eos else frozenset(work.eos_token_ids)


def cut_at(work: Work) -> frozenset[int]:
    """Return the tokens that the adapter stops at itself: told to ignore the end, SGLang looks at no stop token."""
    return stop_tokens(work) if work.stop.ignore_eos else frozenset()


def _refuse_choosing(sampling: Sampling) -> None:
    """A diffusion model fills in what it is surest of, and SGLang would not say that it looks at nothing else."""
    no_effect = {
        "temperature": (None, 0),
        "top_p": (None, 1),
        "top_k": (None, 0, -1),
        "min_p": (None, 0),
        "presence_penalty": (None, 0),
        "frequency_penalty": (None, 0),
        "repetition_penalty": (None, 1),
    }
    for name, values in no_effect.items():
        if (asked := getattr(sampling, name)) not in values:
            raise Unsupported(f"{name}: {asked} has no effect on a diffusion model; leave it out")


def _seed(sampling: Sampling, index: int, setting: Setting) -> int | None:
    """Return the seed of one choice. Choices with one seed would all be the same."""
    if sampling.seed is None or sampling.temperature == 0:
        return None
    if not setting.seeds:
        raise Unsupported(
            "seed: SGLang follows seeds only with --enable-deterministic-inference; add it to the engine's arguments"
        )
    return (sampling.seed + index + 2**63) % 2**64 - 2**63


def _guide(guided: GuidedDecoding | None, setting: Setting) -> dict[str, str]:
    kinds = guided.kinds() if guided is not None else ()
    if guided is None or not kinds:
        return {}
    if not setting.guided:
        raise Unsupported("guided_decoding: this engine runs without a tokenizer; start it with --sglang-guided true")
    if len(kinds) > 1:
        raise InvalidRequest(f"guided_decoding: one shape at a time, not {' and '.join(kinds)}")
    if guided.whitespace_pattern is not None:
        raise Unsupported("guided_decoding.whitespace_pattern: SGLang takes it as an argument, not with a request")
    if guided.backend not in (None, "auto", setting.grammar_backend):
        raise Unsupported(f"guided_decoding.backend: this engine guides with {setting.grammar_backend}")
    match kinds[0]:
        case "json":
            return {"json_schema": _text(guided.json)}
        case "regex":
            return {"regex": _shape(guided.regex, "regex")}
        case "choice":
            return {"regex": _shape("|".join(f"({escape(choice)})" for choice in guided.choice or ()), "choice")}
        case "grammar":
            return {"ebnf": _shape(guided.grammar, "grammar")}
        case _:
            return {"structural_tag": _text(guided.structural_tag)}


def escape(text: str) -> str:
    """Return a regular expression for exactly `text`. Only what has a meaning is escaped: grammars know no more."""
    return _META.sub(r"\\\1", text)


def _shape(text: str | None, kind: str) -> str:
    """SGLang takes an empty shape for none."""
    if not text:
        raise InvalidRequest(f"guided_decoding.{kind}: it is empty")
    return text


def _text(value: object) -> str:
    return value if isinstance(value, str) else json.dumps(value)


def _meeting(handoff: Handoff | None, part: str) -> dict[str, Any]:
    match handoff, part:
        case None, "whole":
            return {}
        case Produce(bootstrap=Bootstrap() as place), "prefill":
            return _at(place)
        case Consume(source=Bootstrap() as place), "decode":
            return _at(place)
        case Consume(source=PrefillResult() as result), "decode":
            return _at(_place_in(result))
        case LocalProbe(), "prefill" | "decode":
            return _at(Bootstrap(host=NOBODY, port=0, room=random.getrandbits(ROOM_BITS)))
        case LocalProbe(), "whole":
            return {}
        case _, "prefill":
            raise InvalidRequest("this engine only computes prompts for others; the work names no place to meet")
        case _, "decode":
            raise Unsupported("this engine only goes on from KV of prefill workers, and the work names none")
        case _:
            raise Unsupported("this engine neither gives nor takes KV; start it as prefill or decode")


def _place_in(result: PrefillResult) -> Bootstrap:
    try:
        return msgspec.convert(result.disaggregated_params, Bootstrap)
    except msgspec.ValidationError as error:
        raise InvalidRequest(f"prefill_result.disaggregated_params: {error}") from None


def _at(place: Bootstrap) -> dict[str, Any]:
    """Return where to meet. SGLang takes room 0 for none and waits there for ever; another is as good, if both take it
    and it is of the same data-parallel rank, which is what is left of it after a division."""
    return {"bootstrap_host": place.host, "bootstrap_port": place.port, "bootstrap_room": place.room or ROOM_ZERO}
