"""Settings of expert balancing: the arguments they become, and the contradictions that are told at once."""

import json
from pathlib import Path

import msgspec
import pytest

from baton.config.engines import ExpertOptions
from baton.engines.sglang.experts import Parallelism, expert_arguments, records_experts
from baton.errors import ConfigError

ONE, EIGHT = Parallelism(1), Parallelism(8)
DEEPEP = Parallelism(8, "deepep", "normal", "cuda")


def put(path: Path, content: object) -> str:
    path.write_text(json.dumps(content))
    return str(path)


def test_without_settings_sglang_is_told_nothing() -> None:
    assert expert_arguments(ExpertOptions(), ONE) == []


def test_every_setting_has_its_argument(tmp_path: Path) -> None:
    layout = put(tmp_path / "layout.json", {"physical_to_logical_map": [[0, 1, 2, 0]]})
    options = ExpertOptions(
        eplb=True,
        redundant=1,
        recorder="stat_approx",
        recorder_buffer=200,
        layout=layout,
        algorithm="deepseek_vec",
        interval=500,
        layers_per_chunk=4,
        utilization_threshold=0.9,
        dispatch="static",
        report="both",
    )
    assert expert_arguments(options, Parallelism(2, "deepep", "normal")) == [
        "--enable-eplb",
        *("--ep-num-redundant-experts", "1"),
        *("--expert-distribution-recorder-mode", "stat_approx"),
        *("--expert-distribution-recorder-buffer-size", "200"),
        *("--init-expert-location", layout),
        *("--eplb-algorithm", "deepseek_vec"),
        *("--eplb-rebalance-num-iterations", "500"),
        *("--eplb-rebalance-layers-per-chunk", "4"),
        *("--eplb-min-rebalancing-utilization-threshold", "0.9"),
        *("--ep-dispatch-algorithm", "static"),
        *("--expert-balancedness-report-mode", "both"),
    ]


@pytest.mark.parametrize(
    "options",
    [
        ExpertOptions(eplb=True, recorder_buffer=1000),
        ExpertOptions(eplb=True, recorder_buffer=-1),
        ExpertOptions(recorder="stat", recorder_buffer=5000),
        ExpertOptions(report="prometheus", recorder_buffer=10),
        ExpertOptions(recorder="per_token"),
        ExpertOptions(eplb=True, recorder="stat", interval=1, recorder_buffer=1),
        ExpertOptions(eplb=True, dispatch="dynamic", layers_per_chunk=1),
        ExpertOptions(eplb=True, utilization_threshold=0.5, report="prometheus"),
        ExpertOptions(redundant=8, dispatch="dynamic"),
        ExpertOptions(dispatch="fake"),
    ],
)
def test_what_goes_together_is_accepted(options: ExpertOptions) -> None:
    assert expert_arguments(options, EIGHT)


@pytest.mark.parametrize(
    ("options", "parallelism", "words"),
    [
        (ExpertOptions(eplb=True), ONE, "experts.eplb needs expert parallelism"),
        (ExpertOptions(redundant=4), ONE, "experts.redundant needs expert parallelism"),
        (ExpertOptions(redundant=8), EIGHT, "experts.redundant: no token is sent to the copies"),
        (ExpertOptions(eplb=True, recorder="per_pass"), EIGHT, "must be stat or stat_approx, not per_pass"),
        (ExpertOptions(eplb=True, interval=100, recorder_buffer=101), EIGHT, r"\(101\) must not be larger .* \(100\)"),
        (ExpertOptions(interval=10), EIGHT, "experts.interval .* experts.eplb, which is off"),
        (ExpertOptions(layers_per_chunk=2), EIGHT, "experts.layers_per_chunk .* experts.eplb, which is off"),
        (
            ExpertOptions(utilization_threshold=0.5),
            EIGHT,
            "experts.utilization_threshold .* experts.eplb, which is off",
        ),
        (ExpertOptions(eplb=True, utilization_threshold=0.5), EIGHT, "only with experts.report"),
        (
            ExpertOptions(eplb=True, utilization_threshold=0.5, report="both"),
            Parallelism(8, device="cpu"),
            "experts.utilization_threshold: SGLang measures utilisation on GPUs only",
        ),
        (ExpertOptions(recorder_buffer=10), EIGHT, "a recorder that counts.* not off"),
        (ExpertOptions(recorder="per_token", recorder_buffer=10), EIGHT, "a recorder that counts.* not per_token"),
        (ExpertOptions(recorder="stat_approx"), EIGHT, "stat_approx needs DeepEP in normal mode"),
        (ExpertOptions(recorder="stat"), Parallelism(8, "deepep"), "does not record with --deepep-mode auto"),
        (ExpertOptions(eplb=True), Parallelism(8, "deepep"), "does not record with --deepep-mode auto"),
        (ExpertOptions(algorithm="deepseek"), EIGHT, "experts.algorithm is for experts.eplb"),
        (ExpertOptions(dispatch="dynamic"), EIGHT, "experts.dispatch chooses among copies"),
        (ExpertOptions(eplb=True, dispatch="static"), EIGHT, "experts.dispatch: static needs an all-to-all backend"),
        (ExpertOptions(eplb=True, dispatch="lp"), EIGHT, "experts.dispatch: lp needs an all-to-all backend"),
        (ExpertOptions(ranks=2), EIGHT, "experts.ranks and experts.nodes are for the engine torch"),
        (ExpertOptions(eplb=True, algorithm="global"), EIGHT, "global is for the engine torch; SGLang has auto"),
        (ExpertOptions(layout="nowhere.json"), EIGHT, "cannot read .*nowhere.json"),
        (ExpertOptions(layout='{"logical_count": [[1]]}'), EIGHT, "must end in .json or .pt"),
    ],
)
def test_a_contradiction_is_refused(options: ExpertOptions, parallelism: Parallelism, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        expert_arguments(options, parallelism)


@pytest.mark.parametrize(
    "options",
    [
        ExpertOptions(recorder="stat_approx"),
        ExpertOptions(eplb=True, dispatch="lp"),
        ExpertOptions(eplb=True, dispatch="static", report="prometheus", utilization_threshold=0.5),
    ],
)
def test_what_an_all_to_all_backend_allows_is_accepted(options: ExpertOptions) -> None:
    assert expert_arguments(options, DEEPEP)


def test_with_an_all_to_all_backend_experts_are_on_all_ranks() -> None:
    values = {"tp_size": 8, "ep_size": 1, "deepep_mode": "auto", "device": None}
    assert Parallelism.of({**values, "moe_a2a_backend": "none"}).ep_size == 1
    assert Parallelism.of({**values, "moe_a2a_backend": "deepep"}).ep_size == 8


@pytest.mark.parametrize(
    ("values", "records"),
    [
        ({}, False),
        ({"enable_eplb": False, "expert_balancedness_report_mode": "off"}, False),
        ({"expert_distribution_recorder_mode": "per_pass"}, True),
        ({"enable_eplb": True}, True),
        ({"expert_balancedness_report_mode": "prometheus"}, True),
    ],
)
def test_rebalancing_and_reports_turn_the_recorder_on(values: dict[str, object], records: bool) -> None:
    assert records_experts(values) is records


def test_a_layout_must_fit_redundant_and_ranks(tmp_path: Path) -> None:
    layout = put(tmp_path / "layout.json", {"physical_to_logical_map": [[0, 1, 2, 0], [2, 1, 0, 1]]})
    with pytest.raises(ConfigError, match=r"4 slots for 3 experts: set experts\.redundant to 1, not 0"):
        expert_arguments(ExpertOptions(layout=layout), Parallelism(2))
    with pytest.raises(ConfigError, match="4 slots for experts do not divide over 3 ranks"):
        expert_arguments(ExpertOptions(layout=layout, redundant=1), Parallelism(3))
    with pytest.raises(ConfigError, match=r"neither physical_to_logical_map nor logical_count"):
        expert_arguments(ExpertOptions(layout=put(tmp_path / "other.json", {})), Parallelism(2))


def test_a_dump_may_be_the_layout_and_the_engine_plans(tmp_path: Path) -> None:
    dump = put(tmp_path / "dump.json", {"logical_count": [[5, 1, 1]], "rank": 0})
    options = ExpertOptions(layout=dump, redundant=1, algorithm="deepseek")
    assert "--eplb-algorithm" in expert_arguments(options, Parallelism(2))
    with pytest.raises(ConfigError, match="3 slots for experts do not divide over 2 ranks"):
        expert_arguments(ExpertOptions(layout=dump), Parallelism(2))


def test_a_path_is_made_one_that_sglang_understands(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    put(tmp_path / "layout.json", {"physical_to_logical_map": [[0, 1]]})
    expected = ["--init-expert-location", str(tmp_path / "layout.json")]
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    assert expert_arguments(ExpertOptions(layout="~/layout.json"), Parallelism(2)) == expected
    assert expert_arguments(ExpertOptions(layout="layout.json"), Parallelism(2)) == expected


@pytest.mark.parametrize(
    "values",
    [
        {"redundant": -1},
        {"recorder_buffer": -2},
        {"interval": 0},
        {"layout": ""},
        {"algorithm": "best"},
        {"layers_per_chunk": -1},
        {"utilization_threshold": 0.0},
        {"utilization_threshold": 1.1},
        {"dispatch": "random"},
    ],
)
def test_values_out_of_bounds_are_refused(values: dict[str, object]) -> None:
    with pytest.raises(msgspec.ValidationError):
        msgspec.convert(values, ExpertOptions)
