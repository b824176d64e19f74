"""Options that the frontend has no field for: each arrives where the protocol has it, or is refused by name."""

import pytest

from baton.errors import Unsupported
from baton.handlers.admission import admit
from baton.ports.engine import Capabilities
from baton.protocol.codec import DecodeError, decode_request, encode_request
from baton.protocol.extra_options import PREFIX, with_extra_options
from baton.protocol.ids import RequestId
from baton.testing.fakes import SCRIPTED_INFO

OPTIONS: dict[str, object] = {
    "logit_bias": {"5": -100},
    "bad_words": ["damn"],
    "max_tokens": 0,
    "stop_regex": "a+",
    "echo": True,
    "prompt_logprobs": 3,
    "return_token_ids": True,
    "structural_tag": {"type": "structural_tag"},
}


def test_each_option_arrives_in_its_place() -> None:
    wire = {
        "token_ids": [1, 2],
        "stop_conditions": {"max_tokens": 1, "ignore_eos": True},
        "sampling_options": {"guided_decoding": None, "seed": 1},
        "annotations": with_extra_options(["token_ids"], OPTIONS),
    }
    request = decode_request(wire)
    assert (request.stop.max_tokens, request.stop.ignore_eos, request.stop.stop_regex) == (0, True, "a+")
    assert (request.sampling.logit_bias, request.sampling.bad_words) == ({"5": -100.0}, ("damn",))
    assert request.sampling.seed == 1
    assert request.sampling.guided_decoding is not None
    assert request.sampling.guided_decoding.structural_tag == {"type": "structural_tag"}
    assert (request.output.echo, request.output.prompt_logprobs, request.output.return_token_ids) == (True, 3, True)
    assert request.annotations == ("token_ids",)
    assert wire["stop_conditions"] == {"max_tokens": 1, "ignore_eos": True}, "the message is not changed"
    assert decode_request(encode_request(request)) == request


def test_an_option_without_a_place_is_refused_by_name() -> None:
    request = decode_request({"token_ids": [1], "annotations": with_extra_options(None, {"moon_phase": 0.5})})
    with pytest.raises(Unsupported, match="moon_phase"):
        admit(request, RequestId("r"), SCRIPTED_INFO, Capabilities(), {})


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ("{", "annotations"),
        ("[]", "an object"),
        ('{"logit_bias": 3}', "logit_bias"),
        ('{"max_tokens": -1}', "max_tokens"),
        ("[" * 100_000, "annotations"),
    ],
)
def test_options_that_cannot_be_read_are_refused(options: str, reason: str) -> None:
    with pytest.raises(DecodeError, match=reason):
        decode_request({"token_ids": [1], "annotations": [PREFIX + options]})
