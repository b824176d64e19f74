"""The fields of `/v1/chat/completions`."""

from typing import Annotated

from msgspec import Meta

from baton.edge.errors import FieldError
from baton.edge.fields import types
from baton.edge.fields.media_urls import with_marked_urls
from baton.edge.fields.messages import Message
from baton.edge.fields.shared import EXTENSIONS, SAMPLING
from baton.edge.fields.table import Json, Table, honoured, ignored, refused, translated, unsupported, without
from baton.edge.fields.tools import ResponseFormat, Tool, ToolChoice

_UNREADABLE = {
    "input_audio": "no engine takes audio",
    "file": "files are not read; put their text into a text part",
}


def _messages(body: Json) -> Json:
    """Refuse the parts that the frontend drops, and keep it from fetching media."""
    messages = body["messages"]
    assert isinstance(messages, list)
    for number, message in enumerate(messages):
        content = message.get("content")
        if isinstance(content, list):
            _check_parts(content, f"messages[{number}].content")
        if message.get("audio") is not None:
            raise unsupported(f"messages[{number}].audio", "there are no earlier audio answers")
    return with_marked_urls(body, "messages")


def _check_parts(parts: list[Json], path: str) -> None:
    for number, part in enumerate(parts):
        if (kind := str(part.get("type"))) in _UNREADABLE:
            raise unsupported(f"{path}[{number}].type", f"{kind}: {_UNREADABLE[kind]}")


def _max_completion_tokens(body: Json) -> Json:
    if body["max_completion_tokens"] is None or body.get("max_tokens") is None:
        return body
    message = "Setting 'max_tokens' and 'max_completion_tokens' at the same time is not supported."
    raise FieldError("max_tokens", message, code="invalid_parameter_combination")


def _top_logprobs(body: Json) -> Json:
    if not body["top_logprobs"] or body.get("logprobs"):
        return body
    message = "Invalid value for 'top_logprobs': 'logprobs' must be set to true if 'top_logprobs' is used."
    raise FieldError("top_logprobs", message, code="invalid_value")


def _metadata(body: Json) -> Json:
    if body["metadata"]:
        message = "The 'metadata' parameter is only allowed when 'store' is enabled, and answers are not stored."
        raise FieldError("metadata", message, code="unsupported_parameter")
    return without(body, "metadata")


def _tools(body: Json) -> Json:
    return body if body["tools"] else without(body, "tools")


def _tool_choice(body: Json) -> Json:
    """Give the model the allowed tools only: nothing else can keep it to them."""
    choice = body["tool_choice"]
    if not isinstance(choice, dict) or choice["type"] != "allowed_tools":
        return body
    allowed = choice["allowed_tools"]
    names = {_name(tool) for tool in allowed["tools"]}
    tools = body.get("tools")
    given = tools if isinstance(tools, list) else []
    return {**body, "tools": [tool for tool in given if _name(tool) in names], "tool_choice": allowed["mode"]}


def _name(tool: Json) -> object:
    function = tool.get("function")
    return function.get("name") if isinstance(function, dict) else None


CHAT = Table(
    "ChatRequest",
    (
        honoured("model", str, required=True),
        honoured(
            "messages",
            Annotated[list[Message], Meta(min_length=1)],
            "Parts of type `input_audio` and `file` are refused; media depend on the engine.",
            required=True,
            check=_messages,
        ),
        honoured(
            "max_completion_tokens", types.Positive, "Not together with `max_tokens`.", check=_max_completion_tokens
        ),
        honoured("max_tokens", types.Positive, "The older name of `max_completion_tokens`."),
        *SAMPLING,
        honoured("logprobs", bool),
        honoured("top_logprobs", Annotated[int, Meta(ge=0, le=20)], "Only with `logprobs`.", check=_top_logprobs),
        honoured("response_format", ResponseFormat, "JSON needs an engine with guided decoding."),
        translated("tool_choice", ToolChoice, _tool_choice, "`allowed_tools`: the model gets the allowed tools only."),
        translated("tools", list[Tool], _tools, "Functions; they need a tool-call parser. An empty list is left out."),
        honoured("parallel_tool_calls", bool),
        honoured("reasoning_effort", types.ReasoningEffort, "A variable of the chat template."),
        ignored("safety_identifier", str, "Changes no answer."),
        honoured("prompt_cache_key", str, "Changes no answer. To separate tenants use `cache_salt`."),
        refused("prompt_cache_retention", "prefixes are cached in memory", types.Retention, ("in_memory",)),
        refused("prompt_cache_options", "prefixes are cached without options"),
        refused("verbosity", "the models have none; say it in a message", types.Verbosity, ("medium",)),
        refused("service_tier", "there is one tier", str, ("auto", "default")),
        refused("store", "answers are not stored", bool, (False,)),
        translated("metadata", types.Metadata, _metadata, "Refused unless empty: it belongs to stored answers."),
        refused("modalities", "answers are text", list[str], (["text"],)),
        refused("audio", "answers are text"),
        refused("moderation", "there is no moderation"),
        refused("prediction", "predicted outputs are not used"),
        refused("web_search_options", "there is no web search"),
        refused("functions", "deprecated; use `tools`", neutral=([],)),
        refused("function_call", "deprecated; use `tool_choice`", neutral=("none", "auto")),
        *EXTENSIONS,
        honoured("chat_template_kwargs", dict[str, object], "Variables of the chat template."),
        honoured("chat_template_args", dict[str, object], "The runtime's name of `chat_template_kwargs`."),
        honoured("add_generation_prompt", bool),
        honoured("continue_final_message", bool, "Only with `add_generation_prompt` false."),
        honoured("thinking", object, "`{type: enabled}` or `{type: disabled}`: a variable of the chat template."),
        honoured("thinking_token_budget", types.Count, "Depends on the engine."),
        refused("mm_processor_kwargs", "the media processor takes no options with a request"),
        refused("media_io_kwargs", "the media loader takes no options with a request"),
    ),
)
