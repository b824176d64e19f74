"""One trace over all hops, in every layout: in the timelines of the processes, and as spans at an OTLP collector."""

import itertools
import json
import secrets
import socket
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.collector import Collector, running_collector
from tests.e2e.harness import Serve, System, eventually
from tests.e2e.pooled import Pooled
from tests.e2e.test_media_layouts import content, picture

pytest.importorskip("opentelemetry.sdk")
pytest.importorskip("opentelemetry.exporter.otlp.proto.http")
pytestmark = [pytest.mark.e2e, pytest.mark.timeout(240)]

CHAT = "/v1/chat/completions"
CLIENT_SPAN = "b7ad6b7169203331"
ECHO = ("--echo-faults",)
MEDIA = (*ECHO, "--echo-media")
POOLS: dict[str, Any] = {
    "settings": {"engine": "echo", "name": "echo", "echo": {"faults": True}},
    "retry": {"faster": True, "others": True},
}


def pool_of(role: str) -> dict[str, Any]:
    return {role: {"pools": [{"name": "only", "workers": {"count": 1}}]}}


@pytest.fixture(scope="module")
def collector() -> Iterator[Collector]:
    with running_collector() as collector:
        yield collector


class Traced:
    """A running system whose processes export to `collector`, with the roles that a request passes."""

    def __init__(self, system: System, collector: Collector, roles: tuple[str, ...], sends_image: bool) -> None:
        self.system = system
        self.collector = collector
        self.roles = sorted(("frontend", *roles))
        self._sends_image = sends_image
        self._widths = itertools.count(32)

    def ask(self, prompt: str, traceparent: str | None = None, **fields: object) -> tuple[int, str]:
        """Send a request, as a stream."""
        # Of another width each time: an image that a worker has is neither encoded nor claimed again.
        image = picture(next(self._widths), 32)
        parts: Any = content(prompt, image) if self._sends_image else prompt
        body = {"model": "echo", "messages": [{"role": "user", "content": parts}], "max_tokens": 8, "stream": True}
        return self.system.post(CHAT, {**body, **fields}, {"traceparent": traceparent} if traceparent else {})

    def passes_every_hop(self) -> bool:
        """Whether a request is served by every role."""
        trace_id = secrets.token_hex(16)
        self.ask("warm up", f"00-{trace_id}-{CLIENT_SPAN}-01")
        try:
            self.finished(trace_id, within_s=2.0)
        except AssertionError:
            return False
        return True

    def timelines(self, trace_id: str) -> list[dict[str, Any]]:
        """Return the finished timelines of a trace, from every process."""
        found = [json.loads(self.system.get("/control/timelines")[1])]
        found += [json.loads(self.system.system("/control/timelines", n)[1]) for n in range(self.system.workers)]
        return [each for page in found for each in page["timelines"] if each["trace_id"] == trace_id and each["state"]]

    def finished(self, trace_id: str, within_s: float = 15.0) -> list[dict[str, Any]]:
        """Return the timelines of a trace when every hop has finished."""
        return eventually(
            lambda: (seen := self.timelines(trace_id)) and sorted(each["role"] for each in seen) == self.roles and seen,
            within_s,
            f"the timelines of {self.roles}",
        )


def serve(*flags: str, **layout: Any) -> Callable[[Callable[..., System], Collector, Path], System]:
    def start(starter: Callable[..., System], collector: Collector, directory: Path) -> System:
        return starter(Serve, *flags, settings=collector.settings, **layout)

    return start


def pooled(workers: int, **topology: Any) -> Callable[[Callable[..., System], Collector, Path], System]:
    def start(starter: Callable[..., System], collector: Collector, directory: Path) -> System:
        return starter(Pooled, {**POOLS, **topology}, workers=workers, settings=collector.settings)

    return start


slow = pytest.mark.slow
LAYOUTS = {
    "aggregated": (serve(*ECHO), ("aggregated",), False),
    "prefill and decode, early": (serve(*ECHO, prefill=1, decode=1), ("prefill", "decode"), False),
    "prefill and decode, late": (
        serve(*ECHO, "--kv-handoff", "late", prefill=1, decode=1),
        ("prefill", "decode"),
        False,
    ),
    "encode and aggregated": (serve(*MEDIA, "--encode", "1", encoders=1), ("encode", "aggregated"), True),
    "encode, prefill and decode": (
        serve(*MEDIA, "--encode", "1", prefill=1, decode=1, encoders=1),
        ("encode", "prefill", "decode"),
        True,
    ),
    "process workers": (
        serve(*ECHO, "--process", "1", prefill=1, decode=1, processors=1),
        ("process", "prefill", "decode"),
        False,
    ),
    "global router": (
        pooled(2, mode="disaggregated", **pool_of("prefill"), **pool_of("decode")),
        ("router", "router", "prefill", "decode"),
        False,
    ),
    "global router, aggregated": (
        pooled(1, mode="aggregated", **pool_of("aggregated")),
        ("router", "aggregated"),
        False,
    ),
}
IN_EVERY_RUN = ("encode, prefill and decode", "global router")


@pytest.fixture(
    scope="module", params=[pytest.param(name, marks=() if name in IN_EVERY_RUN else slow) for name in LAYOUTS]
)
def traced(
    request: pytest.FixtureRequest,
    collector: Collector,
    start_shared: Callable[..., System],
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[Traced]:
    start, roles, sends_image = LAYOUTS[request.param]
    system = start(start_shared, collector, tmp_path_factory.mktemp("layout"))
    traced = Traced(system, collector, roles, sends_image)
    # The frontend learns of an encode worker, and a router of its pools, a moment after they are registered.
    eventually(lambda: traced.passes_every_hop(), 30.0, "a request that passes every hop")
    yield traced
    assert isinstance(system, Serve)
    system.stop()


def assert_one_tree(traced: Traced, trace_id: str, root_parent: str) -> None:
    """Check that the collector has one span for each hop of a trace, all below the frontend's, and no orphan."""
    hops = traced.collector.hops(trace_id, len(traced.roles))
    assert sorted(span.attributes["baton.role"] for span in hops) == traced.roles
    [root] = [span for span in hops if span.parent_span_id == root_parent]
    assert root.attributes["baton.role"] == "frontend"
    eventually(lambda: not traced.collector.orphans(trace_id, CLIENT_SPAN if root_parent else ""), what="no orphan")
    timelines = {each["span_id"]: each for each in traced.timelines(trace_id)}
    assert {span.span_id for span in hops} == set(timelines)


def test_a_trace_of_the_client_reaches_every_hop(traced: Traced) -> None:
    trace_id = secrets.token_hex(16)
    status, text = traced.ask("follow me", f"00-{trace_id}-{CLIENT_SPAN}-01")
    assert status == 200, text
    hops = traced.finished(trace_id)
    assert {hop["state"] for hop in hops} == {"completed"}
    spans = {hop["span_id"] for hop in hops}
    [root] = [hop for hop in hops if hop["parent_span_id"] == CLIENT_SPAN]
    assert root["role"] == "frontend"
    assert all(hop["parent_span_id"] in spans for hop in hops if hop is not root)
    assert len({hop["client_id"] for hop in hops}) == 1
    assert_one_tree(traced, trace_id, CLIENT_SPAN)


# The phases that a request has in each role; "kv_moved" only where the KV was not in the prefix cache.
PHASES = {
    "frontend": {"admitted", "forwarded", "first_token"},
    "router": {"admitted", "submitted", "pool_selected", "first_token"},
    "process": {"admitted", "submitted", "first_token"},
    "encode": {"admitted", "media_fetched", "submitted", "encoded", "kv_offered"},
    "aggregated": {"admitted", "submitted", "queued", "first_step", "prefill_chunk", "first_token"},
    "prefill": {"admitted", "submitted", "queued", "first_step", "prefill_chunk", "kv_offered"},
    "decode": {"admitted", "submitted", "queued", "first_step", "kv_claimed", "kv_moved", "first_token"},
}


def test_every_hop_records_its_phases(traced: Traced) -> None:
    trace_id = secrets.token_hex(16)
    traced.ask(secrets.token_hex(40), f"00-{trace_id}-{CLIENT_SPAN}-01")  # a prompt that no prefix cache has
    for hop in traced.finished(trace_id):
        phases = [phase for _, phase, _ in hop["events"]]
        assert PHASES[hop["role"]] <= set(phases), hop
        assert (phases[0], phases[-1]) == ("received", "finished")
        details = {phase: detail for _, phase, detail in hop["events"] if detail.get("kind") != "media"}
        if hop["role"] == "decode":
            assert details["kv_moved"]["transport"] in ("shm", "nixl", "tcp")
            assert details["kv_moved"]["bytes"] > 0
        if hop["role"] in ("aggregated", "prefill"):
            assert details["prefill_chunk"]["tokens"] > 0
    if "encode" in traced.roles:
        hops = {hop["role"]: hop for hop in traced.finished(trace_id)}
        taker = hops.get("prefill") or hops["aggregated"]
        assert [d for _, phase, d in taker["events"] if phase == "kv_claimed" and d["kind"] == "media"]


def test_the_frontend_begins_a_trace_where_the_client_has_none(traced: Traced) -> None:
    marker = secrets.token_hex(8)
    body = {"model": "echo", "messages": [{"role": "user", "content": "no trace"}], "max_tokens": 4}
    assert traced.system.post(CHAT, body, {"x-request-id": marker})[0] == 200
    page = eventually(
        lambda: [
            each
            for each in json.loads(traced.system.get("/control/timelines")[1])["timelines"]
            if each["client_id"] == marker and each["state"]
        ],
        what="the frontend's timeline",
    )
    [root] = page
    assert root["parent_span_id"] is None
    [span] = eventually(
        lambda: [span for span in traced.collector.spans(root["trace_id"]) if span.span_id == root["span_id"]],
        30.0,
        "the frontend's span",
    )
    assert span.parent_span_id == ""
    eventually(lambda: not traced.collector.orphans(root["trace_id"], ""), what="no orphan")


def test_a_trace_that_is_not_sampled_is_recorded_and_not_exported(traced: Traced) -> None:
    hidden, shown = secrets.token_hex(16), secrets.token_hex(16)
    assert traced.ask("hide me", f"00-{hidden}-{CLIENT_SPAN}-00")[0] == 200
    traced.finished(hidden)
    assert traced.ask("show me", f"00-{shown}-{CLIENT_SPAN}-01")[0] == 200
    traced.collector.hops(shown, len(traced.roles))
    assert traced.collector.spans(hidden) == []


def test_a_request_that_fails_says_so_in_its_spans(traced: Traced) -> None:
    trace_id = secrets.token_hex(16)
    traced.ask("please [[fail]]", f"00-{trace_id}-{CLIENT_SPAN}-01")

    def has_failed(part: str) -> bool:
        return any(
            span.is_error and span.attributes.get("baton.state") == "failed" and part in f"{span.name} {span.message}"
            for span in traced.collector.spans(trace_id)
        )

    eventually(lambda: has_failed("engine_failed"), 30.0, "a span with the error of the engine")
    eventually(lambda: has_failed("baton frontend"), 30.0, "the frontend's span with an error")
    eventually(lambda: not traced.collector.orphans(trace_id, CLIENT_SPAN), what="no orphan")


def test_a_request_that_is_cancelled_says_so_in_its_spans(traced: Traced) -> None:
    trace_id = secrets.token_hex(16)
    data = json.dumps(
        {"model": "echo", "messages": [{"role": "user", "content": "x"}], "max_tokens": 100_000, "stream": True}
    ).encode()
    connection = _post(traced.system, data, f"00-{trace_id}-{CLIENT_SPAN}-01")
    connection.recv(1)
    connection.close()
    cancelled = eventually(
        lambda: [
            span
            for span in traced.collector.spans(trace_id)
            if span.is_error and span.attributes.get("baton.state") == "cancelled"
        ],
        30.0,
        "cancelled spans",
    )
    assert all(span.message.startswith("cancelled") for span in cancelled)
    eventually(lambda: not traced.collector.orphans(trace_id, CLIENT_SPAN), 30.0, "no orphan")


def _post(system: System, data: bytes, traceparent: str) -> socket.socket:
    connection = socket.create_connection(("127.0.0.1", system.port), timeout=60)
    head = f"POST {CHAT} HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(data)}\r\ntraceparent: {traceparent}\r\n"
    connection.sendall(f"{head}Content-Type: application/json\r\n\r\n".encode() + data)
    return connection
