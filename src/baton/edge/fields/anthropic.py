"""The fields of Anthropic's `/v1/messages`. The frontend translates them to a chat, and drops what it does not know."""

from typing import Annotated

from msgspec import Meta

from baton.edge.fields import types
from baton.edge.fields.anthropic_images import inline_images
from baton.edge.fields.shared import NVEXT, STREAM, TOP_P
from baton.edge.fields.table import Json, Table, honoured, ignored, refused, translated, without

Items = list[dict[str, object]]


def _output_format(body: Json) -> Json:
    """The older place of `output_config.format`."""
    config = body.get("output_config")
    format_only = {"format": body["output_format"]} if body["output_format"] is not None else {}
    merged = {**(config if isinstance(config, dict) else {}), **format_only}
    return {**without(body, "output_format"), **({"output_config": merged} if merged else {})}


MESSAGES = Table(
    "MessagesRequest",
    (
        honoured("model", str, required=True),
        honoured(
            "messages",
            Annotated[Items, Meta(min_length=1)],
            "Text, tools, and images as base64 or in a data URL; addresses of images are refused.",
            required=True,
            check=inline_images,
        ),
        honoured("max_tokens", types.Positive, required=True),
        honoured("system", str | Items),
        honoured("stop_sequences", list[str]),
        STREAM,
        honoured("temperature", types.Temperature),
        TOP_P,
        honoured("top_k", int),
        honoured("tools", Items, "Tools of the client only."),
        honoured("tool_choice", dict[str, object]),
        honoured(
            "thinking",
            dict[str, object],
            "Passed to the chat template. On if it is left out; `budget_tokens` is not enforced.",
        ),
        honoured("output_config", dict[str, object], "`format`: guided decoding. `effort` is not used."),
        translated("output_format", dict[str, object], _output_format, "The older place of `output_config.format`."),
        honoured("metadata", dict[str, object], "Changes no answer."),
        ignored("context_management", dict[str, object], "Nothing is removed from the context."),
        refused("service_tier", "there is one tier", str, ("auto", "standard_only")),
        refused("mcp_servers", "the server calls no tools", neutral=([],)),
        refused("container", "there are no containers"),
        refused("inference_geo", "there is one place"),
        NVEXT,
    ),
)
