"""From work to the arguments of TensorRT-LLM: nothing is dropped, and zeros are values."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry

from baton.engines.trtllm.generate_args import GenerateArgs
from baton.engines.trtllm.loras import Loras
from baton.engines.trtllm.params import Model, engine_priority, sampling_params
from baton.errors import InvalidRequest, Unsupported
from baton.models.defaults import SamplingDefaults
from baton.ports.engine import Work
from baton.protocol.ids import new_request_id
from baton.protocol.requests import GuidedDecoding, OutputOptions, Sampling, StopConditions
from tests.doubles.trtllm import World, make_library

OLD = make_library("1.2.1", World(), CollectorRegistry())
NEW = make_library("1.3.0rc22", World(), CollectorRegistry())
MODEL = Model(vocab_size=258, defaults=SamplingDefaults())


def work(sampling: Sampling | None = None, **changes: Any) -> Work:
    fields: dict[str, Any] = {"request_id": new_request_id("p"), "token_ids": (1, 2, 3), "max_tokens": 5}
    return Work(sampling=sampling or Sampling(), **(fields | changes))


def params(sampling: Sampling | None = None, library: Any = NEW, model: Model = MODEL, **changes: Any) -> Any:
    return sampling_params(work(sampling, **changes), model, library)


def guided(**fields: Any) -> Any:
    return params(Sampling(guided_decoding=GuidedDecoding(**fields))).guided_decoding


def test_d04_zero_is_a_value() -> None:
    zeros = params(
        Sampling(
            temperature=0.0, top_p=0.0, top_k=0, min_p=0.0, seed=0, presence_penalty=0.0, frequency_penalty=0.0,
            length_penalty=0.0,
        ),
        stop=StopConditions(min_tokens=0),
    )  # fmt: skip
    for name in ("temperature", "top_p", "min_p", "presence_penalty", "frequency_penalty", "length_penalty"):
        assert getattr(zeros, name) == 0.0
        assert isinstance(getattr(zeros, name), float)
    assert (zeros.top_k, zeros.seed, zeros.min_tokens) == (0, 0, 0)
    unset = params()
    assert (unset.top_p, unset.top_k, unset.min_p, unset.seed, unset.min_tokens) == (None,) * 5


def test_unset_sampling_is_the_models_default_and_never_greedy() -> None:
    assert params().temperature == 1.0
    defaults = SamplingDefaults(temperature=0.6, top_p=0.9, top_k=20, repetition_penalty=1.1)
    model = Model(vocab_size=258, defaults=defaults)
    unset = params(model=model)
    assert (unset.temperature, unset.top_p, unset.top_k, unset.repetition_penalty) == (0.6, 0.9, 20, 1.1)
    assert params(Sampling(temperature=0.0, top_k=-1), model=model).temperature == 0.0
    assert params(Sampling(top_k=-1), model=model).top_k == 0


def test_max_tokens_is_always_set() -> None:
    assert params().max_tokens == 5
    assert params().detokenize is False


@pytest.mark.parametrize("field", ["temperature", "top_p", "length_penalty"])
def test_a_value_that_is_not_a_number_is_refused_by_name(field: str) -> None:
    with pytest.raises(InvalidRequest, match=field):
        params(Sampling(**{field: float("nan")}))


def test_a_negative_seed_becomes_an_unsigned_one() -> None:
    assert params(Sampling(seed=-1)).seed == 2**64 - 1
    assert params(Sampling(seed=7)).seed == 7


def test_every_stop_token_reaches_the_engine_once() -> None:
    limited = params(
        stop=StopConditions(stop_token_ids=(4, 5), stop_token_ids_visible=(6,), stop_token_ids_hidden=(5, 7)),
        eos_token_ids=(256, 257, 256),
    )
    assert limited.end_id == 256
    assert limited.stop_token_ids == [4, 5, 6, 7, 257]
    assert limited.include_stop_str_in_output is True
    ignoring = params(stop=StopConditions(ignore_eos=True, stop_token_ids=(4,)), eos_token_ids=(256, 257))
    assert (ignoring.ignore_eos, ignoring.stop_token_ids) == (True, [4])
    assert (params().end_id, params().stop_token_ids) == (-1, None)


def test_choices_set_best_of_and_greedy_choices_are_computed_once() -> None:
    assert (params(Sampling(n=3)).n, params(Sampling(n=3)).best_of) == (3, 3)
    assert params(Sampling(n=3, temperature=0.0)).n == 1
    assert params(Sampling(n=3, top_k=1)).n == 1


def test_a_thinking_budget_needs_a_version_and_a_model_that_have_one() -> None:
    thinking = Model(vocab_size=258, defaults=SamplingDefaults(), thinking=True)
    budget = StopConditions(max_thinking_tokens=0)
    assert params(model=thinking, stop=budget).thinking_token_budget == 0
    with pytest.raises(Unsupported, match="max_thinking_tokens"):
        params(library=OLD, model=thinking, stop=budget)
    with pytest.raises(Unsupported, match="max_thinking_tokens"):
        params(stop=StopConditions(max_thinking_tokens=5))


@pytest.mark.parametrize(("requested", "old", "new"), [(None, None, None), (0, 1, 0), (1, 1, 1), (7, 7, 7)])
def test_zero_logprobs_is_the_chosen_token_in_every_version(requested: Any, old: Any, new: Any) -> None:
    output = OutputOptions(logprobs=requested, prompt_logprobs=requested)
    for library, expected in ((OLD, old), (NEW, new)):
        sent = params(library=library, output=output)
        assert (sent.logprobs, sent.prompt_logprobs) == (expected, expected)


def test_guided_decoding_takes_exactly_one_kind() -> None:
    assert guided(json={"type": "object"}).json == {"type": "object"}
    assert guided(json='{"a": 1}').json == '{"a": 1}'
    assert guided(regex="a+").regex == "a+"
    assert guided(choice=("a.b", "c|d")).regex == r"(a\.b|c\|d)"
    assert guided(grammar="root ::= x").grammar == "root ::= x"
    assert guided(structural_tag={"type": "tag"}).structural_tag == '{"type":"tag"}'
    assert params(Sampling(guided_decoding=GuidedDecoding())).guided_decoding is None
    for bad in ({"regex": "a", "grammar": "b"}, {"choice": ()}, {"regex": "a", "whitespace_pattern": " "}):
        with pytest.raises(InvalidRequest):
            guided(**bad)


def test_a_logit_bias_is_a_tensor_of_the_vocabulary() -> None:
    bias = params(Sampling(logit_bias={"3": -100.0, "257": 5})).embedding_bias
    assert len(bias) == 258
    assert (bias[3], bias[257], sum(map(abs, bias))) == (-100.0, 5.0, 105.0)
    with pytest.raises(InvalidRequest, match="logit_bias"):
        params(Sampling(logit_bias={"1": 101.0}))


def test_values_that_the_library_rejects_are_an_invalid_request() -> None:
    with pytest.raises(InvalidRequest, match="temperature"):
        params(Sampling(temperature=-1.0))


@given(st.integers(-(2**40), 2**40), st.integers(-(2**40), 2**40))
def test_d07_priority_maps_to_the_engines_range_in_the_same_order(one: int, other: int) -> None:
    assert 0.0 <= engine_priority(one) <= 1.0
    assert engine_priority(0) == 0.5
    if one < other:
        assert engine_priority(one) <= engine_priority(other)
    if abs(one) < 1000 and one != other:
        assert engine_priority(one) != engine_priority(other)


def test_d07_priority_reaches_the_engine() -> None:
    generate_args = GenerateArgs(NEW, MODEL, Loras(), disaggregated=False, context=512)
    assert generate_args.build(work(priority=1)).get("priority") == 0.75


def test_every_option_of_work_is_an_argument(tmp_path: Any) -> None:
    loras = Loras()
    loras.add("mine", tmp_path)
    generate_args = GenerateArgs(NEW, MODEL, loras, disaggregated=False, context=512)
    plain: Any = generate_args.build(work())
    assert set(plain) == {"inputs", "sampling_params", "streaming", "priority"}
    assert plain["inputs"] == {"prompt_token_ids": [1, 2, 3]}
    full: Any = generate_args.build(
        work(dp_rank=0, lora_name="mine", cache_salt="tenant", trace_headers={"traceparent": "x"})
    )
    assert full["scheduling_params"].attention_dp_rank == 0
    assert full["scheduling_params"].attention_dp_relax is False
    assert full["lora_request"].lora_path == str(tmp_path)
    assert full["cache_salt"] == "tenant"
    assert full["trace_headers"] == {"traceparent": "x"}
    with pytest.raises(InvalidRequest, match="lora_name"):
        generate_args.build(work(lora_name="theirs"))
