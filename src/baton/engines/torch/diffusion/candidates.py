"""Candidates for masked positions, and which of them a pass decides. Rows of one sequence never affect another's.

logits -> without the mask token -> min_tokens -> temperature, top_k, top_p, min_p -> candidate
                |
                +-> confidence and logprobs of the candidate
"""

import math
from collections.abc import Sequence as Rows
from typing import NamedTuple

import torch
from torch import Tensor

from baton.engines.torch.sampling.draws import draw_tokens, uniform
from baton.engines.torch.sampling.logprobs import token_logprobs
from baton.engines.torch.sampling.sampler import Sampled
from baton.engines.torch.sampling.vocabulary import find_peaks
from baton.engines.torch.sampling_params import SamplingParams
from baton.engines.torch.sequence import Sequence
from baton.errors import BatonError, EngineFailed
from baton.protocol.outputs import Logprobs

Decided = dict[int, Sampled]
"""The tokens of positions that a pass has decided."""

# Passes of one block; the random number of a candidate depends on its position and on the pass.
_MAX_PASSES = 1 << 20


class _Row(NamedTuple):
    """One masked position: `number` counts the tokens that are generated before it."""

    sequence: Sequence
    position: int
    number: int

    @property
    def params(self) -> SamplingParams:
        return self.sequence.params

    @property
    def forbidden(self) -> frozenset[int]:
        """The tokens that would end the output here too early."""
        params = self.sequence.params
        return params.eos_token_ids | params.stop_token_ids if self.number < params.min_tokens else frozenset()


def decide(logits: Tensor, sequences: Rows[Sequence], mask_token: int) -> list[Decided | BatonError]:
    """Return what a pass decides of each sequence, or its error.

    `logits` are float32, for each sequence one row for each of its masked positions; those of the mask token are
    overwritten: it is never a candidate.
    """
    rows = [
        _Row(sequence, position, position - sequence.prompt_length)
        for sequence in sequences
        for position in _canvas_rows(sequence)
    ]
    logits[:, mask_token] = -math.inf
    peaks, best = find_peaks(logits)
    tokens, usable = _choose(logits, peaks, best, rows)
    confidences = [math.exp(score) for score, _ in token_logprobs(logits, peaks, tokens, 0)]
    results: list[Decided | BatonError] = []
    first = 0
    for sequence in sequences:
        stop = first + len(_canvas_rows(sequence))
        if all(usable[first:stop]):
            part = slice(first, stop)
            results.append(_decide_one(sequence, tokens[part], confidences[part], logits[part], peaks[part]))
        else:
            results.append(EngineFailed("the model gave no usable logits for this block"))
        first = stop
    return results


def _canvas_rows(sequence: Sequence) -> list[int]:
    assert sequence.canvas is not None
    return sequence.canvas.masked


def _decide_one(
    sequence: Sequence, tokens: list[int], confidences: list[float], logits: Tensor, peaks: Tensor
) -> Decided:
    """Return the positions of one sequence that are decided, with their log-probabilities if those are asked for."""
    assert sequence.canvas is not None
    positions = sequence.canvas.masked
    selected = sequence.canvas.select(confidences)
    scores: list[Logprobs | None] = [None] * len(selected)
    if sequence.params.logprobs is not None:
        chosen = torch.tensor(selected, device=logits.device)
        part, part_peaks = logits.index_select(0, chosen), peaks.index_select(0, chosen)
        found = token_logprobs(part, part_peaks, [tokens[row] for row in selected], sequence.params.logprobs)
        scores = [Logprobs((score,), (best,)) for score, best in found]
    return {positions[row]: Sampled(tokens[row], score) for row, score in zip(selected, scores, strict=True)}


def _choose(logits: Tensor, peaks: Tensor, best: Tensor, rows: list[_Row]) -> tuple[list[int], list[bool]]:
    """Return the candidate of each row, and whether it has one."""
    if any(row.forbidden for row in rows):
        logits = _without_forbidden(logits, rows)
        peaks, best = find_peaks(logits)
    tokens: list[int] = best.tolist()
    usable = [math.isfinite(peak) for peak in peaks.tolist()]
    drawn = [number for number, row in enumerate(rows) if usable[number] and not row.params.greedy]
    if drawn:
        indices = torch.tensor(drawn, device=logits.device)
        part, part_peaks = logits.index_select(0, indices), peaks.index_select(0, indices)
        for number, token in zip(drawn, _draw(part, part_peaks, [rows[number] for number in drawn]), strict=True):
            tokens[number] = token
    return tokens, usable


def _without_forbidden(logits: Tensor, rows: list[_Row]) -> Tensor:
    """Return a copy of the logits in which no token ends the output too early."""
    logits = logits.clone()
    for number, row in enumerate(rows):
        if row.forbidden:
            logits[number, sorted(row.forbidden)] = -math.inf
    return logits


def _draw(logits: Tensor, peaks: Tensor, rows: list[_Row]) -> list[int]:
    return draw_tokens(logits, peaks, [row.params for row in rows], [_random(row) for row in rows])


def _random(row: _Row) -> float:
    """Return the random number for a position in a pass: the same in every batch and after a preemption."""
    sequence = row.sequence
    assert sequence.canvas is not None
    return uniform(sequence.params.seed, sequence.index, row.number * _MAX_PASSES + sequence.canvas.passes)
