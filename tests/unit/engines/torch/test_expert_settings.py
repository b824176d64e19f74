"""Settings of experts for the built-in engine: what they become for a model, and what is refused by name."""

import json
from pathlib import Path

import pytest

from baton.config.engines import ExpertOptions
from baton.engines.torch.experts.settings import ExpertSettings, resolve_experts
from baton.engines.torch.models.experts import ExpertShape
from baton.errors import ConfigError

EXPERTS = ExpertShape(count=4, per_token=2, ffn=8, shared_ffn=0, normalised=True, layers=(1, 3))
LAYERS = 4


def put(path: Path, content: object) -> str:
    path.write_text(json.dumps(content))
    return str(path)


def resolved(options: ExpertOptions) -> ExpertSettings:
    settings = resolve_experts(options, EXPERTS, LAYERS)
    assert settings is not None
    return settings


def test_without_settings_experts_are_in_order_and_nothing_is_recorded() -> None:
    settings = resolved(ExpertOptions())
    assert settings.layout == [[0, 1, 2, 3]] * 2
    assert (settings.recorder, settings.balancer) == (None, None)
    assert not settings.report_log
    assert not settings.report_metrics


def test_rebalancing_counts_the_last_passes_of_the_interval() -> None:
    settings = resolved(ExpertOptions(eplb=True, ranks=2, interval=50, recorder_buffer=20, layers_per_chunk=1))
    assert settings.recorder == "stat"
    assert settings.balancer is not None
    assert (settings.balancer.interval, settings.balancer.window, settings.balancer.layers_per_chunk) == (50, 20, 1)
    everything = resolved(ExpertOptions(eplb=True, ranks=2, interval=50, recorder_buffer=-1))
    assert everything.balancer is not None
    assert (everything.balancer.window, everything.record_passes) == (50, None)


def test_reports_turn_the_recorder_on() -> None:
    settings = resolved(ExpertOptions(report="both"))
    assert (settings.recorder, settings.report_log, settings.report_metrics) == ("stat", True, True)
    assert resolved(ExpertOptions(recorder="per_token", recorder_buffer=7)).record_passes == 7
    assert resolved(ExpertOptions(recorder="per_pass")).record_passes == 1000


def test_a_layout_file_gives_the_rows_of_sparse_layers(tmp_path: Path) -> None:
    rows = [[0, 1, 2, 3, 0, 1], [3, 2, 1, 0, 3, 3], [0, 1, 2, 3, 0, 1], [2, 2, 2, 1, 0, 3]]
    layout = put(tmp_path / "layout.json", {"physical_to_logical_map": rows})
    assert resolved(ExpertOptions(layout=layout, redundant=2, ranks=2)).layout == [rows[1], rows[3]]


def test_a_dump_as_layout_is_planned(tmp_path: Path) -> None:
    counts = [[0] * 4, [9, 9, 1, 1], [0] * 4, [1, 1, 1, 1]]
    dump = put(tmp_path / "dump.json", {"logical_count": counts, "rank": 0})
    first, _ = resolved(ExpertOptions(layout=dump, ranks=2, algorithm="global")).layout
    assert {frozenset(first[:2]), frozenset(first[2:])} in (
        {frozenset({0, 2}), frozenset({1, 3})},
        {frozenset({0, 3}), frozenset({1, 2})},
    )


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (ExpertOptions(eplb=True), "experts.eplb needs expert parallelism: set experts.ranks above 1"),
        (ExpertOptions(redundant=4), "experts.redundant needs expert parallelism"),
        (ExpertOptions(ranks=3), "4 experts and 0 redundant experts cannot be divided over 3 ranks"),
        (ExpertOptions(ranks=4, nodes=3), "4 ranks cannot be divided over 3 nodes"),
        (ExpertOptions(eplb=True, ranks=2, recorder="per_token"), "must be stat or stat_approx, not per_token"),
        (ExpertOptions(eplb=True, ranks=2, algorithm="deepseek"), "deepseek is SGLang's; .* auto, global and hierarch"),
        (ExpertOptions(eplb=True, ranks=2, algorithm="hierarchical"), "needs the number of expert groups"),
        (ExpertOptions(eplb=True, ranks=2, dispatch="lp"), "lp is SGLang's; the engine torch has static and dynamic"),
        (ExpertOptions(dispatch="static", ranks=2), "experts.dispatch chooses among copies"),
        (ExpertOptions(recorder_buffer=10), "nothing is recorded; set experts.recorder"),
        (ExpertOptions(interval=10), "experts.eplb, which is off"),
        (ExpertOptions(layers_per_chunk=1), "experts.eplb, which is off"),
        (ExpertOptions(utilization_threshold=0.5), "experts.eplb, which is off"),
        (ExpertOptions(algorithm="global"), "experts.algorithm is for experts.eplb"),
        (ExpertOptions(layout="nowhere.json"), "cannot read .*nowhere.json"),
    ],
)
def test_a_contradiction_is_refused(options: ExpertOptions, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        resolve_experts(options, EXPERTS, LAYERS)


@pytest.mark.parametrize("rows", [[[0, 1, 2, 3]] * 3, [[0, 1]] * 4])
def test_a_layout_of_another_model_is_refused(tmp_path: Path, rows: list[list[int]]) -> None:
    layout = put(tmp_path / "layout.json", {"physical_to_logical_map": rows})
    with pytest.raises(ConfigError, match="this model has 4 layers of 4 experts"):
        resolve_experts(ExpertOptions(layout=layout, ranks=2), EXPERTS, LAYERS)


@pytest.mark.parametrize("options", [ExpertOptions(recorder="stat"), ExpertOptions(ranks=2), ExpertOptions(eplb=True)])
def test_a_model_without_experts_refuses_every_setting(options: ExpertOptions) -> None:
    assert resolve_experts(ExpertOptions(), None, LAYERS) is None
    with pytest.raises(ConfigError, match=r"experts\.\w+: the model has no experts"):
        resolve_experts(options, None, LAYERS)
