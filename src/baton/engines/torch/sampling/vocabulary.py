"""Looks through logits of a whole vocabulary. It is sorted only where that is needed.

Rows are cut into blocks, and the maxima or sums of the blocks show where the result is.
"""

import math

import torch
from torch import Tensor

_BLOCKS = (256, 128, 64)
_TOP_BLOCK = 64


def find_peaks(logits: Tensor) -> tuple[Tensor, Tensor]:
    """Return the highest logit of each row and the lowest id that has it; a row with a NaN has NaN."""
    size = block_size(logits)
    blocks = blocked(logits, size, -math.inf)
    peaks, block = blocks.amax(2).max(1)
    inner = blocks[torch.arange(len(blocks), device=blocks.device), block].argmax(1)
    return peaks, block * size + inner


def top_tokens(logits: Tensor, size: int) -> tuple[Tensor, Tensor]:
    """Return the `size` highest logits of each row, falling, and their ids.

    They are in the blocks with the `size` highest maxima, so only those are searched if they are few.
    """
    rows, vocab = logits.shape
    if size * _TOP_BLOCK * 2 > vocab:
        if size < vocab:
            values, ids = logits.topk(size)
            return values, ids
        values, ids = logits.sort(1, descending=True)
        return values, ids
    blocks = blocked(logits, _TOP_BLOCK, -math.inf)
    places = blocks.amax(2).topk(size, sorted=False).indices
    cells = blocks.gather(1, places.unsqueeze(2).expand(-1, -1, _TOP_BLOCK)).view(rows, -1)
    values, inner = cells.topk(size)
    return values, places.gather(1, inner // _TOP_BLOCK) * _TOP_BLOCK + inner % _TOP_BLOCK


def block_size(values: Tensor) -> int:
    """Return how many tokens a block has; if possible so many that no block has to be padded, which is a copy."""
    return next((size for size in _BLOCKS if values.shape[1] % size == 0), _BLOCKS[0])


def blocked(values: Tensor, size: int, padding: float) -> Tensor:
    """Return `values` [rows, vocab] as [rows, blocks, size], padded at the end where they do not fit."""
    rest = -values.shape[1] % size
    if rest:
        values = torch.nn.functional.pad(values, (0, rest), value=padding)
    return values.reshape(values.shape[0], -1, size)


def row_indices(rows: list[int], like: Tensor) -> Tensor:
    return to_device(rows, torch.int64, like)


def to_device(values: list[int] | list[float], dtype: torch.dtype, like: Tensor) -> Tensor:
    """Return the values on the device of `like`; the host does not wait for the copy."""
    host = torch.tensor(values, dtype=dtype)
    return host.pin_memory().to(like.device, non_blocking=True) if like.device.type == "cuda" else host
