"""What a prefill hands to a decode, as plain JSON: bytes as base64, log-probabilities as lists. Pure.

The keys are the library's own names, and `prompt_token_ids`, the prompt as the prefill has computed it, if that is not
the client's: with images it is longer. Where the embeddings of those are is not told: the decode has them in the KV,
and its engine refuses to hear of them. JSON has no numbers as keys, so the log-probabilities of a position are a list
of {token_id, logprob, rank}.
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
from baton.engines.trtllm.media_handles import Handles
from baton.errors import EngineFailed, InvalidRequest

CONTEXT_ONLY = "context_only"
GENERATION_ONLY = "generation_only"
WHOLE = "context_and_generation"

Id = Annotated[int, Meta(ge=0)]

# What others on the way add for themselves.
_NOT_OURS = frozenset({"worker_id"})


class _Entry(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    token_id: int
    logprob: float
    rank: int | None = None


class _Params(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """The hand-off on the wire."""

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
    params: DisaggregatedParams | None, library: Library, media: tuple[Handles, list[int]] | None = None
) -> dict[str, object]:
    """Return what to send to the decode. Raises EngineFailed when the prefill has told nothing that could be taken.

    `media` is for a prompt that came with handles: those, and the prompt as it was computed.
    """
    if params is None or params.opaque_state is None:
        raise EngineFailed("the prefill ended without saying where its KV is")
    wire = _Params(
        request_type=CONTEXT_ONLY,
        first_gen_tokens=params.first_gen_tokens,
        ctx_request_id=params.ctx_request_id,
        opaque_state=base64.b64encode(params.opaque_state).decode(),
        draft_tokens=params.draft_tokens,
    )
    if media is not None:
        handles, prompt = media
        wire = msgspec.structs.replace(
            wire,
            prompt_token_ids=list(prompt),
            multimodal_hashes=params.multimodal_hashes or handles.multimodal_hashes,
            mrope_position_ids_handle=params.mrope_position_ids_handle or handles.mrope_position_ids_handle,
            mrope_position_deltas_handle=params.mrope_position_deltas_handle or handles.mrope_position_deltas_handle,
        )
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


def decode(sent: Mapping[str, object], library: Library) -> object:
    """Return the library's parameters for going on from what was sent. Raises InvalidRequest, naming the field."""
    wire = _read(sent)
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
        fields["first_gen_log_probs"] = _rebuilt(wire, library)
        fields["disagg_request_id"] = wire.disagg_request_id
        fields["ctx_dp_rank"] = wire.ctx_dp_rank
        fields["ctx_info_endpoint"] = wire.ctx_info_endpoint
        fields["schedule_style"] = wire.schedule_style
        fields["ctx_usage"] = wire.ctx_usage
    elif told := [
        name for name, value in msgspec.structs.asdict(wire).items() if name in _SINCE_13 and value is not None
    ]:
        raise InvalidRequest(
            f"prefill_result.disaggregated_params.{told[0]}: the prefill runs TensorRT-LLM 1.3 and this decode 1.2"
        )
    return library.disaggregated_params(**fields)


def prompt_of(sent: Mapping[str, object]) -> list[int] | None:
    """Return the prompt as the prefill has computed it, if it says so. Raises InvalidRequest."""
    return _read(sent).prompt_token_ids


def _read(sent: Mapping[str, object]) -> _Params:
    try:
        return msgspec.convert({key: value for key, value in sent.items() if key not in _NOT_OURS}, _Params)
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
        return [_Entry(int(token), float(told.logprob), told.rank) for token, told in position.items()]
    return [_Entry(token, float(position)) for token in tokens]


def _rebuilt(wire: _Params, library: Library) -> list[TokenLogprob] | None:
    if wire.first_gen_log_probs is None:
        return None
    return [_position(entries, library) for entries in wire.first_gen_log_probs]


def _position(entries: list[_Entry], library: Library) -> dict[int, Logprob]:
    return {entry.token_id: library.logprob(logprob=entry.logprob, rank=entry.rank) for entry in entries}


def _bytes(text: str | None) -> bytes:
    if text is None:
        raise InvalidRequest("prefill_result.disaggregated_params.opaque_state: it is missing")
    try:
        return base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError):
        raise InvalidRequest("prefill_result.disaggregated_params.opaque_state: it is not base64") from None
