"""Media of a request as fields of SGLang's request: files that it encodes, or embeddings."""

from collections.abc import Sequence
from typing import Any

from baton.errors import InvalidRequest, Unsupported
from baton.protocol.media import Media, MediaEmbedding, MediaFile, MediaHandles

FIELDS = {"image": "image_data", "audio": "audio_data", "video": "video_data"}


def media_fields(media: Sequence[Media]) -> dict[str, list[Any]]:
    """Return the media as fields of SGLang's request, in order. Raises InvalidRequest or Unsupported."""
    fields: dict[str, list[Any]] = {}
    for item in media:
        if isinstance(item, MediaHandles):
            raise Unsupported("encoder_result: SGLang does not read media of encode workers")
        if item.modality not in FIELDS:
            raise InvalidRequest(f"media: {item.modality} is none of {', '.join(FIELDS)}")
        value = item.data if isinstance(item, MediaFile) else _embedding(item)
        fields.setdefault(FIELDS[item.modality], []).append(value)
    for name, items in fields.items():
        if len(items) > 1 and any(isinstance(item, dict) for item in items):
            raise InvalidRequest(
                f"{name}: SGLang takes one precomputed embedding per request, which may hold several items"
            )
    return fields


def _embedding(media: MediaEmbedding) -> dict[str, Any]:
    """Return precomputed embedding rows in the format of SGLang's own processor output."""
    import torch

    item = media.item
    dtype = getattr(torch, media.dtype, None)
    if not isinstance(dtype, torch.dtype) or media.data is None:
        raise InvalidRequest(f"media: there are no rows of type {media.dtype}")
    try:
        rows = torch.frombuffer(bytearray(media.data), dtype=dtype).reshape(item.rows, media.size)
    except (RuntimeError, ValueError) as error:
        raise InvalidRequest(f"media: {len(media.data)} bytes are not {item.rows} rows of {media.dtype}") from error
    fields: dict[str, Any] = {
        "format": "processor_output",
        "modality": item.modality.upper(),
        "precomputed_embeddings": rows,
    }
    if item.grid:
        name = "video_grid_thw" if item.modality == "video" else "image_grid_thw"
        fields[name] = torch.tensor(item.grid, dtype=torch.int64)
    return fields
