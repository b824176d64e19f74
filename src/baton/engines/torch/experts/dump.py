"""Writes records of experts in the format of SGLang's recorder, which has a row for every layer of the model."""

import time
from collections.abc import Iterable
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from baton.engines.torch.experts.recorder import PassRows, Recorded, RecordedPass, Records
from baton.experts.files import COUNTS_KEY, RECORDS_KEY, Content, write_atomically
from baton.experts.placement import Layout

RANK = 0  # one process records all ranks
_TOPK_COLUMNS = 8  # at least; unused ones are -1, as in rows of layers without experts
_EXTEND, _DECODE, _MIXED = 1, 2, 3  # SGLang's numbers of forward modes


class ModelLayers:
    """Which layers of a model have experts."""

    def __init__(self, count: int, sparse: Iterable[int]) -> None:
        self.count = count
        self.sparse = list(sparse)

    def spread(self, rows: Recorded, fill: int) -> Recorded:
        """Return an array with a row per layer of the model from one with a row per sparse layer, on the axis -2.

        Rows of other layers are `fill`.
        """
        shape = (*rows.shape[:-2], self.count, rows.shape[-1])
        spread = np.full(shape, fill, dtype=np.int32)
        spread[..., self.sparse, :] = rows
        return spread


def write_records(records: Records, layers: ModelLayers, directory: Path) -> Path:
    """Write the records to a new file in `directory` and return its path. Raises OSError."""
    counts = records.mode in ("stat", "stat_approx")
    content = _counts(records, layers) if counts else _details(records, layers)
    directory.mkdir(parents=True, exist_ok=True)
    stem = f"expert_distribution_recorder_{time.time()}"
    path = directory / (f"{stem}.pt" if counts else f"{stem}_{RANK}.pt")
    write_atomically(path, lambda file: torch.save(content, file))
    return path


def _counts(records: Records, layers: ModelLayers) -> Content:
    counts = layers.spread(np.stack([recorded.counts for recorded in records.passes]), 0)
    shares = [recorded.balancedness for recorded in records.passes]
    return {
        "rank": RANK,
        COUNTS_KEY: torch.from_numpy(counts),
        "average_utilization_rate_over_window": sum(shares) / len(shares),
    }


def _details(records: Records, layers: ModelLayers) -> Content:
    return {
        RECORDS_KEY: [_detail(recorded, layers) for recorded in records.passes],
        "last_physical_to_logical_map": _map(layers, records.layout),
    }


def _detail(recorded: RecordedPass, layers: ModelLayers) -> Content:
    detail: Content = {
        "forward_pass_id": recorded.number,
        "rank": RANK,
        "gatherer_key": "primary",
        "global_physical_count": torch.from_numpy(layers.spread(recorded.counts, 0)),
    }
    if recorded.chosen is None or recorded.rows is None:
        return detail
    return {
        **detail,
        **_rows(recorded.rows),
        "topk_ids_of_layer": _choices(recorded.chosen, layers),
        "misc_objects": [],
    }


def _rows(rows: PassRows) -> Content:
    extends = rows.prompts > 0
    mixed = extends and rows.prompts < len(rows.extend_lengths)
    return {
        "input_ids": rows.tokens,
        "positions": rows.positions,
        "extend_seq_lens": rows.extend_lengths if extends else None,
        "forward_mode": _MIXED if mixed else _EXTEND if extends else _DECODE,
    }


def _choices(chosen: Recorded, layers: ModelLayers) -> Tensor:
    """Return the slots that each row has chosen: layers of the model x rows x columns."""
    _, rows, choices = chosen.shape
    ids = np.full((layers.count, rows, max(_TOPK_COLUMNS, choices)), -1, dtype=np.int32)
    ids[layers.sparse, :, :choices] = chosen
    return torch.from_numpy(ids)


def _map(layers: ModelLayers, layout: Layout) -> Tensor:
    """Return the logical expert of each slot; a layer without experts has the trivial row."""
    rows = torch.arange(len(layout[0])).remainder(max(layout[0]) + 1).repeat(layers.count, 1)
    rows[layers.sparse] = torch.tensor(layout)
    return rows
