"""Tool calls of models that have no parser: the frontend does not say that a request has tools; this makes it visible.

The runtime sends the constraint that keeps a model to the format of its tool calls along with every request that has
tools, if the model is registered with that policy. A model without a parser is registered with the policy and any
parser, so that the worker recognizes the constraint and refuses the request.
"""

from collections.abc import Mapping

from dynamo import _core

from baton.errors import Unsupported

_ANY_PARSER = "hermes"
_SCOPE = "always"  # Baton registers models that have a parser without this policy
_TRIGGERS = ["<tool_call>"]  # of that parser's format


def mark_requests_with_tools(config: _core.ModelRuntimeConfig) -> None:
    """Make the frontend send requests with tools such that `refuse_tools` recognizes them."""
    config.tool_call_parser = _ANY_PARSER
    config.set_structural_tag({"scope": _SCOPE})


def parser_of_card(parser: str | None, structural_tag_scope: str | None) -> str | None:
    """Return the parser of a registered model; None if it has none and is registered to refuse tools."""
    return None if structural_tag_scope == _SCOPE else parser


def refuse_tools(request: object) -> None:
    """Raise Unsupported for a request whose model may call tools."""
    tag: object = request
    for key in ("sampling_options", "guided_decoding", "structural_tag", "format"):
        tag = tag.get(key) if isinstance(tag, Mapping) else None
    if isinstance(tag, Mapping) and tag.get("triggers") == _TRIGGERS:
        raise Unsupported(
            "tools: the format of this model's tool calls is not known; start its workers with --tool-call-parser"
        )
