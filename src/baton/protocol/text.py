"""The text format: an OpenAI body in, OpenAI chunks out, for workers that own the tokenizer."""

from collections.abc import Mapping
from typing import Annotated

import msgspec
from msgspec import Meta

from baton.protocol.codec import DecodeError, Wire, convert, encode_usage
from baton.protocol.extra_options import take_extra_options
from baton.protocol.outputs import FinishReason, Usage
from baton.protocol.requests import (
    Choices,
    Count,
    DiffusionOptions,
    GuidedDecoding,
    OutputOptions,
    Penalty,
    Positive,
    Routing,
    Sampling,
    Share,
    StopConditions,
    Temperature,
    TokenId,
)

# Fields of OpenAI's requests that change no text.
_INFORMATION = frozenset(
    {
        "metadata",
        "parallel_tool_calls",
        "prompt_cache_key",
        "reasoning_effort",
        "safety_identifier",
        "service_tier",
        "store",
        "user",
    }
)
MAX_STOPS = 64
MAX_STOP_CHARS = 1024


class _AgentHints(msgspec.Struct, frozen=True, kw_only=True):
    priority: int | None = None
    strict_priority: Count | None = None
    osl: Count | None = None
    latency_sensitivity: float | None = None


class _Extensions(msgspec.Struct, frozen=True, kw_only=True):
    """The extensions that the frontend translates for workers that take tokens."""

    agent_hints: _AgentHints | None = None
    backend_instance_id: int | None = None
    prefill_worker_id: int | None = None
    decode_worker_id: int | None = None
    dp_rank: Count | None = None
    prefill_dp_rank: Count | None = None
    cache_salt: str | None = None
    max_thinking_tokens: Count | None = None
    router: dict[str, object] | None = None
    routing_constraints: dict[str, object] | None = None


class TextRequest(msgspec.Struct, frozen=True, kw_only=True):
    """A chat or a completion request in OpenAI's format. Exactly one of `messages` and `prompt` is set.

    `chat_template_args` is the frontend's name for `chat_template_kwargs`; it holds `reasoning_effort` too. `unknown`
    are the keys that have no field here.
    """

    model: str
    messages: tuple[dict[str, object], ...] | None = None
    prompt: str | tuple[str | TokenId, ...] | None = None
    max_tokens: Positive | None = None
    max_completion_tokens: Positive | None = None
    min_tokens: Count | None = None
    ignore_eos: bool | None = None
    stop: str | tuple[str, ...] | None = None
    n: Choices | None = None
    temperature: Temperature | None = None
    top_p: Share | None = None
    top_k: Annotated[int, Meta(ge=-1)] | None = None
    min_p: Share | None = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    repetition_penalty: Annotated[float, Meta(gt=0.0)] | None = None
    seed: int | None = None
    logit_bias: dict[str, float] | None = None
    logprobs: bool | int | None = None
    top_logprobs: int | None = None
    response_format: dict[str, object] | None = None
    tools: tuple[dict[str, object], ...] | None = None
    best_of: Choices | None = None
    echo: bool | None = None
    suffix: str | None = None
    prompt_logprobs: int | None = None
    guided_json: object = None
    guided_regex: str | None = None
    guided_choice: tuple[str, ...] | None = None
    guided_grammar: str | None = None
    stream: bool | None = None
    stream_options: dict[str, object] | None = None
    stop_token_ids: tuple[TokenId, ...] | None = None
    include_stop_str_in_output: bool | None = None
    skip_special_tokens: bool | None = None
    tool_choice: object = None
    modalities: tuple[str, ...] | None = None
    cache_salt: str | None = None
    chat_template_args: dict[str, object] | None = None
    chat_template_kwargs: dict[str, object] | None = None
    diffusion: DiffusionOptions | None = None
    nvext: dict[str, object] | None = None
    unknown: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if (self.messages is None) == (self.prompt is None):
            raise ValueError("a request has either `messages` or `prompt`")
        if len(self.stops) > MAX_STOPS or any(len(stop) > MAX_STOP_CHARS for stop in self.stops):
            raise ValueError(f"`stop`: at most {MAX_STOPS} texts of at most {MAX_STOP_CHARS} characters")

    @property
    def stops(self) -> tuple[str, ...]:
        """The stop strings, none of them empty."""
        stops = (self.stop,) if isinstance(self.stop, str) else self.stop or ()
        return tuple(stop for stop in stops if stop)

    @property
    def wants_usage(self) -> bool:
        """Whether the answer ends with its token counts: a stream does only on request."""
        return not self.stream or bool((self.stream_options or {}).get("include_usage"))

    @property
    def template_args(self) -> dict[str, object]:
        """The client's own variables for the chat template."""
        return {**(self.chat_template_args or {}), **(self.chat_template_kwargs or {})}

    @property
    def template_tools(self) -> dict[str, object]:
        """The tools for the chat template; with `tool_choice` none, it gets none."""
        return {"tools": list(self.tools)} if self.tools and self.tool_choice != "none" else {}

    @property
    def extra_args(self) -> dict[str, object]:
        """The extensions of the request, as a request in token format has them."""
        extensions = dict(self.nvext or {})
        if self.cache_salt:
            extensions["cache_salt"] = self.cache_salt
        return {"nvext": extensions}

    @property
    def router_targets(self) -> dict[str, object] | None:
        """The targets of a global router."""
        return self._extensions.router

    @property
    def _extensions(self) -> _Extensions:
        return msgspec.convert(self.nvext or {}, _Extensions)

    def token_format_only(self) -> list[str]:
        """Return the options in use that need the frontend's own tokenizer and parsers, or that nothing applies."""
        in_use = {
            "logprobs": self.logprobs is not None and self.logprobs is not False,
            "top_logprobs": self.top_logprobs is not None,
            "response_format": self.response_format not in (None, {"type": "text"}),
            "tools": bool(self.tools),
            "guided_json": self.guided_json is not None,
            "guided_regex": self.guided_regex is not None,
            "guided_choice": self.guided_choice is not None,
            "guided_grammar": self.guided_grammar is not None,
        }
        used = (name for name, is_used in in_use.items() if is_used)
        return [*used, *_media_types(self.messages or ()), *self.never_applied()]

    def never_applied(self) -> list[str]:
        """Return the options in use that no worker applies to a request in text format."""
        in_use = {
            "prompt_logprobs": self.prompt_logprobs is not None,
            "echo": bool(self.echo),
            "suffix": bool(self.suffix),
            "include_stop_str_in_output": bool(self.include_stop_str_in_output),
            "skip_special_tokens": self.skip_special_tokens is False,
            "tool_choice": self.tool_choice not in (None, "none", "auto"),
            "modalities": self.modalities not in (None, ("text",)),
        }
        return [*(name for name, is_used in in_use.items() if is_used), *self.unknown]

    def stop_conditions(self) -> StopConditions:
        """Return the stop conditions of the engine; stop strings are matched on its text."""
        limit = self.max_completion_tokens if self.max_completion_tokens is not None else self.max_tokens
        return StopConditions(
            max_tokens=limit,
            min_tokens=self.min_tokens,
            ignore_eos=self.ignore_eos,
            stop_token_ids=self.stop_token_ids,
            max_thinking_tokens=self._extensions.max_thinking_tokens,
        )

    def routing(self) -> Routing:
        """Return the hints for routers and engines, as the frontend makes them of the extensions."""
        given = self._extensions
        hints = given.agent_hints or _AgentHints()
        jump = hints.latency_sensitivity if hints.priority is None else float(max(hints.priority, 0))
        extra = {
            "priority_jump": jump,
            "strict_priority": hints.strict_priority,
            "routing_constraints": given.routing_constraints,
        }
        return Routing(
            backend_instance_id=given.backend_instance_id,
            prefill_worker_id=given.prefill_worker_id,
            decode_worker_id=given.decode_worker_id,
            dp_rank=given.dp_rank,
            prefill_dp_rank=given.prefill_dp_rank,
            expected_output_tokens=hints.osl,
            cache_salt=self.cache_salt or given.cache_salt,
            priority=hints.priority,
            extra={name: value for name, value in extra.items() if value is not None},
        )

    def sampling(self) -> Sampling:
        """Return how tokens are sampled."""
        shared = {name: getattr(self, name) for name in Sampling.__struct_fields__ if name in self.__struct_fields__}
        return Sampling(**shared)

    def guided_decoding(self) -> GuidedDecoding | None:
        """Return the constraint on the output, from `response_format` or the `guided_` options. Raises ValueError."""
        guided = GuidedDecoding(
            json=self.guided_json if self.guided_json is not None else _schema_of(self.response_format),
            regex=self.guided_regex,
            choice=self.guided_choice,
            grammar=self.guided_grammar,
        )
        return guided if guided.kinds() else None

    def output_options(self) -> OutputOptions:
        """Return what to return besides the tokens. A chat asks for alternatives in `top_logprobs`."""
        if self.logprobs is None or self.logprobs is False:
            return OutputOptions()
        alternatives = (self.top_logprobs or 0) if self.logprobs is True else self.logprobs
        return OutputOptions(logprobs=alternatives)


def _schema_of(response_format: Mapping[str, object] | None) -> object:
    """Return the JSON schema that `response_format` asks for; None if it is plain text. Raises ValueError."""
    match response_format:
        case None | {"type": "text"}:
            return None
        case {"type": "json_object"}:
            return {"type": "object"}
        case {"type": "json_schema", "json_schema": {"schema": dict(schema)}}:
            return schema
        case _:
            raise ValueError("response_format: expected type text, json_object, or json_schema with a schema")


def _media_types(messages: tuple[dict[str, object], ...]) -> list[str]:
    """Return the types of message parts that are not text."""
    contents = [message.get("content") for message in messages]
    parts = [part for content in contents if isinstance(content, list) for part in content if isinstance(part, dict)]
    return [str(part.get("type")) for part in parts if part.get("type") != "text"]


class TextLogprob(msgspec.Struct, frozen=True):
    """The log-probability of a token, by its text, which begins at `offset` of the answer; the best alternatives."""

    token: str
    logprob: float
    token_id: int
    offset: int = 0
    top: tuple["TextLogprob", ...] = ()


class TextChunk(msgspec.Struct, frozen=True, kw_only=True):
    """A piece of text of one choice, or, with `usage`, the token counts after the last one."""

    request_id: str
    model: str
    created: int
    chat: bool
    text: str
    index: int = 0
    first: bool = False
    finish_reason: FinishReason | None = None
    usage: Usage | None = None
    logprobs: tuple[TextLogprob, ...] | None = None


_OPENAI_REASON = {
    FinishReason.EOS: "stop",
    FinishReason.STOP: "stop",
    FinishReason.LENGTH: "length",
    FinishReason.CANCELLED: "stop",
    FinishReason.CONTENT_FILTER: "content_filter",
}


def decode_text(raw: object) -> TextRequest:
    """Return the request that an OpenAI body describes. Raises DecodeError."""
    if not isinstance(raw, dict):
        raise DecodeError(f"Expected `object`, got `{type(raw).__name__}` - at `$`")
    raw = _with_extra_options(raw)
    request = convert({key: value for key, value in raw.items() if key != "unknown"}, TextRequest)
    _check_extensions(request)
    return msgspec.structs.replace(request, unknown=_unknown_keys(raw))


def _check_extensions(request: TextRequest) -> None:
    try:
        convert(request.nvext or {}, _Extensions)
    except DecodeError as error:
        raise DecodeError(str(error).replace("`$", "`$.nvext", 1)) from None


def _with_extra_options(raw: Wire) -> Wire:
    """Return the body with the options that the edge moved into an annotation."""
    extensions = raw.get("nvext")
    if not isinstance(extensions, dict) or not extensions.get("annotations"):
        return raw
    try:
        annotations, options = take_extra_options(extensions["annotations"])
    except (ValueError, RecursionError) as error:
        raise DecodeError(f"{error} - at `$.nvext.annotations`") from None
    return {**raw, **options, "nvext": {**extensions, "annotations": annotations}}


def _unknown_keys(raw: Mapping[str, object]) -> tuple[str, ...]:
    known = _INFORMATION.union(TextRequest.__struct_fields__) - {"unknown"}
    return tuple(key for key, value in raw.items() if key not in known and value is not None)


def encode_text(chunk: TextChunk) -> Wire:
    """Return `chunk` as an OpenAI stream object."""
    wire: Wire = {
        "id": chunk.request_id,
        "object": "chat.completion.chunk" if chunk.chat else "text_completion",
        "created": chunk.created,
        "model": chunk.model,
        "choices": [] if chunk.usage is not None else [_encode_choice(chunk)],
    }
    if chunk.usage is not None:
        wire["usage"] = encode_usage(chunk.usage)
    return wire


def _encode_choice(chunk: TextChunk) -> Wire:
    reason = _OPENAI_REASON[chunk.finish_reason] if chunk.finish_reason is not None else None
    choice: Wire = {"index": chunk.index, "finish_reason": reason, "logprobs": None}
    if chunk.chat:
        choice["delta"] = {"role": "assistant", "content": chunk.text} if chunk.first else {"content": chunk.text}
    else:
        choice["text"] = chunk.text
    if chunk.logprobs is not None:
        choice["logprobs"] = _chat_logprobs(chunk.logprobs) if chunk.chat else _completion_logprobs(chunk.logprobs)
    return choice


def _chat_logprobs(logprobs: tuple[TextLogprob, ...]) -> Wire:
    entries = [
        {**_chat_logprob(each), "token_id": each.token_id, "top_logprobs": list(map(_chat_logprob, each.top))}
        for each in logprobs
    ]
    return {"content": entries, "refusal": None}


def _chat_logprob(entry: TextLogprob) -> Wire:
    return {"token": entry.token, "logprob": entry.logprob, "bytes": list(entry.token.encode())}


def _completion_logprobs(logprobs: tuple[TextLogprob, ...]) -> Wire:
    return {
        "tokens": [each.token for each in logprobs],
        "token_logprobs": [each.logprob for each in logprobs],
        "top_logprobs": [_alternatives(each) for each in logprobs],
        "text_offset": [each.offset for each in logprobs],
    }


def _alternatives(entry: TextLogprob) -> Wire:
    """Return the alternatives, the best first; of several with one text the best is listed."""
    listed: Wire = {}
    for other in entry.top:
        listed.setdefault(other.token, other.logprob)
    return listed
