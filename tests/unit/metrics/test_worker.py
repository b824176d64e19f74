"""Metrics of a worker, as Prometheus reads them, and its one line for each request."""

import logging

import msgspec
import pytest
from prometheus_client.parser import text_string_to_metric_families

from baton.metrics.families import SECONDS, Distribution
from baton.metrics.worker import WorkerMetrics
from baton.ports.observer import RequestRecord
from baton.protocol.events import LoadSnapshot
from baton.protocol.ids import RequestId
from baton.protocol.lifecycle import TERMINAL, State


def record(
    state: State = State.COMPLETED,
    error_code: str | None = None,
    role: str = "aggregated",
    first_output_s: float | None = 0.02,
) -> RequestRecord:
    return RequestRecord(
        request_id=RequestId("me.1"),
        role=role,
        state=state,
        error_code=error_code,
        prompt_tokens=10,
        cached_tokens=4,
        completion_tokens=3,
        first_output_s=first_output_s,
        duration_s=0.2,
        model="mine",
        trace_id="abc",
    )


def samples(metrics: WorkerMetrics) -> dict[tuple[str, frozenset[str]], float]:
    """Return every sample by its name and its label values."""
    return {
        (sample.name, frozenset(sample.labels.values())): sample.value
        for family in text_string_to_metric_families(metrics.render())
        for sample in family.samples
    }


def value(metrics: WorkerMetrics, name: str, *labels: str) -> float:
    return samples(metrics)[name, frozenset(labels)]


def test_every_terminal_state_is_there_before_the_first_request() -> None:
    metrics = WorkerMetrics("aggregated")
    for state in TERMINAL:
        assert value(metrics, "baton_requests_total", "aggregated", state.value) == 0


@pytest.mark.parametrize("state", sorted(TERMINAL))
def test_a_request_is_counted_once_by_role_and_state(state: State) -> None:
    metrics = WorkerMetrics("aggregated")
    metrics.finished(record(state))
    counted = {key: count for key, count in samples(metrics).items() if key[0] == "baton_requests_total" and count}
    assert counted == {("baton_requests_total", frozenset({"aggregated", state.value})): 1.0}


def test_tokens_and_times_add_up() -> None:
    metrics = WorkerMetrics("aggregated")
    metrics.finished(record())
    metrics.finished(record(first_output_s=None))
    assert value(metrics, "baton_tokens_total", "aggregated", "prompt") == 20
    assert value(metrics, "baton_tokens_total", "aggregated", "cached") == 8
    assert value(metrics, "baton_tokens_total", "aggregated", "completion") == 6
    assert value(metrics, "baton_first_output_seconds_count", "aggregated") == 1
    assert value(metrics, "baton_request_seconds_count", "aggregated") == 2
    assert value(metrics, "baton_request_seconds_sum", "aggregated") == pytest.approx(0.4)


def test_errors_are_counted_by_code() -> None:
    metrics = WorkerMetrics("aggregated")
    metrics.finished(record(State.FAILED, "engine_failed"))
    metrics.finished(record(State.REFUSED, "overloaded"))
    metrics.finished(record(State.REFUSED, "overloaded"))
    assert value(metrics, "baton_errors_total", "engine_failed") == 1
    assert value(metrics, "baton_errors_total", "overloaded") == 2


def test_probes_are_counted_apart_from_requests() -> None:
    metrics = WorkerMetrics("aggregated")
    metrics.finished(record(role="canary"))
    assert value(metrics, "baton_requests_total", "canary", "completed") == 1
    assert value(metrics, "baton_requests_total", "aggregated", "completed") == 0


def test_probes_do_not_count_as_the_work_of_clients() -> None:
    metrics = WorkerMetrics("aggregated")
    metrics.finished(record(role="canary"))
    assert value(metrics, "baton_tokens_total", "aggregated", "completion") == 0
    assert value(metrics, "baton_request_seconds_count", "aggregated") == 0


def test_the_load_of_the_engine_is_shown() -> None:
    metrics = WorkerMetrics("aggregated")
    metrics.load(LoadSnapshot(running=3, waiting=2, used_blocks=10, total_blocks=64))
    assert value(metrics, "baton_engine_running_requests", "0") == 3
    assert value(metrics, "baton_engine_waiting_requests", "0") == 2
    assert value(metrics, "baton_engine_kv_blocks", "used", "0") == 10
    assert value(metrics, "baton_engine_kv_blocks", "free", "0") == 54


def test_the_load_is_shown_by_rank() -> None:
    metrics = WorkerMetrics("aggregated")
    metrics.load(LoadSnapshot(running=3, waiting=2, used_blocks=10, total_blocks=64))
    metrics.load(LoadSnapshot(running=1, waiting=0, used_blocks=4, total_blocks=64, dp_rank=1))
    metrics.load(LoadSnapshot(running=2, waiting=1, used_blocks=8, total_blocks=64))
    assert [value(metrics, "baton_engine_running_requests", rank) for rank in ("0", "1")] == [2, 1]
    assert [value(metrics, "baton_engine_waiting_requests", rank) for rank in ("0", "1")] == [1, 0]
    assert [value(metrics, "baton_engine_kv_blocks", "used", rank) for rank in ("0", "1")] == [8, 4]
    assert [value(metrics, "baton_engine_kv_blocks", "free", rank) for rank in ("0", "1")] == [56, 60]


def test_commands_are_counted_by_name_and_outcome() -> None:
    metrics = WorkerMetrics("aggregated")
    metrics.count_command("pause", "ok", 0.5)
    metrics.count_command("pause", "conflict", 1.5)
    assert value(metrics, "baton_commands_total", "pause", "ok") == 1
    assert value(metrics, "baton_commands_total", "pause", "conflict") == 1
    assert value(metrics, "baton_command_seconds_sum", "pause") == 2


def test_gauges_of_the_worker_are_shown() -> None:
    metrics = WorkerMetrics("aggregated")
    metrics.healthy.set(True)
    metrics.in_flight.set(7)
    assert (value(metrics, "baton_healthy"), value(metrics, "baton_requests_in_flight")) == (1, 7)


class Rooms:
    open = {"offered": 2, "claimed": 1}
    ended = {"done": 7, "failed": 0}


class Traffic:
    bytes_by_transport = {"shm": 4096.0}

    @property
    def seconds_by_transport(self) -> dict[str, Distribution]:
        fetches = Distribution(SECONDS)
        fetches.observe(0.25)
        return {"shm": fetches}


def test_rooms_and_traffic_are_shown_where_the_role_has_them() -> None:
    prefill, decode = WorkerMetrics("prefill"), WorkerMetrics("decode")
    prefill.show_transfers(Rooms(), None)
    decode.show_transfers(None, Traffic())
    assert value(prefill, "baton_rooms_open", "offered") == 2
    assert value(prefill, "baton_rooms_ended_total", "done") == 7
    assert value(decode, "baton_transfer_bytes_total", "shm") == 4096
    assert value(decode, "baton_transfer_seconds_sum", "shm") == 0.25
    assert "baton_transfer" not in prefill.render()
    assert "baton_rooms_open" not in decode.render()


def test_two_workers_in_one_process_do_not_share_counts() -> None:
    first, second = WorkerMetrics("aggregated"), WorkerMetrics("aggregated")
    first.finished(record())
    assert value(second, "baton_requests_total", "aggregated", "completed") == 0


def test_a_request_has_one_line_at_info_and_a_probe_none(caplog: pytest.LogCaptureFixture) -> None:
    metrics = WorkerMetrics("aggregated")
    with caplog.at_level(logging.INFO, logger="baton.request"):
        metrics.finished(record(State.FAILED, "engine_failed"))
        metrics.finished(record(role="canary"))
    [line] = caplog.messages
    assert line.startswith("me.1 aggregated failed error=engine_failed")
    assert line.endswith("model=mine trace=abc client=-")


def test_queue_and_prefill_are_counted_where_the_engine_reports_them() -> None:
    metrics = WorkerMetrics("aggregated")
    metrics.finished(record())
    metrics.finished(msgspec.structs.replace(record(), queue_s=0.5, prefill_s=0.25))
    assert value(metrics, "baton_queue_seconds_count", "aggregated") == 1
    assert value(metrics, "baton_queue_seconds_sum", "aggregated") == 0.5
    assert value(metrics, "baton_prefill_seconds_sum", "aggregated") == 0.25


def test_a_decode_worker_shows_gaps_and_no_prefill() -> None:
    metrics = WorkerMetrics("decode")
    metrics.token_gaps.observe(0.02)
    assert value(metrics, "baton_token_gap_seconds_count", "decode") == 1
    assert "baton_prefill_seconds" not in metrics.render()
