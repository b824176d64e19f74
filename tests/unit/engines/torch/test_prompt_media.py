"""Media of a prompt: rows, rotary positions and block hashes come from the items and their places."""

import pytest

from baton.engine_kit.block_hash import block_hashes
from baton.engines.torch.models.vision_language import SpatialPositions
from baton.engines.torch.prompt_media import PromptMedia, RowRun, check_rows, read_media
from baton.errors import InvalidRequest
from baton.protocol.events import RoutedRows
from baton.protocol.media import EncodedItem, MediaEmbedding

PAD = 9
SPATIAL = SpatialPositions(sections=(2, 3, 3), merge=2, tokens_per_second=2)


def item(
    position: int,
    rows: int,
    grid: tuple[int, int, int] | None = None,
    modality: str = "image",
    seconds: float | None = None,
    name: str = "a",
    around: int = 0,
    **more: object,
) -> MediaEmbedding:
    around_runs = ((7, around),) if around else ()
    encoded = EncodedItem(
        modality=modality,
        content_hash=name,
        expansion=(*around_runs, (PAD, rows), *around_runs),
        embed_token=PAD,
        rows=rows,
        grid=() if grid is None else (grid,),
        seconds_per_grid=seconds,
    )
    return MediaEmbedding(item=encoded, position=position, dtype="float32", size=2, **more)  # type: ignore[arg-type]


def test_rows_are_only_the_embed_tokens_of_the_expansions_in_any_part_of_the_prompt() -> None:
    media = PromptMedia([item(20, 3, around=1), item(4, 5)], 40, None)
    assert list(media.rows_in(0, 40)) == [RowRun(4, 5, 0, 0), RowRun(21, 3, 1, 0)]
    assert list(media.rows_in(6, 22)) == [RowRun(6, 3, 0, 2), RowRun(21, 1, 1, 0)]
    assert list(media.rows_in(9, 21)) == []
    assert media.rows_end == 24


def test_positions_are_indexes_without_spatial_positions() -> None:
    assert PromptMedia([item(4, 5)], 40, None).positions(3, 12) == 0


def test_an_image_has_positions_in_two_directions_and_text_continues_after_the_largest() -> None:
    media = PromptMedia([item(3, 6, (1, 4, 6))], 20, SPATIAL)
    image = [(3, 3, 3), (3, 3, 4), (3, 3, 5), (3, 4, 3), (3, 4, 4), (3, 4, 5)]
    assert media.positions(0, 3) == 0
    assert media.positions(3, 9) == image
    assert media.positions(2, 11) == [(2, 2, 2), *image, (6, 6, 6), (7, 7, 7)]
    assert media.positions(5, 7) == image[2:4]
    # Token 9 has position 6, and everything after it follows.
    assert media.positions(9, 12) == -3
    assert media.positions(1000, 1001) == -3


def test_a_video_advances_in_time_by_its_seconds_and_text_continues_after_its_end() -> None:
    media = PromptMedia([item(1, 12, (3, 4, 4), "video", seconds=1.25)], 20, SPATIAL)
    found = media.positions(1, 13)
    assert isinstance(found, list)
    # 2.5 positions between frames: 0, 2, 5, rounded down.
    assert [time for time, _, _ in found] == [1] * 4 + [3] * 4 + [6] * 4
    assert media.positions(13, 14) == 7 - 13


def test_seconds_of_a_video_are_not_applied_to_images() -> None:
    media = PromptMedia([item(0, 2, (1, 2, 4), seconds=9.0)], 5, SPATIAL)
    assert media.positions(0, 2) == [(0, 0, 0), (0, 0, 1)]


@pytest.mark.parametrize(
    "items",
    [
        [item(0, 4), item(3, 2)],
        [item(10, 4)],
        [item(0, 4, (1, 4, 6))],
        [item(0, 4)],
    ],
    ids=["overlap", "beyond the end", "another grid", "no grid"],
)
def test_items_that_do_not_fit_are_refused(items: list[MediaEmbedding]) -> None:
    with pytest.raises(InvalidRequest):
        PromptMedia(items, 12, SPATIAL)


@pytest.mark.parametrize(
    "wrong",
    [{"data": memoryview(bytes(31))}, {"data": memoryview(bytes(32)), "dtype": "int8"}],
    ids=["too few bytes", "another type"],
)
def test_rows_that_the_model_cannot_read_are_refused(wrong: dict[str, object]) -> None:
    fields: dict[str, object] = {"item": item(0, 4).item, "position": 0, "dtype": "float32", "size": 2, **wrong}
    media = PromptMedia([MediaEmbedding(**fields)], 12, None)  # type: ignore[arg-type]
    with pytest.raises(InvalidRequest):
        check_rows(media, 2)


def test_rows_of_another_width_are_refused() -> None:
    media = PromptMedia([item(0, 4, data=memoryview(bytes(32)))], 12, None)
    check_rows(media, 2)
    with pytest.raises(InvalidRequest):
        check_rows(media, 4)


def test_text_has_no_media() -> None:
    assert read_media((), 12, SPATIAL) is None


def test_block_hashes_tell_pictures_apart_from_the_first_block_that_they_are_in() -> None:
    tokens = [1] * 6 + [PAD] * 4 + [2] * 6
    same = [block_hashes(tokens, 4, media=PromptMedia([item(6, 4, name="a")], 16, None).spans) for _ in range(2)]
    other = block_hashes(tokens, 4, media=PromptMedia([item(6, 4, name="b")], 16, None).spans)
    plain = block_hashes(tokens, 4)
    assert same[0] == same[1]
    assert same[0][0] == other[0] == plain[0]
    assert not {*same[0][1:]} & {*other[1:]}
    assert not {*same[0][1:]} & {*plain[1:]}


def test_block_hashes_tell_apart_where_in_a_block_a_picture_begins() -> None:
    tokens = [PAD] * 8
    first, second = item(0, 4, name="a"), item(4, 4, name="b")
    moved = [item(0, 3, name="a"), item(3, 5, name="b")]
    hashes = [block_hashes(tokens, 8, media=PromptMedia(items, 8, None).spans) for items in ([first, second], moved)]
    assert hashes[0] != hashes[1]


def test_rows_with_a_routing_hash_are_routed() -> None:
    media = PromptMedia([item(0, 4, routing_hash="ff", around=1), item(9, 2)], 12, None)
    assert media.routed == [RoutedRows(1, 5, "ff")]
