"""Sampling parameters: defaults, refusals, and when a choice ends."""

import json
import math
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton.engines.torch.sampling_params import SamplingParams, finish_of, make_sampling_params
from baton.errors import ConfigError, InvalidRequest, Unsupported
from baton.models.defaults import SamplingDefaults, read_defaults
from baton.ports.engine import Work
from baton.protocol.ids import RequestId
from baton.protocol.outputs import FinishReason
from baton.protocol.requests import OutputOptions, Sampling, StopConditions

VOCAB = 50
NONE = SamplingDefaults()
ANY_SAMPLING, ANY_STOP, ANY_OUTPUT = Sampling(), StopConditions(), OutputOptions()


def make_work(
    sampling: Sampling = ANY_SAMPLING,
    stop: StopConditions = ANY_STOP,
    output: OutputOptions = ANY_OUTPUT,
    eos: tuple[int, ...] = (),
    max_tokens: int = 8,
) -> Work:
    return Work(
        request_id=RequestId("r"),
        token_ids=(1, 2),
        max_tokens=max_tokens,
        sampling=sampling,
        stop=stop,
        output=output,
        eos_token_ids=eos,
    )


def params_of(
    sampling: Sampling = ANY_SAMPLING,
    stop: StopConditions = ANY_STOP,
    eos: tuple[int, ...] = (),
    defaults: SamplingDefaults = NONE,
) -> SamplingParams:
    return make_sampling_params(make_work(sampling, stop, eos=eos), defaults, VOCAB)


def test_a_request_without_parameters_gets_openai_defaults() -> None:
    params = params_of()
    assert (params.temperature, params.top_k, params.top_p, params.min_p, params.repetition_penalty) == (
        1.0,
        0,
        1.0,
        0.0,
        1.0,
    )
    assert not params.greedy
    assert not params.edits_logits
    assert params.logprobs is None


def test_model_defaults_apply_where_the_request_has_none_and_zero_is_a_value() -> None:
    defaults = SamplingDefaults(temperature=0.6, top_p=0.9, top_k=20, min_p=0.1, repetition_penalty=1.1)
    params = params_of(defaults=defaults)
    assert (params.temperature, params.top_p, params.top_k, params.min_p, params.repetition_penalty) == (
        0.6,
        0.9,
        20,
        0.1,
        1.1,
    )
    asked = Sampling(temperature=0.0, top_p=1.0, top_k=0, min_p=0.0, repetition_penalty=1.0)
    params = params_of(asked, defaults=defaults)
    assert (params.temperature, params.top_p, params.top_k, params.min_p, params.repetition_penalty) == (
        0.0,
        1.0,
        0,
        0.0,
        1.0,
    )
    assert params.argmax_only


@pytest.mark.parametrize("top_k", [-1, 0, VOCAB, VOCAB + 1])
def test_top_k_of_the_whole_vocabulary_is_off(top_k: int) -> None:
    assert params_of(Sampling(top_k=top_k)).top_k == 0


@pytest.mark.parametrize("sampling", [Sampling(temperature=0.0), Sampling(top_k=1), Sampling(top_p=0.0)])
def test_parameters_that_leave_one_token_are_greedy(sampling: Sampling) -> None:
    assert params_of(sampling).argmax_only


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize(
    "field",
    ["temperature", "top_p", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty"],
)
def test_a_value_that_is_not_finite_is_refused_by_name(field: str, bad: float) -> None:
    with pytest.raises(InvalidRequest, match=field):
        params_of(Sampling(**{field: bad}))


@pytest.mark.parametrize("key", ["50", "-1", "", "a", "1.0", " 1", "٣", "1" * 5000, "+1"])
def test_a_bias_for_an_unknown_token_is_refused(key: str) -> None:
    with pytest.raises(InvalidRequest, match="logit_bias"):
        params_of(Sampling(logit_bias={key: 1.0}))


@pytest.mark.parametrize("value", [100.1, -100.1, math.nan, math.inf])
def test_a_bias_out_of_range_is_refused(value: float) -> None:
    with pytest.raises(InvalidRequest, match="logit_bias"):
        params_of(Sampling(logit_bias={"7": value}))


def test_a_bias_keeps_its_tokens_and_a_repeated_token_is_refused() -> None:
    assert params_of(Sampling(logit_bias={"7": -100, "49": 1.5})).logit_bias == ((7, -100.0), (49, 1.5))
    with pytest.raises(InvalidRequest, match="twice"):
        params_of(Sampling(logit_bias={"7": 1.0, "07": 2.0}))


def test_unsupported_parameters_are_refused() -> None:
    with pytest.raises(Unsupported, match="use_beam_search"):
        params_of(Sampling(use_beam_search=True))
    with pytest.raises(Unsupported, match="max_thinking_tokens"):
        params_of(stop=StopConditions(max_thinking_tokens=5))
    with pytest.raises(InvalidRequest, match="seed"):
        params_of(Sampling(seed=2**63))


def test_a_seed_is_kept_and_a_missing_one_is_random() -> None:
    assert params_of(Sampling(seed=-5)).seed == -5
    assert params_of().seed != params_of().seed


def test_logprobs_are_never_more_than_the_vocabulary() -> None:
    output = OutputOptions(logprobs=1000, prompt_logprobs=0)
    params = make_sampling_params(make_work(output=output), NONE, VOCAB)
    assert (params.logprobs, params.prompt_logprobs) == (VOCAB, 0)


def test_eos_tokens_come_from_request_and_model_and_ignore_eos_drops_both() -> None:
    defaults = SamplingDefaults(eos_token_id=[4, 999])
    assert params_of(eos=(3,), defaults=defaults).eos_token_ids == {3, 4}
    assert params_of(stop=StopConditions(ignore_eos=True), eos=(3,), defaults=defaults).eos_token_ids == frozenset()


@given(
    token=st.integers(0, 9),
    generated=st.integers(1, 8),
    least=st.integers(0, 9),
    limit=st.integers(1, 8),
    ignore=st.booleans(),
)
def test_a_choice_ends_at_eos_stop_token_or_max_tokens(
    token: int, generated: int, least: int, limit: int, ignore: bool
) -> None:
    stop = StopConditions(
        min_tokens=least,
        ignore_eos=ignore,
        stop_token_ids=(3,),
        stop_token_ids_visible=(4,),
        stop_token_ids_hidden=(5,),
    )
    params = make_sampling_params(make_work(stop=stop, eos=(1, 2), max_tokens=limit), NONE, VOCAB)
    end = finish_of(params, token, generated)
    if token in (1, 2) and not ignore and generated >= least:
        assert end == (FinishReason.EOS, None)
    elif token in (3, 4, 5) and generated >= least:
        assert end == (FinishReason.STOP, token)
    else:
        assert end == ((FinishReason.LENGTH, None) if generated >= limit else None)


def write_config(directory: Path, content: str) -> Path:
    (directory / "generation_config.json").write_text(content)
    return directory


def test_defaults_are_read_from_the_model_and_a_missing_file_has_none(tmp_path: Path) -> None:
    assert read_defaults(tmp_path) == SamplingDefaults()
    said = {"temperature": 1, "top_k": 20, "eos_token_id": [1, 2], "do_sample": False, "_from": "x", "top_p": None}
    assert read_defaults(write_config(tmp_path, json.dumps(said))) == SamplingDefaults(
        temperature=1.0, top_k=20, eos_token_id=[1, 2]
    )
    assert read_defaults(write_config(tmp_path, '{"eos_token_id": 7}')).eos_token_ids == (7,)


@pytest.mark.parametrize("content", ["", "[]", "{", '{"temperature": "hot"}', '{"top_p": 3}', '{"top_k": [1]}'])
def test_a_corrupt_file_is_a_config_error_that_names_it(tmp_path: Path, content: str) -> None:
    with pytest.raises(ConfigError, match=r"generation_config\.json"):
        read_defaults(write_config(tmp_path, content))
