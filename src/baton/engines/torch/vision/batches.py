"""Chooses which parts of which items are encoded together. Pure.

Parts of the same grid are encoded together, whatever request they are of. Items take turns, one part each, so that a
long video does not delay an image; those that were in a batch go behind those that were not.
"""

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np

from baton.engines.torch.vision.pixels import Pixels, PreparedMedia


class PendingItem:
    """One item inside the encoder: its parts, and the rows computed so far."""

    __slots__ = ("_done", "_part_bytes", "data", "prepared", "taken")

    def __init__(self, prepared: PreparedMedia, row_bytes: int) -> None:
        self.prepared = prepared
        self.taken = 0
        self._done = 0
        self.data: Pixels = np.empty(prepared.item.rows * row_bytes, dtype=np.uint8)
        self._part_bytes = len(self.data) // len(prepared.patches)

    @property
    def untaken(self) -> int:
        """How many parts have been in no batch."""
        return len(self.prepared.patches) - self.taken

    def put(self, part: int, rows: Pixels) -> bool:
        """Store the bytes of the rows of one part; return whether it was the last one missing."""
        self.data[part * self._part_bytes : (part + 1) * self._part_bytes] = rows
        self._done += 1
        return self._done == len(self.prepared.patches)


class Part(NamedTuple):
    """One part of one item."""

    item: PendingItem
    number: int

    @property
    def patches(self) -> Pixels:
        """The patches to encode."""
        patches: Pixels = self.item.prepared.patches[self.number]
        return patches


def take_batch(items: Iterable[PendingItem], budget: int) -> list[Part]:
    """Take parts of the grid of the first of `items` that has some left, up to `budget` patches; at least one."""
    waiting = [item for item in items if item.untaken]
    if not waiting:
        return []
    first = waiting[0].prepared
    same = [item for item in waiting if item.prepared.grid == first.grid]
    room = max(1, budget // first.patches.shape[1])
    batch: list[Part] = []
    while same and len(batch) < room:
        batch += _take_one_each(same[: room - len(batch)])
        same = [item for item in same if item.untaken]
    return batch


def _take_one_each(items: Sequence[PendingItem]) -> list[Part]:
    parts = []
    for item in items:
        parts.append(Part(item, item.taken))
        item.taken += 1
    return parts
