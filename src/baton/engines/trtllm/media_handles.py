"""Encoded media on the wire to the worker that computes the prompt, as plain JSON: tensor handles. Pure.

The keys are the library's names.
"""

import msgspec

from baton.engines.trtllm.library_types import DisaggregatedFields13, DisaggregatedParams, Handle
from baton.errors import EngineFailed, InvalidRequest
from baton.ports.engine import Work
from baton.protocol.media import MediaHandles


class Handles(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """The encoder's result on the wire."""

    multimodal_embedding_handles: list[Handle]
    multimodal_hashes: list[list[int]] | None = None
    mrope_position_ids_handle: Handle | None = None
    mrope_position_deltas_handle: Handle | None = None


def to_wire(params: DisaggregatedParams | None, items: int) -> dict[str, object]:
    """Return the handles for the worker that computes the prompt. Raises EngineFailed unless there are `items`."""
    handles = None if params is None else params.multimodal_embedding_handles
    if params is None or not handles:
        raise EngineFailed("the encoder ended without handles of its embeddings")
    if len(handles) != items:
        raise EngineFailed(f"the encoder returned handles of {len(handles)} embeddings for {items} images")
    wire: dict[str, object] = msgspec.to_builtins(
        Handles(
            multimodal_embedding_handles=handles,
            multimodal_hashes=params.multimodal_hashes,
            mrope_position_ids_handle=params.mrope_position_ids_handle,
            mrope_position_deltas_handle=params.mrope_position_deltas_handle,
        )
    )
    return wire


def handles_of(work: Work) -> Handles | None:
    """Return the handles in `work`, if any. Raises InvalidRequest, naming the field."""
    for item in work.media:
        if isinstance(item, MediaHandles):
            try:
                return msgspec.convert(item.params, Handles)
            except msgspec.ValidationError as error:
                raise InvalidRequest(f"encoder_result.engine: {error}") from None
    return None


def fields_of(handles: Handles) -> DisaggregatedFields13:
    """Return the handles as keywords of the library's DisaggregatedParams."""
    return DisaggregatedFields13(
        multimodal_embedding_handles=handles.multimodal_embedding_handles,
        multimodal_hashes=handles.multimodal_hashes,
        mrope_position_ids_handle=handles.mrope_position_ids_handle,
        mrope_position_deltas_handle=handles.mrope_position_deltas_handle,
    )
