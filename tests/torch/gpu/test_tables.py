"""The block tables: each sequence has its own row with its blocks, and ended sequences are not kept."""

import gc
import weakref

import torch

from baton.engines.torch.gpu.tables import BlockTables
from baton.engines.torch.sampling_params import make_sampling_params
from baton.engines.torch.sequence import Phase, Sequence
from baton.models.defaults import SamplingDefaults
from baton.ports.engine import Work
from baton.protocol.ids import RequestId

SPARE = 99


class Observed(Sequence):
    """A sequence that can be referred to weakly."""


def sequence(number: int, blocks: list[int]) -> Observed:
    work = Work(request_id=RequestId(str(number)), token_ids=(1, 2), max_tokens=9)
    made = Observed(work, 0, make_sampling_params(work, SamplingDefaults(), 100), number)
    made.phase, made.blocks = Phase.RUNNING, blocks
    return made


def rows_of(tables: BlockTables, sequences: list[Observed]) -> list[int]:
    """Return the rows of a batch, having checked that they have the blocks of its sequences."""
    rows = tables.rows_of(sequences)
    tables.flush()
    assert len(set(rows)) == len(rows)
    assert tables.spare_row not in rows
    for row, one in zip(rows, sequences, strict=True):
        assert tables.tensor[row, : len(one.blocks)].tolist() == one.blocks
    assert tables.tensor[tables.spare_row].tolist() == [SPARE] * tables.tensor.shape[1]
    return rows


def test_sequences_that_have_ended_are_dropped_when_others_come() -> None:
    tables = BlockTables(2, 4, SPARE, torch.device("cpu"))
    ended = []
    for number in range(3):
        one = sequence(number, [number])
        rows_of(tables, [one])
        one.phase = Phase.ENDED
        ended.append(weakref.ref(one))
        del one
    rows_of(tables, [sequence(9, [9])])
    gc.collect()
    assert [one() for one in ended] == [None] * 3


def test_a_sequence_whose_row_was_reused_gets_another() -> None:
    tables = BlockTables(2, 4, SPARE, torch.device("cpu"))
    first = sequence(0, [1, 2])
    row = rows_of(tables, [first])
    assert rows_of(tables, [first]) == row
    waiting = [sequence(number, [number, 10 + number]) for number in range(1, 5)]  # preempted, so they keep their rows
    for one in waiting:
        rows_of(tables, [one])
    first.blocks.append(3)
    rows_of(tables, [first, waiting[3]])
    rows_of(tables, [waiting[0], first])
