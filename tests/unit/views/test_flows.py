"""What flows between two processes: a request once, and KV when it has moved."""

from baton.views.flows import Flows
from baton.views.traces import Hop, TraceStore
from tests.unit.views.hops import START_US, hop

NOW_US = START_US + 2000


class Watched:
    """Puts hops into a store and reports their flows."""

    def __init__(self) -> None:
        self.store, self.flows = TraceStore(), Flows()

    def put(self, each: Hop) -> list[list[object]]:
        trace, before = self.store.put(each)
        self.flows.add(trace, each, before, NOW_US)
        return self.flows.take()


def test_a_request_flows_from_the_hop_of_its_parent_span() -> None:
    watched = Watched()
    watched.put(hop("frontend", "frontend", {}, span_id="a"))
    watched.put(hop("router", "router", {}, span_id="b", parent_span_id="a"))
    flows = watched.put(hop("decode-0", "decode", {}, parent_span_id="a"))
    assert flows == [["frontend", "decode-0", "request", 1, 0]]


def test_without_spans_the_role_says_who_sent_a_request() -> None:
    watched = Watched()
    watched.put(hop("frontend", "frontend", {}))
    watched.put(hop("router", "router", {}))
    assert watched.put(hop("prefill-0", "prefill", {})) == [["router", "prefill-0", "request", 1, 0]]


def test_kv_flows_once_from_the_prefill_worker() -> None:
    watched = Watched()
    watched.put(hop("prefill-1", "prefill", {}))
    watched.put(hop("decode-0", "decode", {"kv_claimed": 5}, state=None))
    moved = {"kv_moved": {"transport": "tcp", "bytes": 512}}
    running = hop("decode-0", "decode", {"kv_claimed": 5, "kv_moved": 9}, state=None, details=moved)
    assert watched.put(running) == [["prefill-1", "decode-0", "tcp", 1, 512]]
    assert watched.put(hop("decode-0", "decode", {"kv_claimed": 5, "kv_moved": 9}, details=moved)) == []


def test_what_was_long_ago_does_not_flow_now() -> None:
    watched = Watched()
    watched.put(hop("frontend", "frontend", {}, at=-60_000_000))
    assert watched.put(hop("worker-0", "aggregated", {}, at=-60_000_000)) == []
