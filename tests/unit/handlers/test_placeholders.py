"""Placeholders: typed ones are told from rendered ones by position, and expansions go where their items are."""

import pytest

from baton.errors import InvalidRequest
from baton.handlers.placeholders import as_plain_text, expand, find_placeholders
from baton.ports.engine import Placeholder
from baton.protocol.media import EncodedItem, PlacedItem

IMAGE = Placeholder(token=9, text="<image>", as_text=(4, 5, 6))


def image(rows: int) -> EncodedItem:
    return EncodedItem(
        modality="image", content_hash="aa", expansion=((7, 1), (9, rows), (8, 1)), embed_token=9, rows=rows
    )


def content(*parts: str | None) -> list[dict[str, object]]:
    """One message; None is an image."""
    return [
        {
            "role": "user",
            "content": [
                {"type": "image_url", "image_url": {"url": "data:"}} if part is None else {"type": "text", "text": part}
                for part in parts
            ],
        }
    ]


def test_rendered_placeholders_need_no_messages() -> None:
    assert find_placeholders([1, 9, 2, 9], IMAGE, "image", 2, None) == [1, 3]


def test_a_typed_placeholder_is_told_from_a_rendered_one_by_position() -> None:
    before = content("what is <image>?", None)
    after = content(None, "what is <image>?")
    assert find_placeholders([1, 9, 2, 9], IMAGE, "image", 1, before) == [3]
    assert find_placeholders([1, 9, 2, 9], IMAGE, "image", 1, after) == [1]


def test_a_typed_placeholder_in_a_plain_message_counts_too() -> None:
    messages = [{"role": "system", "content": "never say <image>"}, *content(None)]
    assert find_placeholders([9, 1, 9], IMAGE, "image", 1, messages) == [2]


@pytest.mark.parametrize("tokens", [[1, 2], [9, 9, 9]])
def test_placeholders_that_do_not_fit_the_items_are_refused(tokens: list[int]) -> None:
    with pytest.raises(InvalidRequest, match=r"placeholders '<image>' for 2 items of type image"):
        find_placeholders(tokens, IMAGE, "image", 2, content(None, None))


def test_typed_placeholders_become_text() -> None:
    assert as_plain_text([1, 9, 2, 9], {"image": IMAGE}, [3]) == ((1, 4, 5, 6, 2, 9), {3: 5})


def test_expansions_replace_placeholders_in_any_order_of_items() -> None:
    placed = [PlacedItem(item=image(2), index=3), PlacedItem(item=image(1), index=1)]
    tokens, positions = expand([1, 9, 2, 9, 3], placed)
    assert tokens == (1, 7, 9, 8, 2, 7, 9, 9, 8, 3)
    assert positions == [5, 1]


def test_an_expansion_has_as_many_places_as_the_item_has_rows() -> None:
    with pytest.raises(ValueError, match="3 places for rows"):
        EncodedItem(modality="image", content_hash="", expansion=((9, 2),), embed_token=9, rows=3)
