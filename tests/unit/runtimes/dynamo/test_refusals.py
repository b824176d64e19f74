"""Requests that a frontend sends although the worker must not serve them are recognized, and no others."""

from typing import Any

import pytest

from baton.errors import Unsupported
from baton.runtimes.dynamo.routing import refuse_missing_taints
from baton.runtimes.dynamo.tool_calls import refuse_tools

TOOLS = {"type": "structural_tag", "format": {"type": "triggered_tags", "triggers": ["<tool_call>"]}}
OTHER = {"type": "structural_tag", "format": {"type": "triggered_tags", "triggers": ["<answer>"]}}


def guided(tag: Any) -> dict[str, Any]:
    return {"token_ids": [1], "sampling_options": {"guided_decoding": {"structural_tag": tag}}}


def requiring(taints: Any) -> dict[str, Any]:
    return {"token_ids": [1], "routing": {"routing_constraints": {"required_taints": taints}}}


def test_a_request_with_tools_is_refused() -> None:
    with pytest.raises(Unsupported, match="--tool-call-parser"):
        refuse_tools(guided(TOOLS))


@pytest.mark.parametrize("request_", [{}, None, guided(None), guided("{}"), guided(OTHER), {"sampling_options": None}])
def test_a_request_without_tools_passes(request_: Any) -> None:
    refuse_tools(request_)


def test_a_missing_taint_is_named() -> None:
    with pytest.raises(Unsupported, match=r"no taint b, c;"):
        refuse_missing_taints(requiring(["c", "a", "b"]), taints=frozenset({"a"}))


@pytest.mark.parametrize("request_", [{}, None, requiring(None), requiring([]), requiring(["a"]), {"routing": None}])
def test_a_request_that_requires_nothing_else_passes(request_: Any) -> None:
    refuse_missing_taints(request_, taints=frozenset({"a"}))
