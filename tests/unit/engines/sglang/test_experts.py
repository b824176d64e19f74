"""Settings of expert balancing: the arguments they become, and the contradictions that are told at once."""

import json
from pathlib import Path

import msgspec
import pytest

from baton.config.engines import ExpertOptions
from baton.engines.sglang.experts import expert_arguments
from baton.errors import ConfigError


def put(path: Path, content: object) -> str:
    path.write_text(json.dumps(content))
    return str(path)


def test_without_settings_sglang_is_told_nothing() -> None:
    assert expert_arguments(ExpertOptions(), ep_size=1) == []


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
        report="both",
    )
    assert expert_arguments(options, ep_size=2) == [
        "--enable-eplb",
        *("--ep-num-redundant-experts", "1"),
        *("--expert-distribution-recorder-mode", "stat_approx"),
        *("--expert-distribution-recorder-buffer-size", "200"),
        *("--init-expert-location", layout),
        *("--eplb-algorithm", "deepseek_vec"),
        *("--eplb-rebalance-num-iterations", "500"),
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
    ],
)
def test_what_goes_together_is_accepted(options: ExpertOptions) -> None:
    assert expert_arguments(options, ep_size=8)


@pytest.mark.parametrize(
    ("options", "ep_size", "words"),
    [
        (ExpertOptions(eplb=True), 1, "experts.eplb needs expert parallelism"),
        (ExpertOptions(redundant=4), 1, "experts.redundant needs expert parallelism"),
        (ExpertOptions(eplb=True, recorder="per_pass"), 8, "must be stat or stat_approx, not per_pass"),
        (ExpertOptions(eplb=True, interval=100, recorder_buffer=101), 8, r"\(101\) must not be larger .* \(100\)"),
        (ExpertOptions(interval=10), 8, "experts.eplb, which is off"),
        (ExpertOptions(recorder_buffer=10), 8, "a recorder that counts.* not off"),
        (ExpertOptions(recorder="per_token", recorder_buffer=10), 8, "a recorder that counts.* not per_token"),
        (ExpertOptions(algorithm="deepseek"), 8, "experts.algorithm is for experts.eplb"),
        (ExpertOptions(layout="nowhere.json"), 8, "cannot read .*nowhere.json"),
        (ExpertOptions(layout='{"logical_count": [[1]]}'), 8, "must end in .json or .pt"),
    ],
)
def test_a_contradiction_is_refused(options: ExpertOptions, ep_size: int, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        expert_arguments(options, ep_size)


def test_a_layout_must_fit_redundant_and_ranks(tmp_path: Path) -> None:
    layout = put(tmp_path / "layout.json", {"physical_to_logical_map": [[0, 1, 2, 0], [2, 1, 0, 1]]})
    with pytest.raises(ConfigError, match=r"4 slots for 3 experts: set experts\.redundant to 1, not 0"):
        expert_arguments(ExpertOptions(layout=layout), ep_size=2)
    with pytest.raises(ConfigError, match="4 slots for experts do not divide over 3 ranks"):
        expert_arguments(ExpertOptions(layout=layout, redundant=1), ep_size=3)
    with pytest.raises(ConfigError, match=r"neither physical_to_logical_map nor logical_count"):
        expert_arguments(ExpertOptions(layout=put(tmp_path / "other.json", {})), ep_size=2)


def test_a_dump_may_be_the_layout_and_the_engine_plans(tmp_path: Path) -> None:
    dump = put(tmp_path / "dump.json", {"logical_count": [[5, 1, 1]], "rank": 0})
    options = ExpertOptions(layout=dump, redundant=1, algorithm="deepseek")
    assert "--eplb-algorithm" in expert_arguments(options, ep_size=2)
    with pytest.raises(ConfigError, match="3 slots for experts do not divide over 2 ranks"):
        expert_arguments(ExpertOptions(layout=dump), ep_size=2)


def test_a_path_is_made_one_that_sglang_understands(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    put(tmp_path / "layout.json", {"physical_to_logical_map": [[0, 1]]})
    expected = ["--init-expert-location", str(tmp_path / "layout.json")]
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    assert expert_arguments(ExpertOptions(layout="~/layout.json"), ep_size=2) == expected
    assert expert_arguments(ExpertOptions(layout="layout.json"), ep_size=2) == expected


@pytest.mark.parametrize(
    "values", [{"redundant": -1}, {"recorder_buffer": -2}, {"interval": 0}, {"layout": ""}, {"algorithm": "best"}]
)
def test_values_out_of_bounds_are_refused(values: dict[str, object]) -> None:
    with pytest.raises(msgspec.ValidationError):
        msgspec.convert(values, ExpertOptions)
