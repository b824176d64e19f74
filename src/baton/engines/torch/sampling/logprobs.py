"""Log-probabilities of tokens, from the raw logits."""

import torch
from torch import Tensor

from baton.engines.torch.sampling.vocabulary import block_size, blocked, top_tokens
from baton.protocol.outputs import Logprobs, TopLogprob

MIN_LOGPROB = -9999.0  # stands for minus infinity, which JSON does not have
_SCORED_ROWS = 64


def prompt_logprobs(logits: Tensor, targets: list[int], top: int) -> Logprobs:
    """Return the log-probabilities of `targets`, each predicted by its row of `logits`, and `top` alternatives each."""
    chosen: list[float] = []
    tops: list[tuple[TopLogprob, ...]] = []
    for start in range(0, len(targets), _SCORED_ROWS):
        part = logits[start : start + _SCORED_ROWS]
        peaks = part.amax(1)
        for score, best in token_logprobs(part, peaks, targets[start : start + _SCORED_ROWS], top):
            chosen.append(score)
            tops.append(best)
    return Logprobs(tuple(chosen), tuple(tops))


def token_logprobs(
    logits: Tensor, peaks: Tensor, tokens: list[int], top: int
) -> list[tuple[float, tuple[TopLogprob, ...]]]:
    """Return for each row the log-probability of its token, and its `top` best tokens; ties by lower id."""
    peaks = peaks.unsqueeze(1)
    sums = blocked((logits - peaks).exp_(), block_size(logits), 0.0).sum(2).sum(1, keepdim=True)
    norms = peaks + sums.log_()
    chosen = logits.gather(1, torch.tensor(tokens, device=logits.device).unsqueeze(1)) - norms
    scores: list[float] = chosen.squeeze(1).tolist()
    if not top:
        return [(_finite(score), ()) for score in scores]
    size = min(top + 1, logits.shape[1])
    values, ids = top_tokens(logits, size)
    rows = zip((values - norms).tolist(), ids.tolist(), strict=True)
    tops = []
    for row, (row_values, row_ids) in enumerate(rows):
        if size > top and row_values[top - 1] == row_values[top]:
            # More tokens than fit have the last value: find all of them, to take those with the lowest ids.
            equal = (logits[row] >= values[row, top - 1]).nonzero().squeeze(1)
            row_values, row_ids = (logits[row, equal] - norms[row]).tolist(), equal.tolist()
        best = sorted(zip(row_values, row_ids, strict=True), key=lambda pair: (-pair[0], pair[1]))[:top]
        tops.append(tuple(TopLogprob(rank, token, _finite(value)) for rank, (value, token) in enumerate(best, 1)))
    return [(_finite(score), best) for score, best in zip(scores, tops, strict=True)]


def _finite(value: float) -> float:
    return value if value > MIN_LOGPROB else MIN_LOGPROB  # NaN is not above it either
