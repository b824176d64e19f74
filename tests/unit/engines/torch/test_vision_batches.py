"""Which parts are encoded together: same grids, in turns, within the budget, each once."""

from itertools import pairwise

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from baton.engines.torch.vision.batches import PendingItem, take_batch
from baton.engines.torch.vision.pixels import PreparedMedia
from baton.protocol.media import EncodedItem

SMALL, LARGE = (2, 2), (4, 4)


def pending(parts: int, grid: tuple[int, int] = SMALL) -> PendingItem:
    rows = parts * grid[0] * grid[1]
    item = EncodedItem(modality="image", content_hash="", expansion=((9, rows),), embed_token=9, rows=rows)
    return PendingItem(PreparedMedia(item, np.zeros((parts, grid[0] * grid[1], 3), np.uint8), grid), row_bytes=1)


def test_parts_of_one_grid_are_taken_together() -> None:
    first, other, second = pending(1), pending(1, LARGE), pending(1)
    assert [part.item for part in take_batch([first, other, second], 100)] == [first, second]
    assert [part.item for part in take_batch([first, other, second], 100)] == [other]
    assert take_batch([first, other, second], 100) == []


def test_items_take_turns() -> None:
    video, image = pending(10), pending(1)
    batch = take_batch([video, image], 16)
    assert [(part.item, part.number) for part in batch] == [(video, 0), (image, 0), (video, 1), (video, 2)]


def test_a_part_above_the_budget_is_taken_alone() -> None:
    items = [pending(1, LARGE), pending(1, LARGE)]
    assert [part.item for part in take_batch(items, 5)] == items[:1]


@given(
    st.lists(st.tuples(st.integers(1, 9), st.sampled_from([SMALL, LARGE])), min_size=1, max_size=8), st.integers(1, 64)
)
def test_every_part_is_taken_once_and_put_in_its_place(kinds: list[tuple[int, tuple[int, int]]], budget: int) -> None:
    items = [pending(parts, grid) for parts, grid in kinds]
    ended: list[PendingItem] = []
    while batch := take_batch(items, budget):
        assert all(a.item.prepared.grid == b.item.prepared.grid for a, b in pairwise(batch))
        size = batch[0].patches.shape[0]
        assert len(batch) == 1 or len(batch) * size <= budget
        for part in batch:
            if part.item.put(part.number, np.full(size, part.number, np.uint8)):
                ended.append(part.item)
    assert sorted(map(id, ended)) == sorted(map(id, items))
    for item in items:
        parts = item.data.reshape(len(item.prepared.patches), -1)
        assert all((part == number).all() for number, part in enumerate(parts))
