"""Trace context: valid headers are continued, all others begin a new trace."""

import re

import pytest

from baton.timelines.trace_context import TraceContext, continue_trace, parse_traceparent

TRACE_ID = "0af7651916cd43dd8448eb211c80319c"
SPAN_ID = "b7ad6b7169203331"


def continued(header: str, samples: bool = True) -> TraceContext:
    return continue_trace(header, lambda trace_id: samples)


def test_the_trace_of_the_caller_is_continued_with_a_span_of_its_own() -> None:
    trace = continued(f"00-{TRACE_ID}-{SPAN_ID}-01")
    assert (trace.trace_id, trace.parent_span_id, trace.is_sampled) == (TRACE_ID, SPAN_ID, True)
    assert re.fullmatch("[0-9a-f]{16}", trace.span_id)
    assert trace.span_id != SPAN_ID
    assert trace.traceparent == f"00-{TRACE_ID}-{trace.span_id}-01"


def test_a_trace_that_is_not_sampled_stays_so() -> None:
    trace = continued(f"00-{TRACE_ID}-{SPAN_ID}-00")
    assert not trace.is_sampled
    assert trace.traceparent.endswith("-00")


@pytest.mark.parametrize(
    "header",
    [
        "",
        "garbage",
        f"00-{TRACE_ID}-{SPAN_ID}",
        f"00-{TRACE_ID}-{SPAN_ID}-01-more",
        f"00-{TRACE_ID.upper()}-{SPAN_ID}-01",
        f"00-{'0' * 32}-{SPAN_ID}-01",
        f"00-{TRACE_ID}-{'0' * 16}-01",
        f"ff-{TRACE_ID}-{SPAN_ID}-01",
        f"00-{TRACE_ID}-{SPAN_ID}-01\n",
    ],
)
def test_a_header_that_is_not_valid_begins_a_new_trace(header: str) -> None:
    assert parse_traceparent(header) is None
    one, other = continued(header), continued(header)
    assert one.trace_id != other.trace_id
    assert one.parent_span_id is None
    assert one.is_sampled
    assert parse_traceparent(one.traceparent) is not None
    assert not continued(header, samples=False).is_sampled


def test_a_later_version_may_have_more_fields() -> None:
    parent = parse_traceparent(f"01-{TRACE_ID}-{SPAN_ID}-01-more")
    assert parent is not None
    assert parent.trace_id == TRACE_ID


def test_a_span_continues_a_later_version_as_version_00() -> None:
    trace = continued(f"cc-{TRACE_ID}-{SPAN_ID}-00-more")
    assert trace.traceparent == f"00-{TRACE_ID}-{trace.span_id}-00"
    assert (trace.parent_span_id, trace.is_sampled) == (SPAN_ID, False)
