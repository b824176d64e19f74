"""Block diffusion decoding in its plainest form: the whole text is computed again in every pass, without a cache."""

from typing import NamedTuple

import torch

from tools.smoldiff.directory import BLOCK_LENGTH, END, MASK, THRESHOLD
from tools.smoldiff.model import Smoldiff, block_causal


class Decoding(NamedTuple):
    """How blocks are decided: `per_pass` positions at least, and all those above the `threshold`, if there is one."""

    block_length: int = BLOCK_LENGTH
    threshold: float | None = THRESHOLD
    per_pass: int = 1


class Written(NamedTuple):
    """The tokens of an answer without the end token, whether there was one, and the forward passes that they took."""

    tokens: list[int]
    ended: bool
    passes: int


@torch.no_grad()
def decode(model: Smoldiff, prompts: list[list[int]], decoding: Decoding, most_tokens: int) -> list[Written]:
    """Answer all prompts at once, greedily. Rows do not see each other."""
    device = model.embed_tokens.weight.device
    size = decoding.block_length
    length = -(-(max(map(len, prompts)) + most_tokens) // size) * size
    ids = torch.full((len(prompts), length), MASK, device=device)
    for row, prompt in zip(ids, prompts, strict=True):
        row[: len(prompt)] = torch.tensor(prompt, device=device)
    starts = torch.tensor([len(prompt) for prompt in prompts], device=device)
    current = starts // size
    passes = torch.zeros_like(starts)
    places = torch.arange(length, device=device)
    mask = block_causal(length, size, device)
    while True:
        ended = ((ids == END) & (places >= starts[:, None]) & before_masks(ids)).any(1)
        active = (~ended & (current < length // size)).nonzero().squeeze(1)
        if not len(active):
            break
        stop = (int(current[active].max()) + 1) * size  # no position sees a later block
        now = ids[active, :stop]
        open_places = (places[:stop] // size == current[active, None]) & (now == MASK)
        probabilities = model.logits(model(now, places[:stop], mask[:stop, :stop])).float().softmax(-1)
        confidence, tokens = probabilities.max(-1)
        decided = choose(confidence.masked_fill(~open_places, -1.0), decoding) & open_places
        ids[active, :stop] = torch.where(decided, tokens, now)
        passes[active] += 1
        current[active] += (decided == open_places).all(1).long()
    rows = (_written(row, len(prompt), most_tokens) for row, prompt in zip(ids.tolist(), prompts, strict=True))
    return [Written(*row, count) for row, count in zip(rows, passes.tolist(), strict=True)]


def before_masks(ids: torch.Tensor) -> torch.Tensor:
    """Return which positions have no mask before them."""
    return ((ids == MASK).cumsum(1) == 0) & (ids != MASK)


def choose(confidence: torch.Tensor, decoding: Decoding) -> torch.Tensor:
    """Return the positions that a pass decides; those that are not open have a negative confidence."""
    most = confidence.topk(decoding.per_pass, 1).indices
    chosen = torch.zeros_like(confidence, dtype=torch.bool).scatter_(1, most, True)
    return chosen if decoding.threshold is None else chosen | (confidence > decoding.threshold)


def _written(row: list[int], start: int, most_tokens: int) -> tuple[list[int], bool]:
    tokens = row[start : start + most_tokens]
    return (tokens[: tokens.index(END)], True) if END in tokens else (tokens, False)
