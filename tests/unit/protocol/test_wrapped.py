"""The wrapped prefill request of the reference means what the flat one means."""

from typing import Any

import pytest

from baton.protocol.codec import DecodeError, decode_request
from baton.protocol.wrapped import decode_prefill_request

FLAT = {"token_ids": [1, 2], "sampling_options": {"temperature": 0.5}, "stop_conditions": {"max_tokens": 9}}


def test_a_flat_request_is_unchanged() -> None:
    assert decode_prefill_request(FLAT) == decode_request(FLAT)


def test_the_parameters_are_the_requests() -> None:
    params = {
        "temperature": 0.0,
        "top_k": -1,
        "max_new_tokens": 1,
        "min_new_tokens": 1,
        "ignore_eos": False,
        "stop_token_ids": [7],
        "sampling_seed": 3,
        "json_schema": "{}",
        "skip_special_tokens": True,
        "regex": None,
    }
    request = decode_prefill_request({"request": FLAT, "sampling_params": params, "data_parallel_rank": 2})
    assert request.token_ids == (1, 2)
    assert (request.sampling.temperature, request.sampling.top_k, request.sampling.seed) == (0.0, -1, 3)
    assert (request.stop.max_tokens, request.stop.min_tokens, request.stop.stop_token_ids) == (1, 1, (7,))
    assert request.stop.ignore_eos is False
    assert request.sampling.guided_decoding is not None
    assert request.sampling.guided_decoding.kinds() == ("json",)
    assert request.routing is not None
    assert request.routing.dp_rank == 2


def test_the_requests_own_options_are_the_default() -> None:
    request = decode_prefill_request({"request": {**FLAT, "routing": {"cache_salt": "a"}}})
    assert (request.sampling.temperature, request.stop.max_tokens, request.cache_salt) == (0.5, 9, "a")


def test_an_unknown_parameter_is_kept_to_be_refused_by_name() -> None:
    request = decode_prefill_request({"request": FLAT, "sampling_params": {"frobnicate": 1}})
    assert request.sampling.extra == {"frobnicate": 1}


@pytest.mark.parametrize(
    ("raw", "field"),
    [
        ({"request": []}, "request"),
        ({"request": {}, "sampling_params": []}, "sampling_params"),
        ({"request": {}}, "token_ids"),
        ({"request": {**FLAT, "routing": 1}, "data_parallel_rank": 1}, "routing"),
        ({"request": FLAT, "frobnicate": 1}, "frobnicate"),
        (None, "object"),
    ],
)
def test_what_does_not_decode_names_the_field(raw: Any, field: str) -> None:
    with pytest.raises(DecodeError, match=field):
        decode_prefill_request(raw)
