"""Samples tokens from logits. A row's token depends on that row and its sequence only, never on the rest of the batch.

raw logits -> bias -> penalties -> bad words -> grammar -> min_tokens -> temperature -> top_k, top_p, min_p -> token
    |
    +-> logprobs
"""

import math
from collections.abc import Sequence as Rows
from typing import NamedTuple

from torch import Tensor

from baton.engines.torch.sampling.draws import draw_tokens, uniform
from baton.engines.torch.sampling.logit_edits import edit_logits, is_edited
from baton.engines.torch.sampling.logprobs import token_logprobs
from baton.engines.torch.sampling.vocabulary import find_peaks, row_indices
from baton.engines.torch.sequence import Sequence
from baton.errors import BatonError, EngineFailed
from baton.protocol.outputs import Logprobs


class Sampled(NamedTuple):
    """A token, and its log-probability if the request wants it."""

    token: int
    logprobs: Logprobs | None


def sample(logits: Tensor, sequences: Rows[Sequence]) -> list[Sampled | BatonError]:
    """Return the next token of each sequence, or its error; `logits` are float32, one row for each sequence.

    `logits` are not changed. Guides have accepted their token on return; the tokens of the sequences are not changed.
    """
    if not sequences:
        return []
    peaks, best = find_peaks(logits)
    results = _argmax_results(peaks, best)
    rows = [
        row
        for row, (sequence, result) in enumerate(zip(sequences, results, strict=True))
        if isinstance(result, Sampled) and not _takes_argmax(sequence)
    ]
    if rows:
        for row, choice in zip(rows, _choose(logits, peaks, rows, sequences), strict=True):
            results[row] = Sampled(choice, None) if isinstance(choice, int) else choice
    _score(logits, peaks, sequences, results)
    _advance_guides(sequences, results)
    return results


def samples_on_device(sequence: Sequence) -> bool:
    """Whether the next tokens of a sequence depend on logits and random numbers only, now and later."""
    return sequence.params.logprobs is None and not is_edited(sequence)


def _takes_argmax(sequence: Sequence) -> bool:
    """Whether the argmax of the raw logits is the next token."""
    return sequence.params.greedy and not is_edited(sequence)


def _argmax_results(peaks: Tensor, best: Tensor) -> list[Sampled | BatonError]:
    """Return the token with the highest raw logit of each row, or its error."""
    return [
        Sampled(token, None) if math.isfinite(peak) else EngineFailed("the model gave no usable logits for this token")
        for peak, token in zip(peaks.tolist(), best.tolist(), strict=True)
    ]


def _choose(logits: Tensor, peaks: Tensor, rows: list[int], sequences: Rows[Sequence]) -> list[int | BatonError]:
    """Return the tokens of `rows`, which need more than the argmax of the raw logits."""
    chosen = [sequences[row] for row in rows]
    every_row = len(rows) == len(sequences)
    indices = row_indices(rows, logits)
    selected = logits if every_row else logits.index_select(0, indices)
    if any(map(is_edited, chosen)):
        selected = selected.clone() if every_row else selected
        errors = edit_logits(selected, chosen)
        peaks, best = find_peaks(selected)
        choices: list[int | BatonError] = _edited_results(peaks, best, errors)
    else:
        peaks = peaks.index_select(0, indices)
        choices = [0] * len(chosen)
    _draw_random(selected, peaks, chosen, choices)
    return choices


def _edited_results(peaks: Tensor, best: Tensor, errors: dict[int, BatonError]) -> list[int | BatonError]:
    """Return the argmax of each row of edited logits, or its error."""
    for row, peak in enumerate(peaks.tolist()):
        if not math.isfinite(peak):
            errors.setdefault(row, EngineFailed("no token is left after bias, penalties and grammar"))
    return [errors.get(row, token) for row, token in enumerate(best.tolist())]


def _draw_random(logits: Tensor, peaks: Tensor, sequences: list[Sequence], choices: list[int | BatonError]) -> None:
    """Replace the choices of sequences that are not greedy and have no error by random tokens."""
    rows = [
        row
        for row, (sequence, choice) in enumerate(zip(sequences, choices, strict=True))
        if isinstance(choice, int) and not sequence.params.greedy
    ]
    if not rows:
        return
    if len(rows) < len(sequences):
        indices = row_indices(rows, logits)
        logits, peaks = logits.index_select(0, indices), peaks.index_select(0, indices)
    chosen = [sequences[row] for row in rows]
    params = [sequence.params for sequence in chosen]
    numbers = [uniform(sequence.params.seed, sequence.index, sequence.generated) for sequence in chosen]
    for row, token in zip(rows, draw_tokens(logits, peaks, params, numbers), strict=True):
        choices[row] = token


def _score(logits: Tensor, peaks: Tensor, sequences: Rows[Sequence], results: list[Sampled | BatonError]) -> None:
    """Add the log-probabilities of the raw logits to the results whose requests want them."""
    groups: dict[int, list[int]] = {}
    for row, (sequence, result) in enumerate(zip(sequences, results, strict=True)):
        if sequence.params.logprobs is not None and isinstance(result, Sampled):
            groups.setdefault(sequence.params.logprobs, []).append(row)
    for top, rows in groups.items():
        tokens = [result.token for row in rows if isinstance(result := results[row], Sampled)]
        part, part_peaks = logits, peaks
        if len(rows) < len(sequences):
            indices = row_indices(rows, logits)
            part, part_peaks = logits.index_select(0, indices), peaks.index_select(0, indices)
        for row, token, (score, best) in zip(rows, tokens, token_logprobs(part, part_peaks, tokens, top), strict=True):
            results[row] = Sampled(token, Logprobs((score,), (best,)))


def _advance_guides(sequences: Rows[Sequence], results: list[Sampled | BatonError]) -> None:
    for row, sequence in enumerate(sequences):
        result = results[row]
        if sequence.guide is not None and isinstance(result, Sampled):
            try:
                sequence.guide.accept(result.token)
            except BatonError as error:
                results[row] = error
