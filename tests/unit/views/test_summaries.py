"""One request in a line: where each number comes from."""

from baton.views.reports import ErrorReport
from baton.views.summaries import summarize
from baton.views.traces import Trace
from tests.unit.views.hops import START_US, hop


def trace_of(*hops: object) -> Trace:
    trace = Trace("t")
    for each in hops:
        trace.put(each)  # type: ignore[arg-type]
    return trace


def test_a_disaggregated_request_has_the_numbers_of_all_its_hops() -> None:
    frontend = hop("frontend", "frontend", {"received": 0, "first_token": 700}, duration=2000, model="m")
    prefill = hop("prefill-0", "prefill", {"queued": 10, "first_step": 60}, at=100, prompt_tokens=32, cached_tokens=16)
    decode = hop(
        "decode-0",
        "decode",
        {"submitted": 5, "kv_claimed": 10, "kv_moved": 300, "first_step": 320, "first_token": 400},
        at=150,
        completion_tokens=4,
        gaps_us=(100, 300, 200),
        details={"kv_moved": {"transport": "shm", "bytes": 4096}},
    )
    seen = summarize(trace_of(decode, prefill, frontend))
    assert (seen.model, seen.started_us, seen.duration_us, seen.state) == ("m", START_US, 2000, "completed")
    assert (seen.prompt_tokens, seen.cached_tokens, seen.completion_tokens) == (32, 16, 4)
    assert (seen.first_token_us, seen.gap_us, seen.gap_max_us, seen.kv_bytes) == (700, 200, 300, 4096)
    assert seen.queue_us == 50 + 20, "a decode worker waits for its KV, not in a queue"
    assert seen.processes == ["frontend", "prefill-0", "decode-0"]


def test_the_cause_is_the_error_of_the_hop_that_failed_first() -> None:
    frontend = hop("frontend", "frontend", {}, duration=900, state="failed", error=ErrorReport(code="engine_failed"))
    prefill = hop("prefill-0", "prefill", {}, duration=500, state="failed", error=ErrorReport(code="out_of_memory"))
    decode = hop("decode-0", "decode", {}, duration=600, state="failed", error=ErrorReport(code="peer_lost"))
    seen = summarize(trace_of(frontend, prefill, decode))
    assert (seen.state, seen.error_code, seen.error_process) == ("failed", "out_of_memory", "prefill-0")


def test_targets_and_pools_are_those_of_the_router() -> None:
    router = hop(
        "router",
        "router",
        {"pool_selected": 5, "retried": 9},
        details={"pool_selected": {"pool": "fast", "ttft_ms": 200, "itl_ms": 12.5}},
    )
    seen = summarize(trace_of(router))
    assert (seen.target_ttft_ms, seen.target_itl_ms, seen.pools, seen.retries) == (200.0, 12.5, ["fast"], 1)


def test_a_request_that_has_only_begun_has_no_latencies() -> None:
    seen = summarize(trace_of(hop("worker-0", "aggregated", {"received": 0}, state=None, duration=50)))
    assert (seen.state, seen.first_token_us, seen.queue_us, seen.gap_us) == (None, None, None, None)


def test_the_gaps_of_a_long_answer_are_those_of_single_outputs() -> None:
    decode = hop("decode-0", "decode", {"first_token": 5}, gaps_us=(400, 800, 1600), outputs_per_gap=4)
    seen = summarize(trace_of(decode))
    assert (seen.gap_us, seen.gap_max_us) == (200, 400)


def test_without_a_frontend_a_request_runs_until_its_last_hop_ends() -> None:
    prefill = hop("prefill-0", "prefill", {"first_token": 90}, duration=100)
    decode = hop("decode-0", "decode", {"first_token": 50}, at=80, duration=500, state=None)
    seen = summarize(trace_of(prefill, decode))
    assert (seen.state, seen.duration_us) == (None, 580)
    failed = hop("decode-0", "decode", {"first_token": 50}, at=80, duration=900, state="failed")
    seen = summarize(trace_of(prefill, failed))
    assert (seen.state, seen.duration_us) == ("failed", 980)


def test_cached_tokens_that_no_hop_knows_are_unknown() -> None:
    assert summarize(trace_of(hop("worker-0", "aggregated", {}))).cached_tokens is None
    assert summarize(trace_of(hop("worker-0", "aggregated", {}, cached_tokens=0))).cached_tokens == 0
