"""The hashes by which the frontend's router knows the images of a request, for the media of its prompt. Pure."""

from collections.abc import Sequence

import msgspec

from baton.protocol.media import MediaEmbedding


def with_routing_hashes(media: Sequence[MediaEmbedding], hashes: Sequence[str]) -> tuple[MediaEmbedding, ...]:
    """Give each image of a prompt its hash; both are in the order of the prompt.

    `hashes` are `GenerateRequest.image_routing_hashes`. If their number is not that of the images, none gets one: KV
    events then name no media, and the router finds only blocks before the first image.
    """
    images = sorted((item for item in media if item.modality == "image"), key=lambda item: item.position)
    if len(images) != len(hashes):
        return tuple(media)
    by_position = {item.position: name for item, name in zip(images, hashes, strict=True)}
    return tuple(
        msgspec.structs.replace(item, routing_hash=by_position.get(item.position)) if item.modality == "image" else item
        for item in media
    )
