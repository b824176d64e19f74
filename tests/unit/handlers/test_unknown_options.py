"""Nothing is dropped in silence: every option of the wire contract is applied, refused by name, or has no effect."""

from typing import Any

import msgspec
import pytest

from baton.errors import InvalidRequest, Unsupported
from baton.handlers.admission import MAX_LOGIT_BIASES, MAX_PROMPT_LOGPROBS, MAX_STOP_TOKENS, admit
from baton.handlers.unknown_options import FRONTEND_KEYS
from baton.ports.engine import Capabilities, Work
from baton.protocol.codec import decode_request
from baton.protocol.extra import EXTRA_KEY
from baton.protocol.ids import RequestId
from baton.protocol.requests import GenerateRequest, GuidedDecoding, OutputOptions, Sampling, StopConditions
from baton.testing.fakes import SCRIPTED_INFO

END_OF_REASONING = 77
INFO = msgspec.structs.replace(
    SCRIPTED_INFO, context_length=40_000, vocab_size=None, reasoning_end_token=END_OF_REASONING
)
ALL = Capabilities(
    max_logprobs=20,
    prompt_logprobs=True,
    max_choices=128,
    guided=frozenset({"json", "regex", "choice", "grammar", "structural_tag"}),
    guides_after_reasoning=True,
    max_thinking_tokens=True,
    logit_bias=True,
    bad_words=True,
    stop_regex=True,
)
# Every option, with a value that has an effect. A field that is added to the contract must be added here.
APPLIED_BY_ENGINES: dict[str, dict[str, Any]] = {
    "stop_conditions": {
        "max_tokens": 5,
        "min_tokens": 1,
        "stop_token_ids": [7],
        "stop_token_ids_visible": [7],
        "stop_token_ids_hidden": [7],
        "ignore_eos": True,
        "max_thinking_tokens": 3,
        "stop_regex": "a+",
    },
    "sampling_options": {
        "n": 2,
        "presence_penalty": 0.5,
        "frequency_penalty": 0.5,
        "repetition_penalty": 1.5,
        "temperature": 0.5,
        "top_p": 0.5,
        "top_k": 5,
        "min_p": 0.5,
        "seed": 1,
        "guided_decoding": {"regex": "a"},
        "logit_bias": {"5": 1.0},
        "bad_words": ["a"],
    },
    "output_options": {"logprobs": 1, "prompt_logprobs": 1, "echo": True, "return_token_ids": True},
    "guided_decoding": {
        "json": {},
        "regex": "a",
        "choice": ["a"],
        "grammar": "a",
        "structural_tag": {},
        "backend": "auto",
        "whitespace_pattern": "",
    },
}
APPLIED_BY_FRONTEND: dict[str, set[str]] = {
    "stop_conditions": {"stop"},
    "sampling_options": {"include_stop_str_in_output"},
    "output_options": {"skip_special_tokens", "formatted_prompt", "return_tokens_as_token_ids"},
}
REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"sampling_options": {"best_of": 2}}, "best_of"),
    ({"sampling_options": {"use_beam_search": True}}, "use_beam_search"),
    ({"sampling_options": {"length_penalty": 2.0}}, "length_penalty"),
    ({"sampling_options": {"spaces": False}}, "sampling_options.spaces"),
    ({"stop_conditions": {"until": 1}}, "stop_conditions.until"),
    ({"output_options": {"hidden_states": True}}, "output_options.hidden_states"),
    ({"sampling_options": {"guided_decoding": {"json": {}, "lazy": True}}}, "guided_decoding.lazy"),
    ({"sampling_options": {"guided_decoding": {"whitespace_pattern": ""}}}, "guided_decoding"),
    ({"prompt_embeds": "AAAA"}, "prompt_embeds"),
    ({"mm_processor_kwargs": {"size": 3}}, "mm_processor_kwargs"),
    ({"media_io_kwargs": {"fps": 3}}, "media_io_kwargs"),
    ({"multi_modal_uuids": {"image": ["a"]}}, "multi_modal_uuids"),
    ({"max_tokens": 5}, "max_tokens"),
    ({"temperature": 0.5}, "temperature"),
    ({"something": 0}, "something"),
    ({"extra_args": {"sampling_options": {"allowed_token_ids": [1]}}}, "allowed_token_ids"),
    ({"extra_args": {"sampling_options": {"bad_words_token_ids": [[1]]}}}, "bad_words_token_ids"),
    ({"extra_args": {"sampling_options": {"logprob_token_ids": [1]}}}, "logprob_token_ids"),
    ({"extra_args": {"sampling_options": {"detokenize": False}}}, "detokenize"),
]
NO_EFFECT: list[dict[str, Any]] = [
    {"sampling_options": {"length_penalty": 1.0, "use_beam_search": False, "best_of": 1, "spaces": None}},
    {"multi_modal_uuids": {}, "mm_processor_kwargs": {}, "require_reasoning": False, "prompt_embeds": None},
    {"require_reasoning": True},
    {"extra_args": {"sampling_options": {"detokenize": True, "allowed_token_ids": None}, "nvext": {}}},
    {key: {"any": "value"} for key in FRONTEND_KEYS},
]


def build(wire: dict[str, Any], can: Capabilities = ALL) -> Work:
    request = decode_request({"token_ids": [1, 2, 3], **wire})
    return admit(request, RequestId("r.1"), INFO, can, {})


@pytest.mark.parametrize(
    ("section", "struct"),
    [
        ("stop_conditions", StopConditions),
        ("sampling_options", Sampling),
        ("output_options", OutputOptions),
        ("guided_decoding", GuidedDecoding),
    ],
)
def test_every_option_of_the_contract_is_accounted_for(section: str, struct: type[msgspec.Struct]) -> None:
    refused = {field for wire, _ in REFUSED for field in wire.get(section, {})}
    known = {field.encode_name for field in msgspec.structs.fields(struct)} - {EXTRA_KEY}
    accounted = APPLIED_BY_ENGINES[section].keys() | APPLIED_BY_FRONTEND.get(section, set()) | (refused & known)
    assert known - accounted == set()


@pytest.mark.parametrize("section", ["stop_conditions", "sampling_options", "output_options"])
def test_options_that_engines_apply_reach_the_engine(section: str) -> None:
    for option, value in APPLIED_BY_ENGINES[section].items():
        name = {"stop_conditions": "stop", "sampling_options": "sampling", "output_options": "output"}[section]
        struct = getattr(build({section: {option: value}}), name)
        assert getattr(struct, option) is not None, option


@pytest.mark.parametrize(("wire", "name"), REFUSED, ids=[name for _, name in REFUSED])
def test_an_option_that_nothing_applies_is_refused_by_name(wire: dict[str, Any], name: str) -> None:
    with pytest.raises(Unsupported, match=f"^{name}: "):
        build(wire)


@pytest.mark.parametrize("wire", NO_EFFECT)
def test_an_option_without_effect_is_accepted(wire: dict[str, Any]) -> None:
    build(wire)


def test_options_that_an_engine_cannot_apply_are_refused_by_name() -> None:
    lesser = msgspec.structs.replace(ALL, guides_after_reasoning=False, max_thinking_tokens=False)
    guided = {"sampling_options": {"guided_decoding": {"json": {}}}}
    with pytest.raises(Unsupported, match=r"^require_reasoning: "):
        build({**guided, "require_reasoning": True}, lesser)
    with pytest.raises(Unsupported, match=r"^max_thinking_tokens: "):
        build({"stop_conditions": {"max_thinking_tokens": 3}}, lesser)
    assert build({**guided, "require_reasoning": True}).require_reasoning


def test_a_prompt_that_ends_reasoning_is_guided_from_the_first_token() -> None:
    lesser = msgspec.structs.replace(ALL, guides_after_reasoning=False)
    guided = {"sampling_options": {"guided_decoding": {"json": {}}}, "require_reasoning": True}
    assert not build({**guided, "token_ids": [5, END_OF_REASONING, 6]}, lesser).require_reasoning
    assert build({**guided, "token_ids": [END_OF_REASONING, *range(20)]}).require_reasoning


def test_a_forwarded_request_keeps_its_keys() -> None:
    request = decode_request({"token_ids": [1], "require_reasoning": True, "something": 1})
    assert isinstance(request, GenerateRequest)
    assert (request.require_reasoning, request.extra) == (True, {"something": 1})


@pytest.mark.parametrize(
    ("wire", "name"),
    [
        ({"token_ids": [1] * 30_000, "output_options": {"prompt_logprobs": 2}}, "prompt_logprobs"),
        ({"stop_conditions": {"stop_token_ids": [1] * (MAX_STOP_TOKENS + 1)}}, "stop_token_ids"),
        ({"sampling_options": {"logit_bias": {str(n): 1.0 for n in range(MAX_LOGIT_BIASES + 1)}}}, "logit_bias"),
    ],
)
def test_a_request_that_costs_more_than_its_size_is_refused(wire: dict[str, Any], name: str) -> None:
    with pytest.raises(InvalidRequest, match=f"^{name}: "):
        build(wire)


def test_prompt_logprobs_are_limited_as_logprobs_are() -> None:
    with pytest.raises(Unsupported, match=r"^prompt_logprobs: this engine returns at most 20"):
        build({"output_options": {"prompt_logprobs": 21}})
    build({"token_ids": [1] * (MAX_PROMPT_LOGPROBS // 2), "output_options": {"prompt_logprobs": 1}})
