"""Metric families: bounded labels, histograms, and what every process shows."""

import os
import re
import subprocess
import sys

import pytest
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from baton.edge.counts import EdgeCounts
from baton.edge.routes import Route
from baton.metrics.families import Counted, Family, Label, Observed
from baton.metrics.worker import WorkerMetrics
from baton.ports.observer import RequestRecord
from baton.protocol.events import LoadSnapshot
from baton.protocol.ids import RequestId
from baton.protocol.lifecycle import State
from baton.router.metrics import RouterMetrics
from tools.metrics_page import all_families

NAMES = 1000
SUFFIX_OF_UNIT = {"seconds": "_seconds", "bytes": "_bytes", "ratio": "_ratio"}


def family(*labels: Label, kind: str = "counter") -> Family:
    name = "baton_things_total" if kind == "counter" else "baton_things_seconds"
    return Family(
        name=name, kind=kind, unit="things", meaning="Things", processes=(), labels=labels, buckets=(0.1, 1.0)
    )


def series(text: str) -> dict[str, float]:
    return {
        f"{sample.name}{sorted(sample.labels.items())}": sample.value
        for parsed in text_string_to_metric_families(text)
        for sample in parsed.samples
    }


def record(number: int) -> RequestRecord:
    """Return a request that brings names of its own in everything that clients choose."""
    return RequestRecord(
        request_id=RequestId(f"request-{number}"),
        role="aggregated",
        state=State.FAILED,
        error_code=f"Invented{number}",
        prompt_tokens=1,
        cached_tokens=0,
        completion_tokens=1,
        first_output_s=0.1,
        duration_s=0.2,
        model=f"model-{number}",
        trace_id=f"trace-{number}",
        client_id=f"client-{number}",
    )


def test_values_that_a_label_does_not_list_are_one_series() -> None:
    registry = CollectorRegistry()
    counted = Counted(family(Label("colour", ("red", "blue"))), registry)
    counted.labels("red").inc()
    for number in range(NAMES):
        counted.labels(f"colour {number}").inc()
    lines = [line for line in generate_latest(registry).decode().splitlines() if not line.startswith("#")]
    assert sorted(lines) == ['baton_things_total{colour="other"} 1000.0', 'baton_things_total{colour="red"} 1.0']


def test_a_wrong_number_of_labels_is_refused() -> None:
    counted = Counted(family(Label("colour", ("red",))), CollectorRegistry())
    with pytest.raises(ValueError, match="1 labels"):
        counted.labels("red", "blue")


def test_a_histogram_counts_up_to_and_including_each_bound() -> None:
    registry = CollectorRegistry()
    observed = Observed(family(kind="histogram"), registry)
    for amount in (0.05, 0.1, 0.5, 7.0):
        observed.labels().observe(amount)
    values = series(generate_latest(registry).decode())
    buckets = {key: value for key, value in values.items() if "_bucket" in key}
    assert list(buckets.values()) == [2, 3, 4]
    assert values["baton_things_seconds_count[]"] == 4
    assert values["baton_things_seconds_sum[]"] == pytest.approx(7.65)


def test_a_thousand_names_of_clients_add_no_series_to_a_worker() -> None:
    metrics = WorkerMetrics("aggregated")
    metrics.finished(record(0))
    before = set(series(metrics.render()))
    for number in range(NAMES):
        metrics.finished(record(number))
    assert set(series(metrics.render())) == before


def test_a_thousand_names_of_clients_add_no_series_to_a_router() -> None:
    metrics = RouterMetrics(list)
    metrics.finished(record(0))
    metrics.retried("decode", "pool", "invented")
    before = set(series(metrics.render()))
    for number in range(NAMES):
        metrics.finished(record(number))
        metrics.retried("decode", "pool", f"invented {number}")
    assert set(series(metrics.render())) == before


def test_a_thousand_paths_and_statuses_add_no_series_to_the_edge() -> None:
    counts = EdgeCounts()
    for number in range(NAMES):
        counts.answered(None, 404)
        counts.answered(None, 600 + number)
        counts.answered(Route(path=f"/below/{number}", methods=("GET",)), 200)
    answers = [key for key in series(counts.exposition()) if key.startswith("baton_edge_answers_total")]
    assert len(answers) == 3


def test_every_family_is_named_by_its_kind_and_unit() -> None:
    for each in all_families():
        assert re.fullmatch(r"baton_[a-z_]+", each.name), each.name
        assert each.name.endswith("_total") == (each.kind == "counter"), each.name
        suffix = SUFFIX_OF_UNIT.get(each.unit, "")
        assert each.name.removesuffix("_total").endswith(suffix), each.name
        assert bool(each.buckets) == (each.kind == "histogram"), each.name
        assert each.processes, each.name
        assert all(bool(label.values) != bool(label.source) for label in each.labels), each.name


def test_names_of_families_are_unique() -> None:
    names = [each.name.removesuffix("_total") for each in all_families()]
    assert len(names) == len(set(names))


@pytest.mark.process
def test_a_process_shows_its_version_its_name_and_its_restarts() -> None:
    code = "from baton.metrics.worker import WorkerMetrics; print(WorkerMetrics('prefill', 'mine', 'echo').render())"
    variables = {"SUPERVISED_PROCESS_NAME": "8000/prefill-0", "SUPERVISED_PROCESS_RESTARTS": "3"}
    shown = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, **variables},
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    ).stdout
    assert 'baton_process_info{engine="echo",model="mine",name="prefill-0",role="prefill"} 1.0' in shown
    assert "baton_process_restarts_total 3.0" in shown
    assert re.search(r'baton_build_info\{python="3\.\d+\.\d+",runtime="[^"]*",version="[^"]+"\} 1\.0', shown)
    assert re.search(r"process_resident_memory_bytes \d", shown)


def test_ranks_are_labels_of_the_load_only() -> None:
    metrics = WorkerMetrics("decode")
    for rank in range(4):
        metrics.load(LoadSnapshot(running=rank, waiting=0, used_blocks=1, total_blocks=8, dp_rank=rank))
    ranked = {key.split("[")[0] for key in series(metrics.render()) if "dp_rank" in key}
    assert ranked == {"baton_engine_running_requests", "baton_engine_waiting_requests", "baton_engine_kv_blocks"}
