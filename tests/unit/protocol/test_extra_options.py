"""Options that the frontend has no field for: each arrives where the protocol has it, or is refused by name."""

import pytest

from baton.errors import Unsupported
from baton.handlers.admission import admit
from baton.ports.engine import Capabilities
from baton.protocol.codec import DecodeError, decode_request, encode_request
from baton.protocol.extra_options import PREFIX, collect_extra_options, with_extra_options
from baton.protocol.ids import RequestId
from baton.protocol.media import MediaItem
from baton.protocol.requests import (
    DiffusionOptions,
    GenerateRequest,
    GuidedDecoding,
    Remasking,
    Sampling,
    StopConditions,
)
from baton.protocol.text import TextRequest, decode_text
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
    "diffusion": {"steps": 4, "threshold": 0.5},
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
    assert request.diffusion == DiffusionOptions(steps=4, threshold=0.5)
    assert request.annotations == ("token_ids",)
    assert wire["stop_conditions"] == {"max_tokens": 1, "ignore_eos": True}, "the message is not changed"
    assert decode_request(encode_request(request)) == request


def test_a_request_that_was_moved_does_not_return_its_prompt_again() -> None:
    options = {"max_tokens": 9, "echo": True, "prompt_logprobs": 1, "return_token_ids": True, "logit_bias": {"5": 1}}
    for limit, returned in ((9, True), (7, None)):
        wire = {
            "token_ids": [1, 2],
            "stop_conditions": {"max_tokens": limit},
            "annotations": with_extra_options(None, options),
        }
        request = decode_request(wire)
        assert (request.stop.max_tokens, request.output.echo, request.output.return_token_ids) == (
            limit,
            returned,
            returned,
        )
        assert request.sampling.logit_bias == {"5": 1.0}


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
        ("[" * 100_000, "annotations"),
    ],
)
def test_options_that_cannot_be_read_are_refused(options: str, reason: str) -> None:
    with pytest.raises(DecodeError, match=reason):
        decode_request({"token_ids": [1], "annotations": [PREFIX + options]})


def test_in_text_format_an_option_counts_as_a_field_of_the_body() -> None:
    def decode(options: dict[str, object]) -> TextRequest:
        annotations = with_extra_options(["mine"], options)
        return decode_text({"model": "m", "prompt": "a", "nvext": {"annotations": annotations}})

    request = decode({"logit_bias": {"5": 1}})
    assert (request.logit_bias, request.nvext) == ({"5": 1.0}, {"annotations": ["mine"]})
    assert decode({"diffusion": {"block_length": 8}}).diffusion == DiffusionOptions(block_length=8)
    assert decode({"echo": True, "bad_words": ["a"]}).token_format_only() == ["echo", "bad_words"]
    with pytest.raises(DecodeError, match="annotations"):
        decode_text({"model": "m", "prompt": "a", "nvext": {"annotations": [PREFIX + "{"]}})


def test_collected_options_are_placed_again() -> None:
    request = GenerateRequest(
        token_ids=(1, 2),
        stop=StopConditions(max_tokens=5, min_tokens=2),
        sampling=Sampling(logit_bias={"7": 1.0}, guided_decoding=GuidedDecoding(json={"default": None})),
        media={"image_url": (MediaItem(url="https://example.com/a.png"),)},
        diffusion=DiffusionOptions(remasking=Remasking.STATIC),
        extra_args={"nvext": {"cache_salt": None}},
    )
    wire = collect_extra_options(encode_request(request))
    assert wire["stop_conditions"] == {"max_tokens": 5}
    assert "diffusion" not in wire
    assert wire["sampling_options"] == {"guided_decoding": {"json": {"default": None}}}
    assert wire["multi_modal_data"] == {"image_url": [{"Url": "https://example.com/a.png"}]}
    assert decode_request(wire) == request
