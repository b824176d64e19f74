"""The block tables of sequences in device memory. Only what has changed since the last step is copied there."""

from collections import OrderedDict
from collections.abc import Iterable

import numpy as np
import torch
from torch import Tensor

from baton.engines.torch.gpu.transfers import to_device
from baton.engines.torch.sequence import Phase, Sequence


class _Row:
    """A row of the tables: the list of blocks that it has, as far as `count`."""

    __slots__ = ("blocks", "count", "number")

    def __init__(self, number: int) -> None:
        self.number = number
        self.blocks: list[int] = []
        self.count = 0


class BlockTables:
    """`tensor` is int32 [rows, blocks]. The row `spare_row` has the spare block only, for padding.

    A sequence keeps its row while it is used; the row of the one that was used longest ago is reused first. Sequences
    that have ended, with the rows of their media, are dropped when another comes. A list of blocks may grow in place,
    and is another list when its blocks change.
    """

    def __init__(self, sequences: int, blocks: int, spare_block: int, device: torch.device) -> None:
        """Make tables of so many `blocks` for batches of at most so many `sequences`."""
        # Twice as many rows, so that sequences that have ended make room, and not those of the next batch.
        self.spare_row = 2 * sequences
        self.tensor = torch.full((self.spare_row + 1, blocks), spare_block, dtype=torch.int32, device=device)
        self._rows: OrderedDict[Sequence, _Row] = OrderedDict()
        self._unused = list(range(self.spare_row))
        self._places: list[np.ndarray[tuple[int], np.dtype[np.int32]]] = []
        self._blocks: list[int] = []

    def rows_of(self, sequences: Iterable[Sequence]) -> list[int]:
        """Return the row of each sequence; `flush` copies the blocks that are new in them."""
        rows = self._rows
        numbers = []
        for sequence in sequences:
            row = rows.get(sequence)
            if row is None:
                row = rows[sequence] = self._new_row()
            else:
                rows.move_to_end(sequence)
            blocks = sequence.blocks
            if row.blocks is not blocks or row.count != len(blocks):
                self._note(row, blocks)
            numbers.append(row.number)
        return numbers

    def flush(self) -> None:
        """Copy the blocks that have changed, in the order of the device's stream."""
        if self._blocks:
            places = np.concatenate(self._places)
            both = to_device(np.stack((places, np.array(self._blocks, dtype=np.int32))), self.tensor.device)
            self.tensor.view(-1).index_copy_(0, both[0].long(), both[1])
            self._places, self._blocks = [], []

    def _new_row(self) -> _Row:
        self._drop_ended()
        if not self._unused:
            self._drop_oldest()
        return _Row(self._unused.pop())

    def _drop_ended(self) -> None:
        """Drop the sequences that have ended and were used before all others: running ones are used in every step."""
        while self._rows and next(iter(self._rows)).phase is Phase.ENDED:
            self._drop_oldest()

    def _drop_oldest(self) -> None:
        _, row = self._rows.popitem(last=False)
        self._unused.append(row.number)

    def _note(self, row: _Row, blocks: list[int]) -> None:
        first = row.count if row.blocks is blocks else 0
        start = row.number * self.tensor.shape[1]
        self._places.append(np.arange(start + first, start + len(blocks), dtype=np.int32))
        self._blocks += blocks[first:]
        row.blocks, row.count = blocks, len(blocks)


def table_width(context: int, block: int) -> int:
    """Return how many blocks a sequence of `context` tokens has."""
    return -(-context // block)


def last_tokens(tables: BlockTables) -> Tensor:
    """Return a tensor for the newest token of the sequence in each row."""
    return torch.zeros(len(tables.tensor), dtype=torch.int32, device=tables.tensor.device)
