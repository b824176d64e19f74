"""From request to work: what an engine cannot do is refused by name, and nothing that it needs is lost."""

from typing import Any

import msgspec
import pytest

from baton.errors import BatonError, ContextTooLong, InvalidRequest, Unsupported
from baton.handlers.admission import build_work
from baton.ports.engine import Capabilities, Work
from baton.protocol.codec import decode_request
from baton.protocol.handoff import Produce
from baton.protocol.ids import RequestId
from baton.testing.fakes import SCRIPTED_INFO

INFO = msgspec.structs.replace(SCRIPTED_INFO, context_length=100, eos_token_ids=(9,))
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
    return build_work(request, RequestId("r.1"), INFO, can, {"traceparent": "00-a-b-01"})


NOTHING = Capabilities()
REFUSALS: list[tuple[dict[str, Any], Capabilities, type[BatonError], str]] = [
    ({"token_ids": []}, EVERYTHING, InvalidRequest, "token_ids"),
    ({"token_ids": [1] * 100}, EVERYTHING, ContextTooLong, "prompt has 100 tokens"),
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
    ({"sampling_options": {"guided_decoding": {"json": {}}}}, NOTHING, Unsupported, "guided_decoding.json"),
    ({"sampling_options": {"guided_decoding": {"regex": ""}}}, NOTHING, Unsupported, "guided_decoding.regex"),
    ({"sampling_options": {"guided_decoding": {"choice": []}}}, NOTHING, Unsupported, "guided_decoding.choice"),
    ({"sampling_options": {"guided_decoding": {"grammar": "a"}}}, NOTHING, Unsupported, "guided_decoding.grammar"),
    ({"sampling_options": {"guided_decoding": {"structural_tag": 1}}}, NOTHING, Unsupported, "structural_tag"),
    ({"routing": {"lora_name": "tuned"}}, NOTHING, Unsupported, "lora_name"),
    ({"routing": {"dp_rank": 4}}, EVERYTHING, InvalidRequest, "dp_rank"),
]


@pytest.mark.parametrize(("wire", "can", "error", "field"), REFUSALS, ids=[row[3] for row in REFUSALS])
def test_what_cannot_be_done_is_refused_by_name(
    wire: dict[str, Any], can: Capabilities, error: type[BatonError], field: str
) -> None:
    with pytest.raises(error) as refusal:
        build(wire, can)
    assert field in refusal.value.message
    assert refusal.value.status == 400


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
def test_what_the_engine_can_do_is_accepted(wire: dict[str, Any]) -> None:
    build(wire)


@pytest.mark.parametrize("wire", [{"guided_decoding": {}}, {"logit_bias": {}}, {"n": 1}, {"n": None}])
def test_an_option_that_asks_for_nothing_is_accepted_by_every_engine(wire: dict[str, Any]) -> None:
    build({"sampling_options": wire}, NOTHING)


def test_without_a_limit_the_answer_may_fill_the_context() -> None:
    assert build({}).max_tokens == 97
    assert build({"stop_conditions": {"max_tokens": 5}}).max_tokens == 5


def test_the_work_carries_all_that_the_request_says() -> None:
    wire = {
        "stop_conditions": {"max_tokens": 5, "stop_token_ids": [7]},
        "sampling_options": {"temperature": 0.5},
        "output_options": {"logprobs": 1},
        "eos_token_ids": [8],
        "routing": {"priority": -3, "dp_rank": 1, "lora_name": "tuned", "cache_namespace": "mine"},
    }
    work = build(wire)
    assert (work.request_id, work.token_ids) == ("r.1", (1, 2, 3))
    assert work.stop.stop_token_ids == (7,)
    assert (work.sampling.temperature, work.output.logprobs) == (0.5, 1)
    assert work.eos_token_ids == (8,)
    assert (work.priority, work.dp_rank, work.lora_name, work.cache_salt) == (-3, 1, "tuned", "mine")
    assert work.trace_headers == {"traceparent": "00-a-b-01"}
    assert work.handoff is None


def test_the_models_own_end_tokens_are_used_when_the_request_has_none() -> None:
    assert build({}).eos_token_ids == (9,)


def test_the_handoff_is_the_handlers_to_give() -> None:
    request = decode_request({"token_ids": [1]})
    work = build_work(request, RequestId("r.1"), INFO, EVERYTHING, {}, Produce())
    assert work.handoff == Produce()
