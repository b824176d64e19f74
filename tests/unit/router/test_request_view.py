"""The view of a request: its point on the axes, its priority, and refused values."""

import pytest

from baton.errors import InvalidRequest
from baton.ports.runtime import Wire
from baton.router.request_view import view_request


def test_d33_context_includes_expected_output_tokens() -> None:
    assert view_request({"token_ids": [1, 2], "stop_conditions": {"max_tokens": 10}}).point.context == 12
    expected = {"token_ids": [1, 2], "stop_conditions": {"max_tokens": 10}, "routing": {"expected_output_tokens": 4}}
    assert view_request(expected).point.context == 6
    assert view_request({"token_ids": [1, 2]}).point.context == 2


def test_targets_come_from_the_request_or_the_plan_and_zero_is_a_target() -> None:
    assert view_request({"router": {"ttft_target": 0}}, 5, 6).point.ttft_ms == 0
    assert view_request({"router": {"ttft_target": None}}, 5, 6).point.ttft_ms == 5
    assert view_request({"extra_args": {"itl_target": 7}}, 5, 6).point.itl_ms == 7
    assert view_request({}).point.itl_ms is None


@pytest.mark.parametrize(
    ("request_", "problem"),
    [
        ({"router": 3}, "router: expected an object, got int"),
        ({"router": {"ttft_target": "fast"}}, "router.ttft_target: expected milliseconds, 0 or more, got 'fast'"),
        ({"router": {"itl_target": -1}}, "router.itl_target: expected milliseconds"),
        ({"router": {"itl_target": float("nan")}}, "router.itl_target: expected milliseconds"),
        ({"routing": {"priority": 1.5}}, "routing.priority: expected an integer, got 1.5"),
        ({"stop_conditions": {"max_tokens": True}}, "stop_conditions.max_tokens: expected an integer, got True"),
    ],
)
def test_invalid_routing_field_is_refused_by_name(request_: Wire, problem: str) -> None:
    with pytest.raises(InvalidRequest, match=problem):
        view_request(request_)
