"""From wire to values and back: any input is decoded or refused by name, and nothing is lost on the way through."""

import copy
import math
from contextlib import suppress
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton.protocol.codec import DecodeError, decode_chunk, decode_request, encode_chunk, encode_request, encode_usage
from baton.protocol.outputs import Chunk, FinishReason, Logprobs, TopLogprob, Usage

# What a frontend can put on the wire.
SCALARS = st.none() | st.booleans() | st.integers() | st.floats() | st.text() | st.binary()
VALUES = st.recursive(SCALARS, lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner), max_leaves=12)
SANE = st.recursive(
    st.booleans() | st.integers(-(2**60), 2**60) | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=6,
)

KEYS = [
    "token_ids",
    "model",
    "stop_conditions",
    "sampling_options",
    "output_options",
    "eos_token_ids",
    "annotations",
    "routing",
    "prefill_result",
    "bootstrap_info",
    "multi_modal_data",
    "extra_args",
]
UNKNOWN = st.dictionaries(st.text(max_size=6).map("new_".__add__), SANE, max_size=2)


def section(**fields: st.SearchStrategy[Any]) -> st.SearchStrategy[dict[str, Any]]:
    """A section with some of its fields, and some that this version does not know."""
    known = st.fixed_dictionaries({}, optional=fields)
    return st.tuples(known, UNKNOWN).map(lambda pair: {**pair[1], **pair[0]})


TOKENS = st.lists(st.integers(0, 2**32 - 1), max_size=8)
GUIDED = section(json=SANE, regex=st.text(), choice=st.lists(st.text(), max_size=3), grammar=st.none())
REQUESTS = st.tuples(
    section(
        model=st.text(),
        stop_conditions=section(
            max_tokens=st.none() | st.integers(1, 2**32 - 1),
            stop=st.none() | st.lists(st.text(), max_size=3),
            stop_token_ids_hidden=TOKENS,
            ignore_eos=st.none() | st.booleans(),
        ),
        sampling_options=section(
            n=st.none() | st.integers(1, 128),
            temperature=st.none() | st.floats(0, 100),
            seed=st.integers(-(2**63), 2**63 - 1),
            guided_decoding=st.none() | GUIDED,
            logit_bias=st.dictionaries(st.text(max_size=3), st.floats(-100, 100), max_size=3),
        ),
        output_options=section(logprobs=st.none() | st.integers(0, 20), skip_special_tokens=st.booleans()),
        eos_token_ids=TOKENS,
        annotations=st.lists(st.text(), max_size=3),
        routing=st.none() | section(dp_rank=st.integers(0, 8), lora_name=st.none() | st.text()),
        bootstrap_info=st.fixed_dictionaries(
            {
                "bootstrap_host": st.text(),
                "bootstrap_port": st.integers(0, 65535),
                "bootstrap_room": st.integers(0, 2**63 - 1),
                "handoff_id": st.none() | st.binary() | st.text(),
            }
        ),
        multi_modal_data=st.dictionaries(
            st.text(max_size=4), st.lists(st.text() | st.fixed_dictionaries({"Url": st.text()}), max_size=2)
        ),
        extra_args=st.dictionaries(st.text(), SANE, max_size=3),
    ),
    TOKENS,
).map(lambda pair: {**pair[0], "token_ids": pair[1]})


@given(VALUES)
def test_any_value_decodes_or_is_refused(value: object) -> None:
    decodes_or_is_refused(value)


@given(st.dictionaries(st.sampled_from(KEYS), VALUES))
def test_any_value_under_known_keys_decodes_or_is_refused(value: object) -> None:
    decodes_or_is_refused(value)


@given(st.sampled_from(KEYS[2:5]), st.dictionaries(st.sampled_from(["max_tokens", "n", "seed", "logprobs"]), VALUES))
def test_any_value_in_a_section_decodes_or_is_refused(name: str, value: object) -> None:
    decodes_or_is_refused({"token_ids": [1], name: value})


def decodes_or_is_refused(value: object) -> None:
    with suppress(DecodeError):
        decode_request(value)


@given(REQUESTS)
def test_a_forwarded_request_decodes_to_the_same_value(wire: dict[str, object]) -> None:
    request = decode_request(wire)
    assert decode_request(encode_request(request)) == request


@given(REQUESTS)
def test_forwarding_keeps_every_key(wire: dict[str, object]) -> None:
    assert lost(wire, encode_request(decode_request(wire))) == []


def lost(before: object, after: object, path: str = "$") -> list[str]:
    """Return the paths of what `before` has and `after` has not. Null is the same as absent."""
    if isinstance(before, dict):
        if not isinstance(after, dict):
            return [path]
        return [
            missing
            for key, value in before.items()
            if value is not None
            for missing in (lost(value, after[key], f"{path}.{key}") if key in after else [f"{path}.{key}"])
        ]
    if path.startswith("$.multi_modal_data"):
        return []
    same = list(after) == list(before) if isinstance(before, list) and isinstance(after, tuple) else before == after
    return [] if same else [path]


LEVELS: dict[str, dict[str, Any]] = {
    "$": {},
    "stop_conditions": {"stop_conditions": {}},
    "sampling_options": {"sampling_options": {}},
    "sampling_options.guided_decoding": {"sampling_options": {"guided_decoding": {"regex": "a+"}}},
    "output_options": {"output_options": {}},
    "routing": {"routing": {}},
    "prefill_result": {"prefill_result": {"disaggregated_params": {}}},
    "bootstrap_info": {"bootstrap_info": {"bootstrap_host": "h", "bootstrap_port": 1, "bootstrap_room": 0}},
}


@pytest.mark.parametrize("level", LEVELS)
def test_unknown_fields_are_kept_at_every_level(level: str) -> None:
    wire: dict[str, Any] = copy.deepcopy({"token_ids": [1], **LEVELS[level]})
    place = wire
    for name in level.split(".") if level != "$" else ():
        place = place[name]
    place["from_the_future"] = {"deep": [1, None]}
    forwarded: Any = encode_request(decode_request(wire))
    for name in level.split(".") if level != "$" else ():
        forwarded = forwarded[name]
    assert forwarded["from_the_future"] == {"deep": [1, None]}


def test_unknown_fields_of_a_media_item_are_kept() -> None:
    items = [{"Url": "https://example.org/a.png", "detail": "high"}, {"Decoded": {"shape": [1]}, "uuid": "x"}]
    forwarded: Any = encode_request(decode_request({"token_ids": [1], "multi_modal_data": {"image_url": items}}))
    kept = [
        {key: value for key, value in item.items() if value is not None}
        for item in forwarded["multi_modal_data"]["image_url"]
    ]
    assert kept == items


@pytest.mark.parametrize("place", ["extra_args", "multi_modal_data", "prefill_result"])
def test_a_key_that_looks_like_our_own_does_not_break_forwarding(place: str) -> None:
    inner: dict[str, Any] = {"<extra>": ["https://example.org/a.png"]}
    if place == "prefill_result":
        inner = {"disaggregated_params": {"<extra>": 1}}
    wire = {"token_ids": [1], place: inner}
    request = decode_request(wire)
    assert decode_request(encode_request(request)) == request


@pytest.mark.parametrize(
    ("wire", "path"),
    [
        ({}, "token_ids"),
        ({"token_ids": None}, "token_ids"),
        ({"token_ids": "text"}, "$.token_ids"),
        ({"token_ids": [1, -1]}, "$.token_ids[1]"),
        ({"token_ids": [2**32]}, "$.token_ids[0]"),
        ({"token_ids": [True]}, "$.token_ids[0]"),
        ({"token_ids": [1], "model": 5}, "$.model"),
        ({"token_ids": [1], "stop_conditions": {"max_tokens": -1}}, "$.stop_conditions.max_tokens"),
        ({"token_ids": [1], "stop_conditions": []}, "$.stop_conditions"),
        ({"token_ids": [1], "sampling_options": {"n": 0}}, "$.sampling_options.n"),
        ({"token_ids": [1], "sampling_options": {"temperature": -0.1}}, "$.sampling_options.temperature"),
        ({"token_ids": [1], "sampling_options": {"temperature": math.nan}}, "$.sampling_options.temperature"),
        ({"token_ids": [1], "sampling_options": {"top_p": 1.5}}, "$.sampling_options.top_p"),
        ({"token_ids": [1], "sampling_options": {"guided_decoding": 1}}, "$.sampling_options.guided_decoding"),
        ({"token_ids": [1], "output_options": {"logprobs": -1}}, "$.output_options.logprobs"),
        ({"token_ids": [1], "routing": {"dp_rank": "first"}}, "$.routing.dp_rank"),
        ({"token_ids": [1], "bootstrap_info": {}}, "$.bootstrap_info"),
        ({"token_ids": [1], "prefill_result": {}}, "$.prefill_result"),
        ({"token_ids": [1], "multi_modal_data": {"image_url": [{}]}}, "$.multi_modal_data"),
    ],
)
def test_a_refusal_names_the_field_and_its_path(wire: dict[str, object], path: str) -> None:
    with pytest.raises(DecodeError) as refusal:
        decode_request(wire)
    assert path in str(refusal.value)


@pytest.mark.parametrize("value", [None, [], "text", 5, b"bytes"])
def test_a_request_that_is_no_object_is_refused(value: object) -> None:
    with pytest.raises(DecodeError, match="Expected `object`"):
        decode_request(value)


def test_null_is_the_same_as_absent() -> None:
    nulls = {name: None for name in KEYS if name != "token_ids"}
    assert decode_request({"token_ids": [1], **nulls}) == decode_request({"token_ids": [1]})
    nested = {"stop_conditions": {"max_tokens": None}, "sampling_options": {"seed": None, "n": None}}
    assert decode_request({"token_ids": [1], **nested}) == decode_request({"token_ids": [1]})


def test_zero_is_a_value_and_not_unset() -> None:
    request = decode_request(
        {"token_ids": [1], "sampling_options": {"temperature": 0, "seed": 0}, "output_options": {"logprobs": 0}}
    )
    assert (request.sampling.temperature, request.sampling.seed, request.output.logprobs) == (0.0, 0, 0)


def test_decoding_does_not_change_its_input() -> None:
    wire = {"token_ids": [1], "model": None, "multi_modal_data": {"image_url": ["https://example.org/a.png"]}}
    decode_request(wire)
    assert wire == {"token_ids": [1], "model": None, "multi_modal_data": {"image_url": ["https://example.org/a.png"]}}


def test_for_prefill_asks_for_one_token_of_one_choice_and_keeps_the_rest() -> None:
    request = decode_request(
        {
            "token_ids": [1, 2],
            "stop_conditions": {"max_tokens": 50, "min_tokens": 9, "new": 1},
            "sampling_options": {"n": 4, "best_of": 4, "temperature": 0.5},
            "routing": {"dp_rank": 1},
        }
    )
    prefill = request.for_prefill()
    assert (prefill.stop.max_tokens, prefill.stop.min_tokens, prefill.choices) == (1, None, 1)
    assert prefill.sampling.temperature == 0.5
    assert prefill.stop.extra == {"new": 1}
    assert (prefill.routing, prefill.token_ids) == (request.routing, request.token_ids)
    assert request.choices == 4


def test_unset_fields_of_a_chunk_are_omitted() -> None:
    assert encode_chunk(Chunk([1, 2], 1)) == {"token_ids": [1, 2], "index": 1}


@pytest.mark.parametrize("reason", FinishReason)
def test_only_legal_finish_reasons_reach_the_wire(reason: FinishReason) -> None:
    wire = encode_chunk(Chunk([], finish_reason=reason))["finish_reason"]
    assert type(wire) is str
    assert wire in {"eos", "length", "stop", "cancelled", "content_filter"}


def test_the_last_chunk_carries_the_stop_reason_and_the_usage() -> None:
    wire = encode_chunk(Chunk([7], 0, None, FinishReason.STOP, 7, Usage(3, 4, 2)))
    assert wire["stop_reason"] == 7
    assert wire["completion_usage"] == {
        "prompt_tokens": 3,
        "completion_tokens": 4,
        "total_tokens": 7,
        "prompt_tokens_details": {"cached_tokens": 2},
    }


def test_unknown_cached_tokens_are_null_and_zero_is_zero() -> None:
    assert encode_usage(Usage(3, 4))["prompt_tokens_details"] is None
    assert encode_usage(Usage(3, 4, 0))["prompt_tokens_details"] == {"cached_tokens": 0}


def test_log_probabilities_are_encoded_one_to_one_with_tokens() -> None:
    top = ((TopLogprob(1, 10, -0.1, "a"), TopLogprob(2, 11, -2.0)), (TopLogprob(1, 12, -0.3),))
    wire = encode_chunk(Chunk([10, 12], 0, Logprobs((-0.1, -0.3), top)))
    assert wire["log_probs"] == [-0.1, -0.3]
    assert wire["top_logprobs"] == [
        [
            {"rank": 1, "token_id": 10, "token": "a", "logprob": -0.1},
            {"rank": 2, "token_id": 11, "token": None, "logprob": -2.0},
        ],
        [{"rank": 1, "token_id": 12, "token": None, "logprob": -0.3}],
    ]
    assert "top_logprobs" not in encode_chunk(Chunk([10], 0, Logprobs((-0.1,))))


def test_handoff_parameters_are_encoded_unchanged() -> None:
    wire = encode_chunk(Chunk([], disaggregated_params={"room": 0}))
    assert wire["disaggregated_params"] == {"room": 0}


def test_d30_requests_cannot_be_changed() -> None:
    wire: dict[str, object] = {"token_ids": [1, 2], "stop_conditions": {"max_tokens": 9, "min_tokens": 2}}
    before = copy.deepcopy(wire)
    request = decode_request(wire)
    prefill = request.for_prefill()
    assert (request.stop.max_tokens, prefill.stop.max_tokens) == (9, 1)
    assert wire == before, "a retry sends the request unchanged"
    for part in (request, request.stop, request.sampling):
        with pytest.raises(AttributeError):
            part.extra = {}  # type: ignore[misc]


def test_a_chunk_of_another_worker_is_read_with_or_without_nulls() -> None:
    logprobs = Logprobs((-0.5,), ((TopLogprob(1, 7, -0.5, None),),))
    chunk = Chunk([7], 1, logprobs, FinishReason.LENGTH, "END", Usage(3, 1, 2))
    wire = encode_chunk(chunk)
    assert decode_chunk(wire) == chunk
    assert decode_chunk({**wire, "text": None, "cum_log_probs": None}) == chunk
    assert decode_chunk({"token_ids": None, "index": None, "finish_reason": None}) == Chunk([])


@pytest.mark.parametrize("reason", [{"error": "out of memory"}, "error", "no such reason"])
def test_a_chunk_that_reports_a_failure_is_no_chunk(reason: object) -> None:
    with pytest.raises(DecodeError, match="the worker failed"):
        decode_chunk({"token_ids": [], "finish_reason": reason})
