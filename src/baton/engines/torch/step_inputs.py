"""The input of a forward pass, from the chunks of a batch: tokens, positions, cache rows and rows of media."""

from collections.abc import Iterable
from itertools import chain, groupby

import torch
from torch import Tensor

from baton.engines.torch.embedded_rows import MediaRows
from baton.engines.torch.models.llama import Decodes, Span, Step
from baton.engines.torch.native.decoder import Rows
from baton.engines.torch.prompt_media import RotaryPositions, Triple
from baton.engines.torch.scheduler import Batch, Chunk


class StepInputs:
    """Makes the inputs of one model, whose KV blocks have `block` tokens."""

    def __init__(self, block: int, dtype: torch.dtype, device: torch.device) -> None:
        self._block = block
        self._device = device
        self._media_rows = MediaRows(dtype, device)

    def step(self, prefills: list[Chunk], decodes: list[Chunk]) -> Step:
        """Return the input of a forward pass in torch: one row for each token of the chunks, in this order."""
        tokens: list[int] = []
        slots: list[int] = []
        spans: list[Span] = []
        embedded: list[tuple[int, Tensor]] = []
        for chunk in prefills:
            stop = chunk.start + chunk.length
            places = self._slots(chunk.sequence.blocks, stop)
            unit = chunk.sequence.unit
            spans.append(Span(len(tokens), chunk.length, chunk.start, self._tensor(places), unit))
            embedded += [(len(tokens) + first, rows) for first, rows in self._media_rows.of(chunk)]
            tokens += chunk.sequence.inputs(chunk.start, stop)
            slots += places[chunk.start :]
        first = len(tokens)
        for chunk in decodes:
            stop = chunk.start + chunk.length
            tokens += chunk.sequence.inputs(chunk.start, stop)
            slots += self._slots(chunk.sequence.blocks, stop, chunk.start)
        return Step(
            self._tensor(tokens),
            self._tensor(rotary_positions([*prefills, *decodes])),
            self._tensor(slots),
            spans,
            self._decodes(first, decodes),
            embedded,
        )

    def rows(self, chunk: Chunk) -> Rows:
        """Return a chunk as the native step takes it."""
        sequence, start, stop = chunk.sequence, chunk.start, chunk.start + chunk.length
        embedded = self._media_rows.of(chunk) if sequence.media is not None else []
        positions = sequence.positions(start, stop)
        return Rows(sequence.inputs(start, stop), start, sequence.blocks, positions, embedded, sequence.unit)

    def _decodes(self, first: int, decodes: list[Chunk]) -> list[Decodes]:
        """Return the attention of rows that decode, for each length of blocks; they come in this order."""
        groups: list[Decodes] = []
        for unit, chunks in groupby(decodes, key=lambda chunk: chunk.sequence.unit):
            places = [
                self._slots(chunk.sequence.blocks, stop)
                for chunk in chunks
                for stop in range(chunk.start + unit, chunk.start + chunk.length + unit, unit)
            ]
            groups.append(self._decode_group(first, places, unit))
            first = groups[-1].rows.stop
        return groups

    def _decode_group(self, first: int, places: list[list[int]], unit: int) -> Decodes:
        longest = max(map(len, places))
        # Padding repeats a slot of the same sequence: a NaN elsewhere would spread even through the mask.
        padded = [row + row[:1] * (longest - len(row)) for row in places]
        lengths = self._tensor([len(row) for row in places])
        mask = torch.arange(longest, device=self._device) < lengths.unsqueeze(1)
        return Decodes(first, self._tensor(padded), mask[:, None, None, :], unit)

    def _slots(self, blocks: list[int], stop: int, start: int = 0) -> list[int]:
        """Return the cache rows of tokens [start, stop)."""
        size = self._block
        skipped = start // size
        slots = [slot for block in blocks[skipped:] for slot in range(block * size, block * size + size)]
        return slots[start - skipped * size : stop - skipped * size]

    def _tensor(self, values: list[int] | list[list[int]]) -> Tensor:
        return torch.tensor(values, dtype=torch.int64, device=self._device)


def rotary_positions(chunks: list[Chunk]) -> list[int] | list[list[int]]:
    """Return the rotary position of each row, or three lists of them: in time, height and width."""
    found = [chunk.sequence.positions(chunk.start, chunk.start + chunk.length) for chunk in chunks]
    rows = list(chain.from_iterable(map(_triples, chunks, found)))
    if all(isinstance(positions, int) for positions in found):
        return [row[0] for row in rows]
    return [list(direction) for direction in zip(*rows, strict=True)]


def _triples(chunk: Chunk, positions: RotaryPositions) -> Iterable[Triple]:
    if not isinstance(positions, int):
        return positions
    row = range(chunk.start + positions, chunk.start + positions + chunk.length)
    return zip(row, row, row, strict=True)


def rotary_shift(chunk: Chunk) -> int:
    """Return by how much the rotary position of a token that decodes, which is text, is larger than its index."""
    positions = chunk.sequence.positions(chunk.start, chunk.start + 1)
    return positions if isinstance(positions, int) else positions[0][0] - chunk.start


def rows_to_sample(batch: Batch) -> tuple[list[int], list[Chunk]]:
    """Return the rows of a step that give the logits of tokens, and the chunks of the sequences that get those."""
    rows: list[int] = []
    chunks: list[Chunk] = []
    first = 0
    for chunk in (*batch.prefills, *batch.decodes):
        if chunk.last:
            rows += [first + row for row in chunk.sequence.sampled_rows(chunk.start, chunk.length)]
            chunks.append(chunk)
        first += chunk.length
    return rows, chunks
