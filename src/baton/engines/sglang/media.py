"""Media of a request as fields of SGLang's request: files that SGLang encodes, or items that are already placed."""

from collections.abc import Sequence
from typing import Any

from baton.engines.sglang.placed_media import PlacedMedia
from baton.errors import InvalidRequest, Unsupported
from baton.protocol.media import Media, MediaEmbedding, MediaHandles

FIELDS = {"image": "image_data", "audio": "audio_data", "video": "video_data"}


def media_fields(media: Sequence[Media]) -> dict[str, list[Any]]:
    """Return the media as fields of SGLang's request, in order. Raises InvalidRequest or Unsupported."""
    placed = tuple(item for item in media if isinstance(item, MediaEmbedding))
    if placed and len(placed) == len(media):
        return {"image_data": [PlacedMedia(placed)]}
    fields: dict[str, list[Any]] = {}
    for item in media:
        if isinstance(item, MediaHandles):
            raise Unsupported("encoder_result: SGLang does not read media that another engine holds")
        if isinstance(item, MediaEmbedding):
            raise Unsupported("media: SGLang takes files or embeddings in one request, not both")
        if item.modality not in FIELDS:
            raise InvalidRequest(f"media: {item.modality} is none of {', '.join(FIELDS)}")
        fields.setdefault(FIELDS[item.modality], []).append(item.data)
    return fields
