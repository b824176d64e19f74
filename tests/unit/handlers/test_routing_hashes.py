"""Images get the hashes of the frontend's router in the order of the prompt."""

from baton.handlers.routing_hashes import with_routing_hashes
from baton.protocol.media import EncodedItem, MediaEmbedding


def item(position: int, modality: str = "image") -> MediaEmbedding:
    encoded = EncodedItem(modality=modality, content_hash="c", expansion=((1, 2),), embed_token=1, rows=2)
    return MediaEmbedding(item=encoded, position=position, dtype="float32", size=4)


def test_images_get_their_hashes_in_the_order_of_the_prompt() -> None:
    found = with_routing_hashes([item(9), item(3, "video"), item(1)], ["a", "b"])
    assert [(one.position, one.routing_hash) for one in found] == [(9, "b"), (3, None), (1, "a")]


def test_another_number_of_hashes_gives_none() -> None:
    media = (item(1), item(9))
    assert with_routing_hashes(media, ["a"]) == media
    assert with_routing_hashes(media, []) == media
