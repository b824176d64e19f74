"""The runtime's metrics in base units."""

from prometheus_client.parser import text_string_to_metric_families

from baton.runtimes.dynamo.metric_units import RENAMED, with_base_units

TEXT = """\
# HELP dynamo_router_overhead_scheduling_ms Time spent in scheduler worker selection in milliseconds
# TYPE dynamo_router_overhead_scheduling_ms histogram
dynamo_router_overhead_scheduling_ms_bucket{router_id="1",le="0.5"} 2
dynamo_router_overhead_scheduling_ms_bucket{router_id="1",le="+Inf"} 3
dynamo_router_overhead_scheduling_ms_sum{router_id="1"} 7.5
dynamo_router_overhead_scheduling_ms_count{router_id="1"} 3
# HELP dynamo_frontend_detokenize_total_us Cumulative detokenization time (microseconds)
# TYPE dynamo_frontend_detokenize_total_us counter
dynamo_frontend_detokenize_total_us 68
# HELP dynamo_frontend_lora_churn_loads_total Total LoRA loads (new placements) this tick
# TYPE dynamo_frontend_lora_churn_loads_total gauge
dynamo_frontend_lora_churn_loads_total{endpoint="baton/decode/generate"} 4
# HELP dynamo_frontend_requests_total Total number of LLM requests processed
# TYPE dynamo_frontend_requests_total counter
dynamo_frontend_requests_total{model="a_ms 1"} 5
"""


def test_times_become_seconds_and_other_metrics_stay() -> None:
    samples = {
        (sample.name, *sample.labels.values()): sample.value
        for family in text_string_to_metric_families(with_base_units(TEXT))
        for sample in family.samples
    }
    assert samples == {
        ("dynamo_router_overhead_scheduling_seconds_bucket", "1", "0.0005"): 2,
        ("dynamo_router_overhead_scheduling_seconds_bucket", "1", "+Inf"): 3,
        ("dynamo_router_overhead_scheduling_seconds_sum", "1"): 0.0075,
        ("dynamo_router_overhead_scheduling_seconds_count", "1"): 3,
        ("dynamo_frontend_detokenize_seconds_total",): 0.000068,
        ("dynamo_frontend_lora_churn_loads", "baton/decode/generate"): 4,
        ("dynamo_frontend_requests_total", "a_ms 1"): 5,
    }


def test_help_does_not_name_the_old_unit() -> None:
    text = with_base_units(TEXT)
    assert "# HELP dynamo_router_overhead_scheduling_seconds Time spent in scheduler worker selection\n" in text
    assert "# HELP dynamo_frontend_detokenize_seconds_total Cumulative detokenization time\n" in text


def test_text_that_is_no_sample_is_passed_on() -> None:
    assert with_base_units("# EOF\n\nnot a sample at all\n") == "# EOF\n\nnot a sample at all\n"


def test_new_names_follow_their_types() -> None:
    for renamed in RENAMED.values():
        assert renamed.name.endswith("_total") == (renamed.kind == "counter")
