"""Draws tokens at random, with temperature, top_k, top_p and min_p.

Tokens of equal logits are kept or dropped together, so no result depends on how a device breaks ties.
"""

import hashlib
import math
import struct
from typing import NamedTuple

import torch
from torch import Tensor

from baton.engines.torch.sampling.vocabulary import block_size, blocked, row_indices, to_device, top_tokens
from baton.engines.torch.sampling_params import SamplingParams

_FIRST_CANDIDATES = 64
_SEARCHED = 512  # candidates of rows that are drawn without waiting
_TIES = 8


def uniform(seed: int, index: int, position: int) -> float:
    """Return the random number in (0, 1) for token `position` of choice `index`, the same on every machine."""
    digest = hashlib.blake2b(struct.pack("<qQQ", seed, index, position), digest_size=8).digest()
    return ((int.from_bytes(digest, "little") >> 11) + 0.5) * 2.0**-53


class _Rows(NamedTuple):
    """Rows to draw from: logits [rows, vocab]; highest logit, temperature and random number [rows, 1]."""

    logits: Tensor
    peaks: Tensor
    temperature: Tensor
    uniform: Tensor

    def select(self, rows: list[int]) -> "_Rows":
        """Return these rows, without a copy if they are all."""
        if len(rows) == len(self.logits):
            return self
        indices = row_indices(rows, self.logits)
        return _Rows(*(value.index_select(0, indices) for value in self))


def draw_tokens(logits: Tensor, peaks: Tensor, params: list[SamplingParams], numbers: list[float]) -> list[int]:
    """Draw a token for each row by inverting its cumulative probabilities, in the order of token ids.

    `numbers` are random numbers in (0, 1), one for each row, and `peaks` the highest logits.
    """
    every = _rows_to_draw(logits, peaks, params, numbers)
    filtered = [row for row, one in enumerate(params) if one.filters_tokens]
    unfiltered = [row for row, one in enumerate(params) if not one.filters_tokens]
    tokens = [0] * len(params)
    for rows, draw in ((unfiltered, _draw_unfiltered), (filtered, _draw_filtered)):
        if rows:
            for row, token in zip(rows, draw(every.select(rows), [params[row] for row in rows]), strict=True):
                tokens[row] = token
    return tokens


def draw_on_device(
    logits: Tensor, peaks: Tensor, params: list[SamplingParams], numbers: list[float]
) -> tuple[Tensor, Tensor]:
    """Draw as `draw_tokens` does, without waiting for the device; return the tokens, and which of them are right.

    A row is not right where top_p leaves more tokens than are searched.
    """
    every = _rows_to_draw(logits, peaks, params, numbers)
    tokens = torch.zeros(len(params), dtype=torch.int64, device=logits.device)
    right = torch.ones(len(params), dtype=torch.bool, device=logits.device)
    filtered = [row for row, one in enumerate(params) if one.filters_tokens]
    unfiltered = [row for row, one in enumerate(params) if not one.filters_tokens]
    if unfiltered:
        found = _unfiltered_tokens(every.select(unfiltered), [params[row] for row in unfiltered])
        tokens.index_copy_(0, row_indices(unfiltered, logits), found)
    if filtered:
        rows, chosen = every.select(filtered), [params[row] for row in filtered]
        size = max(_SEARCHED, max(one.top_k for one in chosen) + _TIES)
        found, covered = _filtered_tokens(rows, chosen, _total_weights(rows, chosen), min(size, logits.shape[1]))
        tokens.index_copy_(0, row_indices(filtered, logits), found)
        right.index_copy_(0, row_indices(filtered, logits), covered)
    return tokens, right


def _rows_to_draw(logits: Tensor, peaks: Tensor, params: list[SamplingParams], numbers: list[float]) -> _Rows:
    temperatures = [one.temperature for one in params]
    return _Rows(
        logits,
        peaks.unsqueeze(1),
        to_device(temperatures, logits.dtype, logits).unsqueeze(1),
        to_device(numbers, torch.float64, logits).unsqueeze(1),
    )


def _draw_unfiltered(rows: _Rows, params: list[SamplingParams]) -> list[int]:
    tokens: list[int] = _unfiltered_tokens(rows, params).tolist()
    return tokens


def _unfiltered_tokens(rows: _Rows, params: list[SamplingParams]) -> Tensor:
    """Draw from the whole vocabulary: first the block, by the sums of the blocks, then the token in it."""
    weights = _weights(rows.logits, rows.peaks, rows.temperature)
    if any(one.min_p for one in params):
        minimum = to_device([one.min_p for one in params], weights.dtype, weights)
        weights.masked_fill_(weights < minimum.unsqueeze(1), 0.0)
    size = block_size(weights)
    blocks = blocked(weights, size, 0.0)
    block, below = _invert(blocks.sum(2).double(), rows.uniform)
    cells = blocks[torch.arange(len(blocks), device=blocks.device), block.squeeze(1)]
    inner, _ = _invert(cells.double(), below, absolute=True)
    return (block * size + inner).squeeze(1)


def _draw_filtered(rows: _Rows, params: list[SamplingParams]) -> list[int]:
    """Draw from the tokens that top_k and top_p leave. Tries the few best candidates first, and more where needed."""
    vocab = rows.logits.shape[1]
    mass = _total_weights(rows, params)
    tokens = [0] * len(params)
    left = list(range(len(params)))
    size = max(_FIRST_CANDIDATES, max(one.top_k for one in params) + _TIES)
    while left:
        size = size if size * 4 < vocab else vocab
        found, covered = _filtered_tokens(rows.select(left), [params[row] for row in left], mass[left], size)
        for row, token in zip(left, found.tolist(), strict=True):
            tokens[row] = token
        if size == vocab:
            break
        left = [row for row, enough in zip(left, covered.tolist(), strict=True) if not enough]
        size *= 8
    return tokens


def _filtered_tokens(rows: _Rows, params: list[SamplingParams], mass: Tensor, size: int) -> tuple[Tensor, Tensor]:
    """Draw from the `size` best candidates; return the tokens, and whether those are all that may be drawn."""
    values, ids = top_tokens(rows.logits, size)
    weights = _weights(values, rows.peaks, rows.temperature).double()
    allowed, covered = _nucleus(values, weights, mass, params)
    if size == rows.logits.shape[1]:
        covered = torch.ones_like(covered)
    ids, order = ids.sort(1)
    index, _ = _invert((weights * allowed).gather(1, order), rows.uniform)
    return ids.gather(1, index).squeeze(1), covered


def _total_weights(rows: _Rows, params: list[SamplingParams]) -> Tensor:
    """Return the sum of the weights of each row, as far as top_p needs it: rows with top_k sum their candidates."""
    if all(one.top_k for one in params):
        return torch.ones_like(rows.uniform)
    weights = _weights(rows.logits, rows.peaks, rows.temperature)
    return blocked(weights, block_size(weights), 0.0).sum(2).double().sum(1, keepdim=True)


def _nucleus(values: Tensor, weights: Tensor, mass: Tensor, params: list[SamplingParams]) -> tuple[Tensor, Tensor]:
    """Return which candidates may be drawn, and for each row whether every token that may be drawn is among them.

    `values` fall along a row, `weights` are their probabilities times a constant, `mass` is the sum over the whole
    vocabulary for rows without top_k. Each rule becomes a minimum value, so equal values are treated alike.
    """
    size = values.shape[1]
    top_k = to_device([one.top_k for one in params], torch.int64, values).unsqueeze(1)
    top_p = to_device([one.top_p for one in params], torch.float64, values).unsqueeze(1)
    min_p = to_device([one.min_p for one in params], torch.float64, values).unsqueeze(1)
    kth = values.gather(1, (top_k - 1).clamp(0, size - 1))
    minimum = torch.where(top_k > 0, kth, -math.inf)
    cumulated = (weights * (values >= minimum)).cumsum(1)
    total = torch.where(top_k > 0, cumulated[:, -1:], mass)
    crossing = (cumulated < top_p * total).sum(1, keepdim=True)
    pth = values.gather(1, crossing.clamp(max=size - 1))
    minimum = torch.where(top_p < 1.0, torch.maximum(minimum, pth), minimum)
    last = values[:, -1:]
    # Tokens past the last candidate are smaller, or equal and then perhaps allowed as well.
    covered = ((crossing < size) & (last < minimum)) | (last == -math.inf)
    return (values >= minimum) & (weights >= min_p), covered.squeeze(1)


def _weights(logits: Tensor, peaks: Tensor, temperature: Tensor) -> Tensor:
    """Return probabilities times a constant: 1 for the best token. Subtracting the peak first avoids overflow."""
    return (logits - peaks).div_(temperature).exp_()


def _invert(weights: Tensor, uniform: Tensor, absolute: bool = False) -> tuple[Tensor, Tensor]:
    """Return the first index at which the cumulative weights of a row pass `uniform`, and by how much before it.

    `uniform` is a share of the row's sum, or with `absolute` a weight. The weight at the index is above 0. A row with a
    NaN has no such index: the result is the last one, because an index outside a tensor is a fatal error on a GPU.
    """
    edges = weights.cumsum(1)
    total = edges[:, -1:]
    target = uniform if absolute else uniform * total
    # Rounding may move the target to the total or past it, where there is no index.
    target = torch.minimum(target, torch.nextafter(total, torch.zeros_like(total)))
    index = torch.searchsorted(edges, target, right=True).clamp_(max=edges.shape[1] - 1)
    before = torch.where(index > 0, edges.gather(1, (index - 1).clamp(min=0)), 0.0)
    return index, target - before
