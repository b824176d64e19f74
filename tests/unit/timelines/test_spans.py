"""Spans of a finished timeline: one for the request, one for each part, and what they say of a failure."""

from time import perf_counter_ns

import pytest

from baton.protocol.outputs import PromptProgress
from baton.timelines.ring import TimelineRing
from baton.timelines.spans import Span, spans_of
from baton.timelines.timeline import Failure, FinalCounts, Recorder, Timeline
from baton.timelines.trace_context import TraceContext

TRACE = TraceContext(f"00-{'a' * 32}-{'b' * 16}-01", f"00-{'a' * 32}-{'c' * 16}-01")


def finished(record: list[Timeline]) -> tuple[TimelineRing, Recorder]:
    ring = TimelineRing(10, "decode")
    ring.on_finish = record.append
    return ring, ring.start("r1", "m", TRACE, "client-1", FinalCounts(7, 3, 5))


def spans(state: str, failure: Failure | None = None, *phases: str) -> list[Span]:
    record: list[Timeline] = []
    _, recorder = finished(record)
    for phase in phases:
        recorder.mark(phase)  # type: ignore[arg-type]
    recorder.finish(state, failure)
    return spans_of(record[0])


def test_the_span_of_a_request_has_its_ids_counts_and_phases() -> None:
    [span] = spans("completed", None, "admitted", "submitted")
    assert (span.trace_id, span.span_id, span.parent_span_id) == ("a" * 32, "b" * 16, "c" * 16)
    assert span.name == "baton decode"
    assert span.attributes["gen_ai.request.model"] == "m"
    assert span.attributes["gen_ai.usage.input_tokens"] == 7
    assert span.attributes["gen_ai.usage.output_tokens"] == 5
    assert span.attributes["baton.cached_tokens"] == 3
    assert [event.name for event in span.events] == ["received", "admitted", "submitted", "finished"]
    assert span.error is None
    assert span.start_unix_ns <= span.events[1].at_unix_ns <= span.end_unix_ns


def test_parts_with_a_begin_and_an_end_are_children() -> None:
    record: list[Timeline] = []
    _, recorder = finished(record)
    recorder.mark("kv_claimed", {"room": 1})
    recorder.mark("kv_moved", {"transport": "shm", "bytes": 4096})
    recorder.follow([PromptProgress(perf_counter_ns(), "queued"), PromptProgress(perf_counter_ns(), "first_step")])
    recorder.mark("first_token")
    recorder.finish("completed")
    request, *parts = spans_of(record[0])
    assert {part.name for part in parts} == {"kv transfer", "queue", "prefill", "decode"}
    assert {part.parent_span_id for part in parts} == {request.span_id}
    assert len({part.span_id for part in parts} | {request.span_id}) == 5
    [moved] = [part for part in parts if part.name == "kv transfer"]
    assert moved.attributes == {"baton.transport": "shm", "baton.bytes": 4096}


@pytest.mark.parametrize("state", ["failed", "cancelled", "expired"])
def test_a_failure_is_an_error_that_names_its_state_and_code(state: str) -> None:
    span = spans(state, Failure("engine_failed", "it broke"))[0]
    assert span.error == f"{state} engine_failed: it broke"
    assert (span.attributes["baton.state"], span.attributes["error.type"]) == (state, "engine_failed")


def test_a_refusal_is_no_error_of_the_server() -> None:
    span = spans("refused", Failure("invalid_request", "no"))[0]
    assert (span.error, span.attributes["error.type"]) == (None, "invalid_request")
