"""What the edge records of a request, and the trace that it passes on."""

import asyncio

import msgspec
import pytest

from baton.edge.public_routes import public_routes
from baton.testing import eventually
from baton.timelines.reports import ProcessReport, TimelineReport
from baton.timelines.ring import TimelineRing
from tests.unit.edge.stage import EVENTS_HEAD, Received, answering, chunk, on_uvloop, post, stage, whole

CHAT = "/v1/chat/completions"
BODY = msgspec.json.encode({"model": "echo", "messages": [{"role": "user", "content": "a secret"}]})
TRACE_ID, SPAN_ID = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
TRACEPARENT = f"traceparent: 00-{TRACE_ID}-{SPAN_ID}-01"
PROCESS = ProcessReport(name="f", role="frontend", model=None, engine=None, pid=1, host="h", started_unix_s=0.0)


def recorded(ring: TimelineRing) -> list[TimelineReport]:
    return ring.page(PROCESS).timelines


def phases(report: TimelineReport) -> list[str]:
    return [phase for _, phase, _ in report.events]


@on_uvloop
async def test_the_trace_of_a_client_is_continued_for_the_frontend_and_for_workers() -> None:
    ring = TimelineRing(10, "frontend")
    async with stage(timelines=ring, routes=public_routes({})) as s:
        client = await s.connect()
        client.send(post(CHAT, BODY, TRACEPARENT, "tracestate: a=b", "x-dynamo-meta-traceparent: forged"))
        assert (await client.answer())[0] == 200
    [report] = recorded(ring)
    headers = s.frontend.received[0].headers
    assert headers["traceparent"] == headers["x-dynamo-meta-traceparent"] == f"00-{TRACE_ID}-{report.span_id}-01"
    assert headers["x-dynamo-meta-tracestate"] == "a=b"
    assert (report.trace_id, report.parent_span_id) == (TRACE_ID, SPAN_ID)
    assert phases(report) == ["received", "admitted", "forwarded", "first_token", "finished"]
    assert (report.state, report.model, report.role) == ("completed", "echo", "frontend")
    assert "secret" not in str(report)


@on_uvloop
async def test_a_request_without_a_valid_trace_begins_one() -> None:
    ring = TimelineRing(10, "frontend")
    async with stage(timelines=ring) as s:
        client = await s.connect()
        client.send(post(CHAT, BODY, "traceparent: garbage", "tracestate: a=b"))
        assert (await client.answer())[0] == 200
    [report] = recorded(ring)
    headers = s.frontend.received[0].headers
    assert headers["x-dynamo-meta-traceparent"] == f"00-{report.trace_id}-{report.span_id}-01"
    assert "x-dynamo-meta-tracestate" not in headers
    assert report.parent_span_id is None


@on_uvloop
async def test_without_a_ring_the_trace_is_passed_on_as_it_is() -> None:
    async with stage() as s:
        client = await s.connect()
        client.send(post(CHAT, BODY, TRACEPARENT))
        client.send(post(CHAT, BODY))
        assert [(await client.answer())[0] for _ in range(2)] == [200, 200]
    traced, plain = (received.headers for received in s.frontend.received)
    assert traced["x-dynamo-meta-traceparent"] == f"00-{TRACE_ID}-{SPAN_ID}-01"
    assert "traceparent" not in plain


@on_uvloop
async def test_a_client_that_leaves_is_recorded_as_cancelled() -> None:
    ring = TimelineRing(10, "frontend")

    async def reply(request: Received, writer: asyncio.StreamWriter) -> None:
        writer.write(EVENTS_HEAD + chunk(b"data: {}\n\n"))
        await asyncio.Event().wait()

    async with stage(timelines=ring) as s:
        s.frontend.reply = reply
        client = await s.connect()
        client.send(post(CHAT, BODY))
        await client.reader.readuntil(b"data: {}")
        assert [report.state for report in recorded(ring)] == [None]
        client.writer.transport.abort()
        await eventually(lambda: recorded(ring)[0].state == "cancelled", 10)
    assert ring.last_errors == []


@pytest.mark.parametrize(
    ("status", "state", "is_error"), [(400, "refused", False), (503, "failed", True), (500, "failed", True)]
)
def test_an_error_of_the_frontend_is_recorded(status: int, state: str, is_error: bool) -> None:
    @on_uvloop
    async def run() -> None:
        ring = TimelineRing(10, "frontend")
        async with stage(timelines=ring) as s:
            s.frontend.reply = answering(whole(status, b'{"message": "no", "type": "x", "code": 1}'))
            client = await s.connect()
            client.send(post(CHAT, BODY))
            assert (await client.answer())[0] == status
        [report] = recorded(ring)
        assert report.state == state
        assert report.error is not None
        assert phases(report) == ["received", "admitted", "forwarded", "finished"], "an error is no first token"
        assert bool(ring.last_errors) is is_error

    run()


@on_uvloop
async def test_a_body_that_is_refused_here_is_recorded_too() -> None:
    ring = TimelineRing(10, "frontend")
    async with stage(timelines=ring, routes=public_routes({})) as s:
        client = await s.connect()
        client.send(post(CHAT, b"not json"))
        assert (await client.answer())[0] == 400
        client.send(post("/tokenize", b"{}"))  # computes nothing, so it has no timeline
        await client.answer()
    [report] = recorded(ring)
    assert (report.state, phases(report)) == ("refused", ["received", "finished"])
    assert [each.target for each in s.frontend.received] == ["/tokenize"]
