"""Admission: one check for every role, which names the field that exceeds a limit; the work keeps every option."""

from typing import Any

import msgspec
import pytest

from baton.errors import BatonError, ContextTooLong, InvalidRequest, Unsupported
from baton.handlers.admission import admit, admit_embed, admit_encode
from baton.ports.engine import Capabilities, Work
from baton.protocol.codec import decode_request
from baton.protocol.handoff import Produce
from baton.protocol.ids import RequestId
from baton.protocol.requests import GenerateRequest, Remasking, Sampling
from baton.testing.fakes import SCRIPTED_INFO

INFO = msgspec.structs.replace(SCRIPTED_INFO, context_length=100, vocab_size=1000, eos_token_ids=(9,))
ANY_VOCABULARY = msgspec.structs.replace(INFO, vocab_size=None)
EVERYTHING = Capabilities(
    max_logprobs=20,
    prompt_logprobs=True,
    max_choices=128,
    guided=frozenset({"json", "regex", "choice", "grammar", "structural_tag"}),
    logit_bias=True,
    lora=True,
    modalities=frozenset({"text", "image"}),
    dp_size=4,
)


def build(wire: dict[str, Any], can: Capabilities = EVERYTHING) -> Work:
    request = decode_request({"token_ids": [1, 2, 3], **wire})
    return admit(request, RequestId("r.1"), INFO, can, {"traceparent": "00-a-b-01"})


NOTHING = Capabilities()
DIFFUSION = Capabilities(diffusion=True, diffusion_options=frozenset({"steps", "remasking"}))
REFUSALS: list[tuple[dict[str, Any], Capabilities, type[BatonError], str]] = [
    ({"token_ids": []}, EVERYTHING, InvalidRequest, "token_ids: the prompt is empty"),
    ({"token_ids": [1, 2, 1000]}, EVERYTHING, InvalidRequest, "token_ids[2]: 1000 is not a token of this model"),
    ({"sampling_options": {"logit_bias": {"1000": 1.0}}}, EVERYTHING, InvalidRequest, "logit_bias: '1000'"),
    ({"sampling_options": {"logit_bias": {"-1": 1.0}}}, EVERYTHING, InvalidRequest, "logit_bias: '-1'"),
    ({"sampling_options": {"logit_bias": {"²": 1.0}}}, EVERYTHING, InvalidRequest, "logit_bias: '²'"),
    ({"token_ids": [1] * 100}, EVERYTHING, ContextTooLong, "the prompt has 100"),
    ({"stop_conditions": {"max_tokens": 98}}, EVERYTHING, ContextTooLong, "max_tokens"),
    ({"stop_conditions": {"max_tokens": 5, "min_tokens": 6}}, EVERYTHING, InvalidRequest, "min_tokens"),
    ({"stop_conditions": {"min_tokens": 98}}, EVERYTHING, InvalidRequest, "min_tokens"),
    ({"sampling_options": {"n": 2}}, NOTHING, Unsupported, "n:"),
    ({"sampling_options": {"best_of": 2}}, EVERYTHING, Unsupported, "best_of"),
    ({"sampling_options": {"n": 2, "best_of": 3}}, EVERYTHING, Unsupported, "best_of"),
    ({"sampling_options": {"use_beam_search": True}}, EVERYTHING, Unsupported, "use_beam_search"),
    ({"sampling_options": {"logit_bias": {"5": 1.0}}}, NOTHING, Unsupported, "logit_bias"),
    ({"output_options": {"logprobs": 0}}, NOTHING, Unsupported, "logprobs"),
    ({"output_options": {"logprobs": 21}}, EVERYTHING, Unsupported, "logprobs"),
    ({"output_options": {"prompt_logprobs": 0}}, NOTHING, Unsupported, "prompt_logprobs"),
    ({"output_options": {"prompt_logprobs": 0, "echo": True}}, NOTHING, Unsupported, "echo with logprobs"),
    ({"sampling_options": {"bad_words": ["a"]}}, NOTHING, Unsupported, "bad_words"),
    ({"stop_conditions": {"stop_regex": "a"}}, NOTHING, Unsupported, "stop_regex"),
    ({"sampling_options": {"guided_decoding": {"json": {}}}}, NOTHING, Unsupported, "guided_decoding.json"),
    ({"sampling_options": {"guided_decoding": {"regex": ""}}}, NOTHING, Unsupported, "guided_decoding.regex"),
    ({"sampling_options": {"guided_decoding": {"choice": []}}}, NOTHING, Unsupported, "guided_decoding.choice"),
    ({"sampling_options": {"guided_decoding": {"grammar": "a"}}}, NOTHING, Unsupported, "guided_decoding.grammar"),
    ({"sampling_options": {"guided_decoding": {"structural_tag": 1}}}, NOTHING, Unsupported, "structural_tag"),
    ({"diffusion": {"steps": 4}}, EVERYTHING, Unsupported, "diffusion.steps: this model generates from left to right"),
    ({"diffusion": {"steps": 4, "threshold": 0.5}}, DIFFUSION, Unsupported, "diffusion.threshold: this engine takes"),
    ({"diffusion": {"temperature": 4}}, DIFFUSION, Unsupported, "diffusion.temperature: unknown option"),
    ({"routing": {"lora_name": "tuned"}}, NOTHING, Unsupported, "lora_name"),
    ({"routing": {"dp_rank": 4}}, EVERYTHING, InvalidRequest, "dp_rank"),
]


@pytest.mark.parametrize(("wire", "can", "error", "field"), REFUSALS, ids=[row[3] for row in REFUSALS])
def test_a_request_beyond_the_limits_is_refused_by_field(
    wire: dict[str, Any], can: Capabilities, error: type[BatonError], field: str
) -> None:
    with pytest.raises(error) as refusal:
        build(wire, can)
    assert field in refusal.value.message
    assert refusal.value.status == 400


@pytest.mark.parametrize("token", [-1, -(2**40)])
def test_a_negative_token_is_refused_by_index(token: int) -> None:
    request = GenerateRequest(token_ids=(5, token))
    for info in (INFO, ANY_VOCABULARY):
        with pytest.raises(InvalidRequest, match=rf"token_ids\[1\]: {token} is not a token"):
            admit(request, RequestId("r.1"), info, EVERYTHING, {})


def test_tokens_are_not_bounded_when_the_engine_does_not_know_its_vocabulary() -> None:
    request = GenerateRequest(token_ids=(2**32 - 1,), sampling=Sampling(logit_bias={"4000000000": 1.0}))
    work = admit(request, RequestId("r.1"), ANY_VOCABULARY, EVERYTHING, {})
    assert work.token_ids == (2**32 - 1,)


def test_diffusion_options_reach_an_engine_that_takes_them() -> None:
    options = build({"diffusion": {"steps": 4, "remasking": "low_confidence_static"}}, DIFFUSION).diffusion
    assert (options.steps, options.remasking, options.block_length) == (4, Remasking.STATIC, None)
    assert build({"diffusion": {}}).diffusion == build({}).diffusion, "nothing is asked for"


def test_the_last_token_of_the_vocabulary_is_accepted() -> None:
    assert build({"token_ids": [0, 999]}).token_ids == (0, 999)


def test_media_encoded_by_an_encode_worker_are_accepted_whatever_their_modality() -> None:
    build({"multi_modal_data": {"image_url": ["https://a"]}, "encoder_result": {}}, NOTHING)


ENCODES = Capabilities(generate=False, media_encoding=True, encoded_modalities=frozenset({"image"}))
IMAGE = {"image_url": ["https://a"]}


@pytest.mark.parametrize(
    ("wire", "error", "field"),
    [
        ({"token_ids": [], "multi_modal_data": IMAGE}, InvalidRequest, "token_ids: the prompt is empty"),
        ({"token_ids": [1000], "multi_modal_data": IMAGE}, InvalidRequest, r"token_ids\[0\]: 1000"),
        ({"token_ids": [1]}, InvalidRequest, "multi_modal_data: there is nothing to encode"),
        ({"token_ids": [1], "multi_modal_data": {"video_url": ["https://a"]}}, Unsupported, "video_url"),
    ],
)
def test_a_request_to_encode_is_checked_as_any_other(wire: dict[str, Any], error: type[BatonError], field: str) -> None:
    with pytest.raises(error, match=field):
        admit_encode(decode_request(wire), INFO, ENCODES)


def test_a_prompt_beyond_the_context_may_be_encoded() -> None:
    admit_encode(decode_request({"token_ids": [1] * 200, "multi_modal_data": IMAGE}), INFO, ENCODES)


@pytest.mark.parametrize(
    ("inputs", "error", "field"),
    [
        (((1,), ()), InvalidRequest, r"input\[8\]: the prompt is empty"),
        (((1,), (5, 1000)), InvalidRequest, r"input\[8\]\[1\]: 1000 is not a token"),
        (((1,), (5, -1)), InvalidRequest, r"input\[8\]\[1\]: -1 is not a token"),
        (((1,) * 101,), ContextTooLong, r"input\[7\]: .*the prompt has 101"),
    ],
)
def test_inputs_to_embed_are_checked_as_any_other(
    inputs: tuple[tuple[int, ...], ...], error: type[BatonError], field: str
) -> None:
    admit_embed(((1,) * 100,), INFO)
    with pytest.raises(error, match=field):
        admit_embed(inputs, INFO, first=7)


@pytest.mark.parametrize(
    "wire",
    [
        {},
        {"sampling_options": {"n": 2, "best_of": 2}},
        {"sampling_options": {"best_of": 1, "use_beam_search": False, "logit_bias": {"5": 1.0}}},
        {"output_options": {"logprobs": 20, "prompt_logprobs": 0}},
        {"sampling_options": {"guided_decoding": {"json": {"type": "object"}}}},
        {"routing": {"lora_name": "tuned", "dp_rank": 3}},
        {"stop_conditions": {"max_tokens": 97, "min_tokens": 97}},
    ],
)
def test_supported_options_are_accepted(wire: dict[str, Any]) -> None:
    build(wire)


@pytest.mark.parametrize("wire", [{"guided_decoding": {}}, {"logit_bias": {}}, {"n": 1}, {"n": None}])
def test_an_option_with_no_effect_is_accepted_by_every_engine(wire: dict[str, Any]) -> None:
    build({"sampling_options": wire}, NOTHING)


def test_without_max_tokens_the_answer_may_fill_the_context() -> None:
    assert build({}).max_tokens == 97
    assert build({"stop_conditions": {"max_tokens": 5}}).max_tokens == 5


def test_the_work_carries_every_option_of_the_request() -> None:
    wire = {
        "stop_conditions": {"max_tokens": 5, "stop_token_ids": [7]},
        "sampling_options": {"temperature": 0.5},
        "output_options": {"logprobs": 1},
        "eos_token_ids": [8],
        "routing": {"priority": -3, "dp_rank": 1, "lora_name": "tuned", "cache_salt": "mine"},
    }
    work = build(wire)
    assert (work.request_id, work.token_ids) == ("r.1", (1, 2, 3))
    assert work.stop.stop_token_ids == (7,)
    assert (work.sampling.temperature, work.output.logprobs) == (0.5, 1)
    assert work.eos_token_ids == (8,)
    assert (work.priority, work.dp_rank, work.lora_name, work.cache_salt) == (-3, 1, "tuned", "mine")
    assert work.trace_headers == {"traceparent": "00-a-b-01"}
    assert work.handoff is None


@pytest.mark.parametrize(
    ("wire", "salt"),
    [
        ({}, None),
        ({"routing": {"cache_salt": ""}}, None),
        ({"routing": {"cache_salt": "alice"}}, "alice"),
        ({"routing": {"cache_salt": ""}, "extra_args": {"nvext": {"cache_salt": "alice"}}}, "alice"),
        ({"routing": {"cache_salt": "alice"}, "extra_args": {"nvext": {"cache_salt": "bob"}}}, "alice"),
        ({"extra_args": {"nvext": None}}, None),
    ],
)
def test_the_cache_salt_is_the_routers_or_the_clients(wire: dict[str, Any], salt: str | None) -> None:
    assert build(wire).cache_salt == salt


def test_eos_tokens_of_the_model_are_the_default() -> None:
    assert build({}).eos_token_ids == (9,)


def test_the_handoff_is_set_by_the_handler() -> None:
    request = decode_request({"token_ids": [1]})
    work = admit(request, RequestId("r.1"), INFO, EVERYTHING, {}, Produce())
    assert work.handoff == Produce()
