"""The ring: which timelines it keeps, and how a reader gets each finished one once."""

from time import perf_counter_ns

import pytest

from baton.errors import InvalidRequest
from baton.protocol.outputs import PromptProgress
from baton.timelines.pages import page_of
from baton.timelines.reports import ProcessReport, TimelineReport
from baton.timelines.ring import MAX_ERRORS, TimelineRing
from baton.timelines.timeline import MAX_EVENTS, MAX_GAPS, MAX_MESSAGE_CHARS, Failure, FinalCounts, Recorder
from baton.timelines.trace_context import TraceContext

PROCESS = ProcessReport(
    name="worker-0", role="aggregated", model="m", engine="echo", pid=1, host="here", started_unix_s=0.0
)
NO_COUNTS = FinalCounts()
TRACE = TraceContext(f"00-{'a' * 32}-{'b' * 16}-01", f"00-{'a' * 32}-{'c' * 16}-01")


def start(ring: TimelineRing, request_id: str = "r", counts: FinalCounts = NO_COUNTS) -> Recorder:
    return ring.start(request_id, "m", TRACE, "client-1", counts)


def run_requests(ring: TimelineRing, count: int) -> None:
    for number in range(count):
        start(ring, f"r{number}").finish("completed")


def ids(reports: list[TimelineReport]) -> list[str]:
    return [report.request_id for report in reports]


def test_a_finished_request_has_its_ids_phases_and_counts() -> None:
    ring = TimelineRing(10, "aggregated")
    recorder = start(ring, "r1", FinalCounts(7, 3, 5))
    recorder.mark("admitted")
    recorder.mark("kv_moved", {"transport": "shm", "bytes": 4096})
    recorder.finish("completed")
    [report] = ring.page(PROCESS).timelines
    assert (report.request_id, report.client_id, report.role, report.model) == ("r1", "client-1", "aggregated", "m")
    assert (report.trace_id, report.span_id, report.parent_span_id) == ("a" * 32, "b" * 16, "c" * 16)
    assert (report.prompt_tokens, report.cached_tokens, report.completion_tokens) == (7, 3, 5)
    assert [phase for _, phase, _ in report.events] == ["received", "admitted", "kv_moved", "finished"]
    assert report.events[2][2] == {"transport": "shm", "bytes": 4096}
    assert (report.state, report.error, report.sequence) == ("completed", None, 1)
    times = [at for at, _, _ in report.events]
    assert times == sorted(times)
    assert report.duration_us == times[-1]


def test_events_are_reported_in_the_order_of_their_times() -> None:
    ring = TimelineRing(1)
    recorder = start(ring)
    progress: list[PromptProgress] = []
    recorder.follow(progress)
    recorder.mark("first_token")
    progress.append(PromptProgress(perf_counter_ns(), "prefill_chunk", 256))
    progress.append(PromptProgress(0, "queued"))  # an engine reports it later, and it was before
    [running] = ring.page(PROCESS).timelines
    assert [phase for _, phase, _ in running.events] == ["received", "queued", "first_token", "prefill_chunk"]
    recorder.finish("completed")
    [report] = ring.page(PROCESS).timelines
    assert [phase for _, phase, _ in report.events] == [
        "received",
        "queued",
        "first_token",
        "prefill_chunk",
        "finished",
    ]
    assert report.events[3][2] == {"tokens": 256}


def test_a_reader_gets_every_finished_request_once_in_pages() -> None:
    ring = TimelineRing(10)
    run_requests(ring, 5)
    first = ring.page(PROCESS, 0, 2)
    assert ids(first.timelines) == ["r0", "r1"]
    second = ring.page(PROCESS, first.next, 2)
    third = ring.page(PROCESS, second.next, 2)
    assert ids(second.timelines) + ids(third.timelines) == ["r2", "r3", "r4"]
    last = ring.page(PROCESS, third.next)
    assert (last.timelines, last.next, last.dropped) == ([], third.next, 0)


def test_requests_that_run_are_in_every_page() -> None:
    ring = TimelineRing(10)
    running = start(ring, "long", FinalCounts(9))
    run_requests(ring, 1)
    page = ring.page(PROCESS)
    assert ids(page.timelines) == ["r0", "long"]
    assert (page.timelines[1].state, page.timelines[1].sequence, page.timelines[1].prompt_tokens) == (None, 0, 9)
    assert ids(ring.page(PROCESS, page.next).timelines) == ["long"]
    running.finish("cancelled", Failure("cancelled", "the client left"))
    [report] = ring.page(PROCESS, page.next).timelines
    assert (report.request_id, report.state, report.sequence) == ("long", "cancelled", 2)
    assert report.error is not None
    assert report.error.code == "cancelled"


def test_the_oldest_leave_and_are_counted() -> None:
    ring = TimelineRing(3)
    run_requests(ring, 5)
    page = ring.page(PROCESS)
    assert (ids(page.timelines), page.dropped, page.next) == (["r2", "r3", "r4"], 2, 5)
    assert ring.page(PROCESS, 1).dropped == 1
    assert ring.page(PROCESS, 2).dropped == 0


def test_bytes_are_bounded() -> None:
    ring = TimelineRing(1000, max_bytes=10_000)
    for number in range(1000):
        recorder = start(ring, f"r{number}")
        for _ in range(MAX_EVENTS):
            recorder.mark("prefill_chunk")
        recorder.finish("completed")
    assert ids(ring.page(PROCESS).timelines) == []  # each alone is more than allowed
    run_requests(ring, 1000)
    assert 0 < len(ring.page(PROCESS).timelines) < 20


def test_events_of_one_request_are_bounded_and_its_end_is_among_them() -> None:
    ring = TimelineRing(1)
    recorder = start(ring)
    for _ in range(2 * MAX_EVENTS):
        recorder.mark("prefill_chunk")
    recorder.finish("completed")
    [report] = ring.page(PROCESS).timelines
    assert len(report.events) == MAX_EVENTS + 1
    assert report.events[-1][1] == "finished"


@pytest.mark.parametrize(
    ("outputs", "gaps", "per_gap"), [(0, 0, 1), (1, 0, 1), (2, 1, 1), (512, 511, 1), (513, 256, 2), (515, 257, 2)]
)
def test_gaps_are_merged_when_there_are_too_many(outputs: int, gaps: int, per_gap: int) -> None:
    ring = TimelineRing(1)
    recorder = start(ring)
    for _ in range(outputs):
        recorder.output(perf_counter_ns())
    recorder.finish("completed")
    [report] = ring.page(PROCESS).timelines
    assert (len(report.gaps_us), report.outputs_per_gap) == (gaps, per_gap)


def test_a_long_answer_has_a_bounded_strip_of_gaps() -> None:
    ring = TimelineRing(1)
    recorder = start(ring)
    for _ in range(20_000):
        recorder.output(perf_counter_ns())
    recorder.finish("completed")
    [report] = ring.page(PROCESS).timelines
    assert MAX_GAPS // 2 <= len(report.gaps_us) <= MAX_GAPS
    assert report.outputs_per_gap == 64


def test_what_happens_after_the_end_is_not_recorded() -> None:
    ring = TimelineRing(1)
    recorder = start(ring)
    recorder.finish("cancelled")
    recorder.mark("kv_moved", {"transport": "shm"})
    [report] = ring.page(PROCESS).timelines
    assert [phase for _, phase, _ in report.events] == ["received", "finished"]


def test_a_ring_of_no_requests_records_nothing_but_errors() -> None:
    ring = TimelineRing(0)
    recorder = start(ring)
    recorder.mark("admitted")
    recorder.output(perf_counter_ns())
    recorder.finish("completed")
    ring.note_error("r1", Failure("engine_failed", "x" * 1000))
    assert (ring.is_on, ring.page(PROCESS).timelines) == (False, [])
    [error] = ring.last_errors
    assert (error.code, error.request_id, len(error.message)) == ("engine_failed", "r1", MAX_MESSAGE_CHARS)


def test_the_last_errors_are_kept() -> None:
    ring = TimelineRing(1)
    for number in range(2 * MAX_ERRORS):
        ring.note_error(f"r{number}", Failure("engine_failed", ""))
    assert [error.request_id for error in ring.last_errors] == [f"r{n}" for n in range(MAX_ERRORS, 2 * MAX_ERRORS)]


def test_a_reader_of_a_process_that_was_replaced_begins_again() -> None:
    ring = TimelineRing(10)
    run_requests(ring, 2)
    page = ring.page(PROCESS, after=500)
    assert (ids(page.timelines), page.next) == (["r0", "r1"], 2)


@pytest.mark.parametrize(
    "query", [{"after": "-1"}, {"after": "x"}, {"limit": "-1"}, {"limit": "1e3"}, {"limit": "9999"}]
)
def test_a_page_that_makes_no_sense_is_refused(query: dict[str, str]) -> None:
    with pytest.raises(InvalidRequest, match="expected a whole number"):
        page_of(query)


def test_a_query_names_the_page() -> None:
    assert page_of({"after": "7", "limit": "3"}) == (7, 3)
    assert page_of({}) == (0, 1000)
