"""Between the runtime's dicts and our structs. Bare dicts do not pass this module.

Decoding is one pass in C; keys without a field are kept in `extra`, so `encode_request(decode_request(d))` loses
nothing. Failures name the field and its path.
"""

from collections.abc import Mapping
from typing import Any, TypeVar, cast

import msgspec

from baton.protocol.extra import EXTRA_KEY, Extra
from baton.protocol.extra_options import place_extra_options
from baton.protocol.handoff import Bootstrap, PrefillResult
from baton.protocol.media import MediaItem
from baton.protocol.outputs import Chunk, FinishReason, Logprobs, TokenDelta, TopLogprob, Usage
from baton.protocol.requests import (
    DiffusionOptions,
    GenerateRequest,
    GuidedDecoding,
    OutputOptions,
    Routing,
    Sampling,
    StopConditions,
)

Wire = dict[str, object]
S = TypeVar("S", bound=msgspec.Struct)


class DecodeError(ValueError):
    """The message does not match the protocol. The error names the field and its path."""


_STRUCTS_WITH_EXTRA: tuple[type[msgspec.Struct], ...] = (
    GenerateRequest,
    StopConditions,
    Sampling,
    GuidedDecoding,
    OutputOptions,
    DiffusionOptions,
    Routing,
    PrefillResult,
    Bootstrap,
    MediaItem,
)
_KEYS = {
    cls: frozenset(f.encode_name for f in msgspec.structs.fields(cls)) - {EXTRA_KEY} for cls in _STRUCTS_WITH_EXTRA
}
# Where a struct that keeps extra keys holds another one: (key on the wire, name of the field).
_INNER: dict[type[msgspec.Struct], tuple[tuple[str, str], ...]] = {
    GenerateRequest: (
        ("stop_conditions", "stop"),
        ("sampling_options", "sampling"),
        ("output_options", "output"),
        ("diffusion", "diffusion"),
        ("routing", "routing"),
        ("prefill_result", "prefill_result"),
        ("bootstrap_info", "bootstrap"),
    ),
    Sampling: (("guided_decoding", "guided_decoding"),),
}


def decode_request(raw: object) -> GenerateRequest:
    """Return the request that `raw` describes. Raises DecodeError."""
    if not isinstance(raw, Mapping):
        raise DecodeError(f"Expected `object`, got `{type(raw).__name__}` - at `$`")
    present: Wire = {key: value for key, value in raw.items() if value is not None}
    if present.get("annotations"):
        present = _with_extra_options(present)
    media = present.get("multi_modal_data")
    if not isinstance(media, Mapping):
        return keep_extra(convert(present, GenerateRequest), present)
    items = present["multi_modal_data"] = {kind: _media_items(listed) for kind, listed in media.items()}
    request = keep_extra(convert(present, GenerateRequest), present)
    kept = {kind: tuple(map(keep_extra, listed, items[kind])) for kind, listed in (request.media or {}).items()}
    return msgspec.structs.replace(request, media=kept)


def _with_extra_options(present: Wire) -> Wire:
    try:
        return place_extra_options(present)
    except (ValueError, RecursionError) as error:
        raise DecodeError(f"{error} - at `$.annotations`") from None


def convert(raw: object, cls: type[S]) -> S:
    """Return `raw` as a `cls`. Raises DecodeError with the path of the first invalid value."""
    try:
        return msgspec.convert(raw, cls)
    except (msgspec.ValidationError, RecursionError, UnicodeError, OverflowError) as error:
        raise DecodeError(str(error)) from None


def keep_extra(value: S, raw: Mapping[str, object]) -> S:
    """Return `value` with the keys of `raw` that have no field kept in `extra`, at every level."""
    cls = type(value)
    changes: Wire = {}
    if not raw.keys() <= _KEYS[cls]:
        changes["extra"] = {key: raw[key] for key in raw if key not in _KEYS[cls]}
    for key, name in _INNER.get(cls, ()):
        below = raw.get(key)
        if isinstance(below, dict):  # as the runtime makes them; much faster to check than a Mapping
            inner: msgspec.Struct = getattr(value, name)
            kept = keep_extra(inner, below)
            if kept is not inner:
                changes[name] = kept
    return msgspec.structs.replace(value, **changes) if changes else value


def encode_request(request: GenerateRequest) -> Wire:
    """Return the dict that decodes to `request`, for forwarding to another worker."""
    return _restore(cast(Wire, msgspec.to_builtins(request, builtin_types=(bytes,))), request)


def encode_chunk(chunk: Chunk | TokenDelta) -> Wire:
    """Return `chunk` in the frontend's format. Fields that are not set are left out. Tokens alone are a chunk too."""
    wire: Wire = {"token_ids": chunk.token_ids}
    if chunk.index:
        wire["index"] = chunk.index
    if chunk.logprobs is not None:
        _encode_logprobs(chunk.logprobs, wire)
    if isinstance(chunk, TokenDelta):  # nearly always
        return wire
    if chunk.finish_reason is not None:
        wire["finish_reason"] = chunk.finish_reason.value
    if chunk.stop_reason is not None:
        wire["stop_reason"] = chunk.stop_reason
    if chunk.usage is not None:
        wire["completion_usage"] = encode_usage(chunk.usage)
    if chunk.disaggregated_params is not None:
        wire["disaggregated_params"] = chunk.disaggregated_params
    if chunk.prompt is not None:
        wire["engine_data"] = msgspec.to_builtins(chunk.prompt)
    if chunk.encoder_result is not None:
        wire["encoder_result"] = chunk.encoder_result
    return wire


class _Details(msgspec.Struct):
    cached_tokens: int | None = None


class _Usage(msgspec.Struct):
    prompt_tokens: int
    completion_tokens: int = 0
    prompt_tokens_details: _Details | None = None


class _Chunk(msgspec.Struct):
    """What this process reads of a chunk of another worker. The runtime sends null for a field without a value."""

    token_ids: list[int] | None = None
    index: int | None = None
    log_probs: tuple[float, ...] | None = None
    top_logprobs: tuple[tuple[TopLogprob, ...], ...] | None = None
    finish_reason: str | dict[str, str] | None = None
    stop_reason: int | str | None = None
    completion_usage: _Usage | None = None


def decode_chunk(raw: object) -> Chunk:
    """Return the chunk that another worker sent: its tokens, its end and its usage. Raises DecodeError, also for a
    chunk that reports a failure."""
    wire = convert(raw, _Chunk)
    return Chunk(
        wire.token_ids or [],
        wire.index or 0,
        None if wire.log_probs is None else Logprobs(wire.log_probs, wire.top_logprobs or ()),
        None if wire.finish_reason is None else _finish_reason(wire.finish_reason),
        wire.stop_reason,
        None if wire.completion_usage is None else _decode_usage(wire.completion_usage),
    )


def _finish_reason(reason: str | dict[str, str]) -> FinishReason:
    if isinstance(reason, dict):
        raise DecodeError(f"the worker failed: {reason.get('error', reason)}")
    try:
        return FinishReason(reason)
    except ValueError:
        raise DecodeError(f"the worker failed: {reason}") from None


def _decode_usage(usage: _Usage) -> Usage:
    details = usage.prompt_tokens_details
    return Usage(usage.prompt_tokens, usage.completion_tokens, None if details is None else details.cached_tokens)


def _encode_logprobs(logprobs: Logprobs, wire: Wire) -> None:
    wire["log_probs"] = list(logprobs.chosen)
    if logprobs.top:
        wire["top_logprobs"] = [
            [
                {"rank": top.rank, "token_id": top.token_id, "token": top.token, "logprob": top.logprob}
                for top in position
            ]
            for position in logprobs.top
        ]


def encode_usage(usage: Usage) -> Wire:
    """Return `usage` in OpenAI's format."""
    cached = usage.cached_tokens
    return {
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.completion_tokens,
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
        "prompt_tokens_details": None if cached is None else {"cached_tokens": cached},
    }


def _media_items(items: Any) -> Any:
    if not isinstance(items, list | tuple):
        return items
    return [{"Url": item} if isinstance(item, str) else item for item in items]


def _restore(wire: Wire, value: msgspec.Struct) -> Wire:
    """Put the extra keys of `value` back at the level where they were decoded."""
    extra = cast(Extra, wire.pop(EXTRA_KEY))
    for key, name in _INNER.get(type(value), ()):
        inner: msgspec.Struct | None = getattr(value, name)
        if inner is not None:
            wire[key] = _restore(cast(Wire, wire[key]), inner)
    if isinstance(value, GenerateRequest) and value.media is not None:
        media = cast(dict[str, list[Wire]], wire["multi_modal_data"])
        wire["multi_modal_data"] = {kind: list(map(_restore, media[kind], value.media[kind])) for kind in media}
    return {**wire, **extra}
