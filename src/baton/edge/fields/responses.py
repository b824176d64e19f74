"""The fields of `/v1/responses`. The frontend translates them to a chat, and drops what a chat cannot express."""

from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from baton.edge.fields import types
from baton.edge.fields.media_urls import with_marked_urls
from baton.edge.fields.shared import DIFFUSION, NVEXT, STREAM, TOP_P, stream_options
from baton.edge.fields.table import Json, Table, honoured, ignored, refused, translated, unsupported, without

# Items without a type are messages. Reasoning of earlier turns is accepted, and left out of the prompt.
_ITEMS = ("message", "function_call", "function_call_output", "reasoning")
# Clients ask for it with every request; the answers have no reasoning that could be sent back.
_INCLUDABLE = ("reasoning.encrypted_content",)

_NOT_OF_REASONING = {
    "summary": "reasoning is not returned; chat completions return it",
    "generate_summary": "reasoning is not returned; chat completions return it",
    "context": "reasoning of earlier turns is not used",
    "mode": "the models have no modes",
}


class Reasoning(msgspec.Struct, forbid_unknown_fields=True):
    """How much a model reasons."""

    effort: types.ReasoningEffort | None = None
    summary: Literal["auto", "concise", "detailed"] | None = None
    generate_summary: Literal["auto", "concise", "detailed"] | None = None
    context: str | None = None
    mode: str | None = None


class TextConfig(msgspec.Struct, forbid_unknown_fields=True):
    """The format of the answer."""

    format: dict[str, object] | None = None
    verbosity: types.Verbosity | None = None


class ResponseStreamOptions(msgspec.Struct, forbid_unknown_fields=True):
    """What a stream contains besides the answer."""

    include_obfuscation: bool | None = None


def _input(body: Json) -> Json:
    """Refuse the items that the frontend skips, and keep it from fetching media."""
    items = body["input"]
    for number, item in enumerate(items if isinstance(items, list) else []):
        kind = item.get("type") or "message"
        if kind not in _ITEMS:
            raise unsupported(f"input[{number}].type", f"{kind}: items can be {', '.join(_ITEMS)}")
    return with_marked_urls(body, "input")


def _tools(body: Json) -> Json:
    tools = body["tools"]
    for number, tool in enumerate(tools if isinstance(tools, list) else []):
        if tool.get("type") != "function":
            raise unsupported(f"tools[{number}].type", f"{tool.get('type')}: tools are functions of the client")
    return body


def _include(body: Json) -> Json:
    include = body["include"]
    for number, name in enumerate(include if isinstance(include, list) else []):
        if name not in _INCLUDABLE:
            raise unsupported(f"include[{number}]", f"{name} is not returned")
    return without(body, "include")


def _reasoning(body: Json) -> Json:
    reasoning = body["reasoning"]
    for name, reason in _NOT_OF_REASONING.items():
        if isinstance(reasoning, dict) and reasoning.get(name) not in (None, "auto", "standard"):
            raise unsupported(f"reasoning.{name}", reason)
    return body


def _text(body: Json) -> Json:
    text = body["text"]
    if isinstance(text, dict) and text.get("verbosity") not in (None, "medium"):
        raise unsupported("text.verbosity", "the models have none; say it in a message")
    return body


RESPONSES = Table(
    "ResponseRequest",
    (
        honoured("model", str, required=True),
        honoured(
            "input",
            str | Annotated[list[dict[str, object]], Meta(min_length=1)],
            "Messages, function calls and their outputs. Reasoning of earlier turns is accepted and not used. Other"
            " items are refused.",
            required=True,
            check=_input,
        ),
        honoured("instructions", str),
        honoured("max_output_tokens", types.Positive),
        honoured("temperature", types.Temperature),
        TOP_P,
        honoured("tools", list[dict[str, object]], "Functions only.", check=_tools),
        honoured("tool_choice", str | dict[str, object]),
        honoured("parallel_tool_calls", bool),
        honoured(
            "reasoning",
            Reasoning,
            "`effort`: a variable of the chat template. Other keys: only auto.",
            check=_reasoning,
        ),
        honoured("text", TextConfig, "`verbosity`: only medium.", check=_text),
        STREAM,
        translated("stream_options", ResponseStreamOptions, stream_options, "`include_obfuscation`: only false."),
        honoured("metadata", types.Metadata, "Returned with the answer."),
        honoured("user", str, "Changes no answer."),
        honoured("safety_identifier", str, "Changes no answer."),
        honoured("prompt_cache_key", str, "Changes no answer. To separate tenants use `nvext.cache_salt`."),
        refused("prompt_cache_retention", "prefixes are cached in memory", types.Retention, ("in_memory",)),
        refused("prompt_cache_options", "prefixes are cached without options"),
        translated("include", list[str], _include, "Only `reasoning.encrypted_content`, of which there is none."),
        refused("top_logprobs", "log-probabilities are returned by chat completions", int, (0,)),
        refused("store", "answers are not stored", bool, (False,)),
        refused("previous_response_id", "answers are not stored; send the earlier items"),
        refused("conversation", "conversations are not stored; send the earlier items"),
        refused("prompt", "prompts are not stored; send the messages"),
        refused("background", "answers are not stored", bool, (False,)),
        refused("context_management", "nothing is compacted", neutral=([],)),
        refused("truncation", "nothing is truncated", str, ("disabled",)),
        refused("max_tool_calls", "the model calls no tools itself"),
        refused("service_tier", "there is one tier", str, ("auto", "default")),
        refused("moderation", "there is no moderation"),
        refused("image", "images are not compressed"),
        refused("access_programs", "there are none"),
        DIFFUSION,
        NVEXT,
        honoured("chat_template_kwargs", dict[str, object], "Variables of the chat template."),
        ignored("client_metadata", dict[str, object], "Sent by some clients; changes no answer."),
    ),
)
