"""From work to SGLang's words: every option arrives, and what SGLang would ignore is refused."""

import json
import re
from pathlib import Path

import pytest

from baton.config.engines import SglangOptions
from baton.engines.sglang.compat import Dialect
from baton.engines.sglang.engine_info import capabilities_of, default_priority
from baton.engines.sglang.launch_mode import LaunchMode
from baton.engines.sglang.params import FAKE_HOST, ROOM_ZERO, Setting, escape, request_fields, sampling_params
from baton.engines.sglang.server_args import Arguments
from baton.errors import InvalidRequest, Unsupported
from baton.ports.engine import Work
from baton.protocol.handoff import Bootstrap, Consume, Handoff, LocalProbe, PrefillResult, Produce
from baton.protocol.ids import RequestId
from baton.protocol.media import MediaFile
from baton.protocol.requests import GuidedDecoding, OutputOptions, Sampling, StopConditions
from tests.unit.engines.sglang.conftest import ThinkingOptions

PLAIN = Setting(dialect=Dialect(version="0.5.23"))
DISAGGREGATED = Setting(dialect=PLAIN.dialect, needs_bootstrap=True)
PLACE = Bootstrap(host="10.0.0.1", port=8998, room=77)


def make_work(**changes: object) -> Work:
    asked: dict[str, object] = {"request_id": RequestId("r"), "token_ids": (1, 2), "max_tokens": 5}
    return Work(**(asked | changes))  # type: ignore[arg-type]


def params(setting: Setting = PLAIN, index: int = 0, **changes: object) -> dict[str, object]:
    return sampling_params(make_work(**changes), index, setting)


def test_d03_the_number_of_tokens_is_always_said() -> None:
    assert params() == {"max_new_tokens": 5, "n": 1}


def test_regular_expressions_that_end_the_output_are_a_list() -> None:
    assert params(stop=StopConditions(stop_regex="a+"))["stop_regex"] == ["a+"]
    assert params(stop=StopConditions(stop_regex=("a+", "b")))["stop_regex"] == ["a+", "b"]
    assert "stop_regex" not in params(stop=StopConditions(stop_regex=()))


def test_zero_is_a_value() -> None:
    zeros = Sampling(temperature=0.0, top_k=0, min_p=0.0, presence_penalty=0.0, frequency_penalty=0.0)
    said = params(sampling=zeros)
    assert said["temperature"] == 0.0
    assert said["min_p"] == 0.0
    assert said["presence_penalty"] == 0.0
    assert said["top_k"] == -1, "0 and -1 both mean all"
    assert 0 < params(sampling=Sampling(top_p=0.0))["top_p"] < 1e-6, "SGLang takes no 0"  # type: ignore[operator]


def test_what_is_left_open_is_the_models_own() -> None:
    setting = Setting(dialect=PLAIN.dialect, defaults={"temperature": 0.6, "top_k": 20})
    said = params(setting, sampling=Sampling(temperature=0.0))
    assert (said["temperature"], said["top_k"]) == (0.0, 20)


def test_a_limit_that_fills_the_context_is_left_to_sglang_for_files_whose_tokens_it_alone_counts() -> None:
    setting, file = Setting(dialect=PLAIN.dialect, context=100), MediaFile(modality="image", data=b"")
    assert params(setting, max_tokens=98)["max_new_tokens"] == 98
    assert params(setting, max_tokens=98, media=(file,))["max_new_tokens"] is None
    assert params(setting, max_tokens=97, media=(file,))["max_new_tokens"] == 97


def test_d06_min_tokens_and_every_stop_token_arrive() -> None:
    stop = StopConditions(min_tokens=3, stop_token_ids=(9,), stop_token_ids_hidden=(8,), stop_token_ids_visible=(7,))
    said = params(stop=stop, eos_token_ids=(2,))
    assert said["min_new_tokens"] == 3
    assert said["stop_token_ids"] == [2, 7, 8, 9]
    ignoring = StopConditions(stop_token_ids=(9,), ignore_eos=True)
    assert params(stop=ignoring, eos_token_ids=(2,))["stop_token_ids"] == [9]


@pytest.mark.parametrize(
    ("guide", "said"),
    [
        (GuidedDecoding(json={"type": "null"}), {"json_schema": json.dumps({"type": "null"})}),
        (GuidedDecoding(json='{"type":"null"}'), {"json_schema": '{"type":"null"}'}),
        (GuidedDecoding(regex="a+"), {"regex": "a+"}),
        (GuidedDecoding(choice=("a.b", "c")), {"regex": r"(a\.b)|(c)"}),
        (GuidedDecoding(grammar='root ::= "a"'), {"ebnf": 'root ::= "a"'}),
        (GuidedDecoding(structural_tag={"format": 1}), {"structural_tag": json.dumps({"format": 1})}),
    ],
    ids=["schema", "schema as text", "regex", "choice", "grammar", "tag"],
)
def test_d06_every_kind_of_guidance_arrives(guide: GuidedDecoding, said: dict[str, str]) -> None:
    everything = params(sampling=Sampling(guided_decoding=guide))
    assert {key: value for key, value in everything.items() if key not in ("max_new_tokens", "n")} == said


@pytest.mark.parametrize(
    ("guide", "problem"),
    [
        (GuidedDecoding(regex="a", grammar="b"), InvalidRequest),
        (GuidedDecoding(regex=""), InvalidRequest),
        (GuidedDecoding(choice=()), InvalidRequest),
        (GuidedDecoding(json={}, whitespace_pattern=" "), Unsupported),
        (GuidedDecoding(json={}, backend="another"), Unsupported),
    ],
)
def test_d06_guidance_that_would_be_ignored_is_refused(guide: GuidedDecoding, problem: type[Exception]) -> None:
    with pytest.raises(problem):
        params(sampling=Sampling(guided_decoding=guide))


def test_d35_without_a_tokenizer_nothing_that_needs_one_is_taken() -> None:
    bare = Setting(dialect=PLAIN.dialect, guided=False)
    with pytest.raises(Unsupported, match="guided"):
        params(bare, sampling=Sampling(guided_decoding=GuidedDecoding(regex="a")))
    with pytest.raises(Unsupported, match="min_tokens"):
        params(bare, stop=StopConditions(min_tokens=1))


@pytest.mark.parametrize("text", ["a.b", "(x)", "[1]", "a b", "tab\t", "a|b", "1+1=2", "{}", "^$", "\\", "ü?", "-/'\""])
def test_an_escaped_text_means_itself(text: str) -> None:
    assert re.fullmatch(escape(text), text)


def test_choices_of_one_seed_differ_and_a_seed_without_effect_is_refused() -> None:
    following = Setting(dialect=PLAIN.dialect, seeds=True)
    seeds = [params(following, index, sampling=Sampling(seed=7))["sampling_seed"] for index in range(3)]
    assert seeds == [7, 8, 9]
    assert params(following, 1, sampling=Sampling(seed=2**63 - 1))["sampling_seed"] == -(2**63)
    with pytest.raises(Unsupported, match="deterministic"):
        params(sampling=Sampling(seed=7))
    assert "sampling_seed" not in params(sampling=Sampling(seed=7, temperature=0.0))


def test_log_probabilities_of_answer_and_prompt_are_asked_for() -> None:
    def asked(**output: int) -> tuple[object, ...]:
        fields = request_fields(make_work(output=OutputOptions(**output)), "rid", 0, PLAIN)
        return fields["return_logprob"], fields["top_logprobs_num"], fields["logprob_start_len"]

    assert asked() == (False, 0, -1)
    assert asked(logprobs=0) == (True, 0, -1)
    assert asked(logprobs=3) == (True, 3, -1)
    assert asked(logprobs=1, prompt_logprobs=4) == (True, 4, 0)


def test_everything_else_of_a_request_arrives() -> None:
    work = make_work(
        priority=3, dp_rank=1, lora_name="fine", cache_salt="tenant", trace_headers={"traceparent": "00-a-b-01"}
    )
    fields = request_fields(work, "rid", 0, PLAIN)
    assert fields["rid"] == "rid"
    assert fields["stream"] is True
    assert fields["input_ids"] == [1, 2]
    assert (fields["priority"], fields["routed_dp_rank"], fields["lora_path"]) == (3, 1, "fine")
    assert (fields["cache_salt"], fields["external_trace_header"]) == ("tenant", {"traceparent": "00-a-b-01"})


def test_a_request_without_a_priority_goes_before_one_with_a_negative_one() -> None:
    assert request_fields(make_work(), "rid", 0, PLAIN)["priority"] is None
    values = {"enable_priority_scheduling": True, "default_priority_value": None}
    setting = Setting(dialect=PLAIN.dialect, default_priority=default_priority(values))
    sent = [request_fields(make_work(priority=each), "rid", 0, setting)["priority"] for each in (-2, 0, 3)]
    assert sent == [-2, 0, 3]
    assert default_priority(values | {"default_priority_value": 5}) == 5
    assert default_priority({"enable_priority_scheduling": False}) is None


def test_a_thinking_budget_marks_the_first_tokens_as_reasoning() -> None:
    setting = Setting(dialect=PLAIN.dialect, reasoning_end_token=9)

    def reasons(**changes: object) -> object:
        return request_fields(make_work(**changes), "rid", 0, setting)["require_reasoning"]

    budget = StopConditions(max_thinking_tokens=4)
    assert reasons() is None
    assert reasons(stop=budget)
    assert reasons(stop=budget, token_ids=(1, 9, 2)) is None, "the prompt has ended it"
    guided = Sampling(guided_decoding=GuidedDecoding(regex="a"))
    assert reasons(stop=budget, sampling=guided) is None, "the guide applies from the first token"
    assert reasons(stop=budget, sampling=guided, require_reasoning=True)


def takes_budgets(model_dir: Path, **changes: object) -> bool:
    (model_dir / "config.json").write_text("{}")
    values = {"reasoning_parser": "qwen3", "enable_strict_thinking": True, "grammar_backend": "xgrammar", "dp_size": 1}
    arguments = Arguments(given=frozenset(), values=values | changes)
    return capabilities_of(LaunchMode(), SglangOptions(), arguments, model_dir).max_thinking_tokens


@pytest.mark.usefixtures("thinking")
@pytest.mark.parametrize("missing", ["", "reasoning_parser", "enable_strict_thinking", "grammar_backend"])
def test_a_thinking_budget_needs_every_argument_that_sglang_needs_for_it(missing: str, tmp_path: Path) -> None:
    changes = {missing: "none" if missing == "grammar_backend" else None} if missing else {}
    assert takes_budgets(tmp_path, **changes) is (not missing)


@pytest.mark.parametrize("parser", ["deepseek-r1", "response_template", "auto"])
def test_a_thinking_budget_needs_a_parser_that_excludes_tokens_or_a_budget_for_all(
    parser: str, thinking: ThinkingOptions, tmp_path: Path
) -> None:
    assert not takes_budgets(tmp_path, reasoning_parser=parser)
    thinking.max_think_tokens = 0
    assert takes_budgets(tmp_path, reasoning_parser=parser)


@pytest.mark.parametrize(
    "handoff",
    [
        Produce(bootstrap=PLACE),
        Consume(source=PLACE),
        Consume(
            source=PrefillResult(
                disaggregated_params={"bootstrap_host": "10.0.0.1", "bootstrap_port": 8998, "bootstrap_room": 77}
            )
        ),
    ],
)
def test_producer_and_consumer_use_the_same_bootstrap_address(handoff: Handoff) -> None:
    fields = request_fields(make_work(handoff=handoff), "rid", 0, DISAGGREGATED)
    assert (fields["bootstrap_host"], fields["bootstrap_port"], fields["bootstrap_room"]) == ("10.0.0.1", 8998, 77)


def test_room_zero_is_another_room_of_the_same_rank() -> None:
    zero = Bootstrap(host="h", port=1, room=0)
    rooms = {
        request_fields(make_work(handoff=handoff), "rid", 0, DISAGGREGATED)["bootstrap_room"]
        for handoff in (Produce(bootstrap=zero), Consume(source=zero))
    }
    assert rooms == {ROOM_ZERO}
    assert 0 < ROOM_ZERO < 2**63
    assert all(ROOM_ZERO % size == 0 for size in range(1, 37))


def test_d17_a_probe_uses_the_fake_host_and_a_room_of_its_own() -> None:
    probes = [request_fields(make_work(handoff=LocalProbe()), "rid", 0, DISAGGREGATED) for _ in range(20)]
    assert {fields["bootstrap_host"] for fields in probes} == {FAKE_HOST}
    assert len({fields["bootstrap_room"] for fields in probes}) == 20
    assert "bootstrap_host" not in request_fields(make_work(handoff=LocalProbe()), "rid", 0, PLAIN)


@pytest.mark.parametrize(
    ("setting", "handoff", "problem"),
    [
        (PLAIN, Produce(bootstrap=PLACE), Unsupported),
        (PLAIN, Consume(source=PLACE), Unsupported),
        (DISAGGREGATED, None, InvalidRequest),
        (DISAGGREGATED, Produce(), InvalidRequest),
        (DISAGGREGATED, Consume(source=PrefillResult(disaggregated_params={})), InvalidRequest),
    ],
)
def test_a_handoff_that_does_not_fit_the_disaggregation_mode_is_refused(
    setting: Setting, handoff: Handoff | None, problem: type[Exception]
) -> None:
    with pytest.raises(problem):
        request_fields(make_work(handoff=handoff), "rid", 0, setting)


@pytest.mark.parametrize(
    "sampling",
    [Sampling(temperature=0.5), Sampling(top_p=0.9), Sampling(top_k=3), Sampling(repetition_penalty=1.2)],
)
def test_a_diffusion_model_refuses_what_has_no_effect_on_it(sampling: Sampling) -> None:
    diffusion = Setting(dialect=PLAIN.dialect, diffusion=True)
    with pytest.raises(Unsupported, match="no effect"):
        params(diffusion, sampling=sampling)
    assert params(diffusion, sampling=Sampling(temperature=0.0, top_p=1.0, top_k=-1))
    assert params(diffusion, sampling=Sampling(temperature=0.0, top_k=1)), "that is what a frontend makes of it"


def test_a_diffusion_model_has_no_least_number_of_tokens_and_needs_no_seed() -> None:
    diffusion = Setting(dialect=PLAIN.dialect, diffusion=True)
    with pytest.raises(Unsupported, match="min_tokens: 3 has no effect"):
        params(diffusion, stop=StopConditions(min_tokens=3))
    assert "sampling_seed" not in params(diffusion, sampling=Sampling(seed=7), stop=StopConditions(min_tokens=0))
