"""The library's DisaggregatedParams on the wire from prefill to decode, as plain JSON: bytes as base64. Pure.

The location of the KV is `opaque_state` with the library's C++ transceiver, and `ctx_info_endpoint` with `ctx_dp_rank`
and the ids with its Python one. The keys are the library's names, and `prompt_token_ids`, the prompt as the prefill has
computed it, if that is not the client's: with media it is longer. Handles of embeddings are left out: the KV contains
them, and the decode's engine rejects them. JSON has no numbers as keys, so the log-probabilities of a position are a
list of {token_id, logprob, rank}.
"""

import base64
import binascii
from collections.abc import Mapping
from typing import Annotated, cast

import msgspec
from msgspec import Meta

from baton.engines.trtllm.compat import Library
from baton.engines.trtllm.library_types import (
    DisaggregatedFields13,
    DisaggregatedParams,
    DisaggregatedParams13,
    Handle,
    Logprob,
    TokenLogprob,
)
from baton.errors import EngineFailed, InvalidRequest

CONTEXT_ONLY = "context_only"
GENERATION_ONLY = "generation_only"
CONTEXT_AND_GENERATION = "context_and_generation"

Id = Annotated[int, Meta(ge=0)]

# Keys that the frontend adds.
_FRONTEND_KEYS = frozenset({"worker_id"})


class _Entry(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    token_id: int
    logprob: float
    rank: int | None = None


class HandoffParams(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """The handoff on the wire."""

    request_type: str
    first_gen_tokens: list[int] | None = None
    ctx_request_id: Id | None = None
    opaque_state: str | None = None
    draft_tokens: list[int] | None = None
    prompt_token_ids: list[Id] | None = None
    multimodal_hashes: list[list[int]] | None = None
    mrope_position_ids_handle: Handle | None = None
    mrope_position_deltas_handle: Handle | None = None
    first_gen_log_probs: list[list[_Entry]] | None = None
    disagg_request_id: Id | None = None
    ctx_dp_rank: Annotated[int, Meta(ge=0)] | None = None
    ctx_info_endpoint: str | None = None
    schedule_style: int | None = None
    ctx_usage: dict[str, object] | None = None


_SINCE_13 = ("first_gen_log_probs", "disagg_request_id", "ctx_dp_rank", "ctx_info_endpoint", "schedule_style")


def encode(
    params: DisaggregatedParams | None,
    library: Library,
    sent: DisaggregatedParams | None = None,
    prompt: list[int] | None = None,
) -> dict[str, object]:
    """Return the parameters for the decode. Raises EngineFailed if the prefill returned none.

    `prompt` is that of a request with media as it was computed, and `sent` are the parameters of that request: what
    they have of the media, and the result does not repeat, is returned too.
    """
    if params is None or not _located(params, library):
        raise EngineFailed("the prefill ended without the location of its KV")
    wire = HandoffParams(
        request_type=CONTEXT_ONLY,
        first_gen_tokens=params.first_gen_tokens,
        ctx_request_id=params.ctx_request_id,
        opaque_state=None if params.opaque_state is None else base64.b64encode(params.opaque_state).decode(),
        draft_tokens=params.draft_tokens,
    )
    if prompt is not None and sent is not None:
        wire = _with_media(wire, params, sent, prompt)
    if library.features.handoff_ids:
        new = cast(DisaggregatedParams13, params)
        wire = msgspec.structs.replace(
            wire,
            first_gen_log_probs=_flat(new),
            disagg_request_id=new.disagg_request_id,
            ctx_dp_rank=new.ctx_dp_rank,
            ctx_info_endpoint=new.ctx_info_endpoint,
            schedule_style=None if new.schedule_style is None else int(new.schedule_style),
            ctx_usage=new.ctx_usage,
        )
    plain: dict[str, object] = msgspec.to_builtins(wire)
    return plain


def _with_media(
    wire: HandoffParams, params: DisaggregatedParams, sent: DisaggregatedParams, prompt: list[int]
) -> HandoffParams:
    return msgspec.structs.replace(
        wire,
        prompt_token_ids=list(prompt),
        multimodal_hashes=params.multimodal_hashes or sent.multimodal_hashes,
        mrope_position_ids_handle=params.mrope_position_ids_handle or sent.mrope_position_ids_handle,
        mrope_position_deltas_handle=params.mrope_position_deltas_handle or sent.mrope_position_deltas_handle,
    )


def decode(params: Mapping[str, object], library: Library) -> object:
    """Return the library's parameters to continue from the KV of `params`. Raises InvalidRequest, naming the field."""
    wire = _read(params)
    _refuse_newer(wire, library)
    if wire.opaque_state is None and wire.ctx_info_endpoint is None:
        raise InvalidRequest("prefill_result.disaggregated_params: it needs opaque_state or ctx_info_endpoint")
    fields = DisaggregatedFields13(
        request_type=GENERATION_ONLY,
        first_gen_tokens=wire.first_gen_tokens,
        ctx_request_id=wire.ctx_request_id,
        opaque_state=_bytes(wire.opaque_state),
        draft_tokens=wire.draft_tokens,
        multimodal_hashes=wire.multimodal_hashes,
        mrope_position_ids_handle=wire.mrope_position_ids_handle,
        mrope_position_deltas_handle=wire.mrope_position_deltas_handle,
    )
    if library.features.handoff_ids:
        fields["first_gen_log_probs"] = _to_library(wire, library)
        fields["disagg_request_id"] = wire.disagg_request_id
        fields["ctx_dp_rank"] = wire.ctx_dp_rank
        fields["ctx_info_endpoint"] = wire.ctx_info_endpoint
        fields["schedule_style"] = wire.schedule_style
        fields["ctx_usage"] = wire.ctx_usage
    return library.disaggregated_params(**fields)


def _refuse_newer(wire: HandoffParams, library: Library) -> None:
    given = msgspec.structs.asdict(wire)
    newer = [name for name in _SINCE_13 if given[name] is not None]
    if newer and not library.features.handoff_ids:
        raise InvalidRequest(
            f"prefill_result.disaggregated_params.{newer[0]}: the prefill runs TensorRT-LLM 1.3 and this decode 1.2"
        )


def _located(params: DisaggregatedParams, library: Library) -> bool:
    if params.opaque_state is not None:
        return True
    return library.features.handoff_ids and cast(DisaggregatedParams13, params).ctx_info_endpoint is not None


def prompt_of(params: Mapping[str, object]) -> list[int] | None:
    """Return the prompt as the prefill has computed it, if it differs. Raises InvalidRequest."""
    return _read(params).prompt_token_ids


def _read(params: Mapping[str, object]) -> HandoffParams:
    try:
        return msgspec.convert(
            {key: value for key, value in params.items() if key not in _FRONTEND_KEYS}, HandoffParams
        )
    except msgspec.ValidationError as error:
        raise InvalidRequest(f"prefill_result.disaggregated_params: {error}") from None


def _flat(params: DisaggregatedParams13) -> list[list[_Entry]] | None:
    if params.first_gen_log_probs is None:
        return None
    tokens = params.first_gen_tokens or []
    return [_entries(position, tokens[at : at + 1]) for at, position in enumerate(params.first_gen_log_probs)]


def _entries(position: TokenLogprob, tokens: list[int]) -> list[_Entry]:
    if position is None:
        return []
    if isinstance(position, Mapping):
        return [_Entry(int(token), float(entry.logprob), entry.rank) for token, entry in position.items()]
    return [_Entry(token, float(position)) for token in tokens]


def _to_library(wire: HandoffParams, library: Library) -> list[TokenLogprob] | None:
    if wire.first_gen_log_probs is None:
        return None
    return [_position(entries, library) for entries in wire.first_gen_log_probs]


def _position(entries: list[_Entry], library: Library) -> dict[int, Logprob]:
    return {entry.token_id: library.logprob(logprob=entry.logprob, rank=entry.rank) for entry in entries}


def _bytes(text: str | None) -> bytes | None:
    if text is None:
        return None
    try:
        return base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError):
        raise InvalidRequest("prefill_result.disaggregated_params.opaque_state: not valid base64") from None
