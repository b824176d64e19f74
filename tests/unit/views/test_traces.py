"""Timelines of one trace belong together, whichever process reports them first."""

import msgspec

from baton.views.traces import TraceStore
from tests.unit.views.hops import hop


def test_hops_of_one_trace_are_joined_with_the_frontend_first() -> None:
    store = TraceStore()
    store.put(hop("decode-0", "decode", {"received": 0}, at=200))
    store.put(hop("prefill-0", "prefill", {"received": 0}, at=100))
    trace, before = store.put(hop("frontend", "frontend", {"received": 0}, at=300))
    assert before is None
    assert [each.process for each in trace.hops] == ["frontend", "prefill-0", "decode-0"]
    assert len(store) == 1


def test_a_later_report_of_a_hop_replaces_the_former() -> None:
    store = TraceStore()
    running = hop("decode-0", "decode", {"received": 0}, state=None)
    store.put(running)
    assert store.running("decode-0") == [running]
    trace, before = store.put(hop("decode-0", "decode", {"received": 0, "finished": 9}))
    assert before == running
    assert [each.state for each in trace.hops] == ["completed"]
    assert store.running("decode-0") == []


def test_the_oldest_traces_are_forgotten() -> None:
    store = TraceStore(max_traces=2)
    for name in "abc":
        store.put(hop("worker-0", "aggregated", {}, trace=name, state=None))
    assert [trace.id for trace in store] == ["b", "c"]
    assert [each.report.trace_id for each in store.running("worker-0")] == ["b", "c"]


def test_requests_of_a_process_that_is_gone_are_lost() -> None:
    store = TraceStore()
    stays = hop("worker-0", "aggregated", {}, trace="stays", state=None)
    store.put(stays)
    store.put(hop("worker-0", "aggregated", {}, trace="lost", state=None))
    store.put(hop("worker-1", "aggregated", {}, trace="other", state=None))
    [trace] = store.lose("worker-0", {stays.key})
    assert (trace.id, trace.root.state, trace.root.is_running) == ("lost", "lost", False)
    assert store.running("worker-0") == [stays]
    assert len(store.running("worker-1")) == 1


def test_a_request_without_a_trace_is_found_by_its_own_id() -> None:
    store = TraceStore()
    each = hop("worker-0", "aggregated", {})
    bare = msgspec.structs.replace(each, report=msgspec.structs.replace(each.report, trace_id=None))
    trace, _ = store.put(bare)
    assert store.get(bare.report.request_id) is trace


def test_requests_of_a_client_in_one_trace_are_told_apart() -> None:
    store = TraceStore()
    for process, role in (("frontend", "frontend"), ("worker-0", "aggregated")):
        for client in ("first", "second"):
            each = hop(process, role, {"received": 0}, client_id=client)
            report = msgspec.structs.replace(each.report, request_id=f"{process} {client}")
            store.put(msgspec.structs.replace(each, report=report))
    found = [[each.report.client_id for each in trace.hops] for trace in store]
    assert found == [["first", "first"], ["second", "second"]]
    first, second = store
    assert first.id == "t"
    assert second.id.startswith("t.")


def test_a_hop_without_an_id_of_its_client_belongs_to_the_trace() -> None:
    store = TraceStore()
    store.put(hop("frontend", "frontend", {}, client_id="c"))
    store.put(hop("worker-0", "aggregated", {}))
    assert len(store) == 1
