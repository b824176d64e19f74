"""What an encoder made, for whoever computes the prompt, as plain JSON: handles of tensors, and the prompt. Pure.

The keys are the library's own names, and `prompt`: where images stand, and how many tokens each takes, the library
finds out anew from the text.
"""

import msgspec

from baton.engines.trtllm.library_types import DisaggregatedFields13, DisaggregatedParams, Handle
from baton.errors import EngineFailed, InvalidRequest
from baton.ports.engine import Work
from baton.protocol.media import MediaHandles


class Handles(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """The encoder's result on the wire."""

    prompt: str
    multimodal_embedding_handles: list[Handle]
    multimodal_hashes: list[list[int]] | None = None
    mrope_position_ids_handle: Handle | None = None
    mrope_position_deltas_handle: Handle | None = None


def written(params: DisaggregatedParams | None, prompt: str) -> dict[str, object]:
    """Return what to send to whoever computes the prompt. Raises EngineFailed when there is nothing to send."""
    if params is None or not params.multimodal_embedding_handles:
        raise EngineFailed("the encoder ended without saying where what it made is")
    wire: dict[str, object] = msgspec.to_builtins(
        Handles(
            prompt=prompt,
            multimodal_embedding_handles=params.multimodal_embedding_handles,
            multimodal_hashes=params.multimodal_hashes,
            mrope_position_ids_handle=params.mrope_position_ids_handle,
            mrope_position_deltas_handle=params.mrope_position_deltas_handle,
        )
    )
    return wire


def handles_of(work: Work) -> Handles | None:
    """Return the handles that `work` comes with. Raises InvalidRequest, naming the field."""
    for item in work.media:
        if isinstance(item, MediaHandles):
            try:
                return msgspec.convert(item.params, Handles)
            except msgspec.ValidationError as error:
                raise InvalidRequest(f"encoder_result.engine: {error}") from None
    return None


def fields_of(handles: Handles) -> DisaggregatedFields13:
    """Return the handles as the library takes them."""
    return DisaggregatedFields13(
        multimodal_embedding_handles=handles.multimodal_embedding_handles,
        multimodal_hashes=handles.multimodal_hashes,
        mrope_position_ids_handle=handles.mrope_position_ids_handle,
        mrope_position_deltas_handle=handles.mrope_position_deltas_handle,
    )
