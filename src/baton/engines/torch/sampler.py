"""Samples tokens from logits. A row's token depends on that row and its sequence only, never on the rest of the batch.

    raw logits -> bias -> penalties -> bad words -> grammar -> min_tokens -> temperature -> top_k, top_p, min_p -> token
        |
        +-> logprobs

The vocabulary is sorted only where that is needed: rows are cut into blocks, and the maxima or sums of the blocks show
where the result is. Tokens of equal logits are kept or dropped together, so no result depends on how a device breaks
ties.
"""

import hashlib
import math
import struct
from array import array
from collections.abc import Sequence as Rows
from typing import NamedTuple

import torch
from torch import Tensor

from baton.engines.torch.sampling_params import Guide, SamplingParams
from baton.engines.torch.sequence import Sequence
from baton.errors import BatonError, EngineFailed
from baton.protocol.outputs import Logprobs, TopLogprob

MIN_LOGPROB = -9999.0  # stands for minus infinity, which JSON does not have
_BLOCK = 256
_TOP_BLOCK = 64
_FIRST_CANDIDATES = 64
_TIES = 8
_SCORED_ROWS = 64
# For each byte of a mask, eight booleans in one word: whether its bits, lowest first, are off.
_FORBIDDEN = torch.tensor([[not byte >> bit & 1 for bit in range(8)] for byte in range(256)]).view(torch.int64).view(-1)


class Sampled(NamedTuple):
    """A token, and its log-probability if the request wants it."""

    token: int
    logprobs: Logprobs | None


class SamplingState:
    """Token counts of a sequence between steps; kept in `Sequence.sampling_state`.

    slots   token -> position in the two arrays
    ids     [ tokens seen, each once ]
    counts  [ how often each was generated; 0 for those of the prompt only ]
    """

    __slots__ = ("counts", "ids", "read", "slots")

    def __init__(self, sequence: Sequence) -> None:
        self.slots: dict[int, int] = {}
        self.ids = array("q")
        self.counts = array("f")
        self.read = 0 if sequence.params.repetition_penalty != 1.0 else sequence.prompt_length

    def seen(self, sequence: Sequence, device: torch.device) -> tuple[Tensor, Tensor]:
        """Return the tokens so far, each once, and how often each was generated."""
        for position in range(self.read, len(sequence.tokens)):
            token = sequence.tokens[position]
            slot = self.slots.setdefault(token, len(self.ids))
            if slot == len(self.ids):
                self.ids.append(token)
                self.counts.append(0.0)
            if position >= sequence.prompt_length:
                self.counts[slot] += 1.0
        self.read = len(sequence.tokens)
        if not self.ids:
            return torch.empty(0, dtype=torch.int64, device=device), torch.empty(0, device=device)
        # A copy: an array that shares its memory with a tensor could not grow.
        ids = torch.frombuffer(bytearray(self.ids), dtype=torch.int64)
        return ids.to(device), torch.frombuffer(bytearray(self.counts), dtype=torch.float32).to(device)


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


def _argmax_results(peaks: Tensor, best: Tensor) -> list[Sampled | BatonError]:
    """Return the token with the highest raw logit of each row, or its error."""
    return [
        Sampled(token, None) if math.isfinite(peak) else EngineFailed("the model gave no usable logits for this token")
        for peak, token in zip(peaks.tolist(), best.tolist(), strict=True)
    ]


def _takes_argmax(sequence: Sequence) -> bool:
    """Whether the argmax of the raw logits is the next token."""
    return sequence.params.greedy and not _edited(sequence)


def _advance_guides(sequences: Rows[Sequence], results: list[Sampled | BatonError]) -> None:
    for row, sequence in enumerate(sequences):
        result = results[row]
        if sequence.guide is not None and isinstance(result, Sampled):
            try:
                sequence.guide.accept(result.token)
            except BatonError as error:
                results[row] = error


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


def uniform(seed: int, index: int, position: int) -> float:
    """Return the random number in (0, 1) for token `position` of choice `index`, the same on every machine."""
    digest = hashlib.blake2b(struct.pack("<qQQ", seed, index, position), digest_size=8).digest()
    return ((int.from_bytes(digest, "little") >> 11) + 0.5) * 2.0**-53


def _edited(sequence: Sequence) -> bool:
    return sequence.params.edits_logits or sequence.guide is not None or _below_min_tokens(sequence)


def _below_min_tokens(sequence: Sequence) -> bool:
    params = sequence.params
    return sequence.generated < params.min_tokens and bool(params.eos_token_ids or params.stop_token_ids)


def _choose(logits: Tensor, peaks: Tensor, rows: list[int], sequences: Rows[Sequence]) -> list[int | BatonError]:
    """Return the tokens of `rows`, which need more than the argmax of the raw logits."""
    chosen = [sequences[row] for row in rows]
    every_row = len(rows) == len(sequences)
    indices = _indices(rows, logits)
    selected = logits if every_row else logits.index_select(0, indices)
    if any(map(_edited, chosen)):
        selected = selected.clone() if every_row else selected
        errors = _edit(selected, chosen)
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
        indices = _indices(rows, logits)
        logits, peaks = logits.index_select(0, indices), peaks.index_select(0, indices)
    chosen = [sequences[row] for row in rows]
    params = [sequence.params for sequence in chosen]
    numbers = [uniform(sequence.params.seed, sequence.index, sequence.generated) for sequence in chosen]
    for row, token in zip(rows, draw_tokens(logits, peaks, params, numbers), strict=True):
        choices[row] = token


def _indices(rows: list[int], like: Tensor) -> Tensor:
    return torch.tensor(rows, device=like.device)


def _edit(logits: Tensor, sequences: list[Sequence]) -> dict[int, BatonError]:
    """Apply all but temperature, top_k, top_p and min_p in place; return the errors of rows whose grammar failed."""
    errors: dict[int, BatonError] = {}
    masks: dict[int, bytes] = {}
    for row, sequence in enumerate(sequences):
        if sequence.params.logit_bias:
            _add_bias(logits[row], sequence.params)
        if sequence.params.has_penalties:
            _penalise(logits[row], sequence)
        if sequence.params.bad_words:
            _forbid_bad_words(logits[row], sequence)
        if sequence.guide is not None:
            try:
                masks[row] = sequence.guide.mask()
            except BatonError as error:
                errors[row] = error
    if masks:
        _apply_masks(logits, masks)
    for row, sequence in enumerate(sequences):
        if _below_min_tokens(sequence):
            _forbid_end_tokens(logits[row], sequence.params, sequence.guide)
    return errors


def _add_bias(row: Tensor, params: SamplingParams) -> None:
    ids = torch.tensor([token for token, _ in params.logit_bias], device=row.device)
    row.index_add_(0, ids, torch.tensor([value for _, value in params.logit_bias], dtype=row.dtype, device=row.device))


def _penalise(row: Tensor, sequence: Sequence) -> None:
    state, params = sequence.sampling_state, sequence.params
    if not isinstance(state, SamplingState):
        state = sequence.sampling_state = SamplingState(sequence)
    ids, counts = state.seen(sequence, row.device)
    values = row[ids]
    if params.repetition_penalty != 1.0:
        values = torch.where(values > 0, values / params.repetition_penalty, values * params.repetition_penalty)
    values = values - params.frequency_penalty * counts - params.presence_penalty * (counts > 0)
    row[ids] = values.clamp(max=torch.finfo(row.dtype).max)


def _forbid_bad_words(row: Tensor, sequence: Sequence) -> None:
    """Forbid the tokens that would complete a bad word of the output."""
    tokens, first = sequence.tokens, sequence.prompt_length
    last = [
        word[-1]
        for word in sequence.params.bad_words
        if len(tokens) - len(word) + 1 >= first and tokens[len(tokens) - len(word) + 1 :] == list(word[:-1])
    ]
    if last:
        row[torch.tensor(last, device=row.device)] = -math.inf


def _apply_masks(logits: Tensor, masks: dict[int, bytes]) -> None:
    """Forbid the tokens outside the grammars. Bit b of byte n stands for token 8 n + b."""
    vocab = logits.shape[1]
    packed = torch.frombuffer(bytearray(b"".join(masks.values())), dtype=torch.uint8)
    forbidden = _FORBIDDEN.index_select(0, packed.int()).view(torch.bool).view(len(masks), -1)
    for row, banned in zip(masks, forbidden.to(logits.device), strict=True):
        logits[row].masked_fill_(banned[:vocab], -math.inf)


def _forbid_end_tokens(row: Tensor, params: SamplingParams, guide: Guide | None) -> None:
    """Forbid the tokens that would end the output too early, unless the grammar allows no other."""
    ids = torch.tensor(sorted(params.eos_token_ids | params.stop_token_ids), device=row.device)
    before = row[ids]
    row[ids] = -math.inf
    if guide is not None and row.amax().item() == -math.inf:
        row[ids] = before


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
        indices = _indices(rows, self.logits)
        return _Rows(*(value.index_select(0, indices) for value in self))


def draw_tokens(logits: Tensor, peaks: Tensor, params: list[SamplingParams], numbers: list[float]) -> list[int]:
    """Draw a token for each row by inverting its cumulative probabilities, in the order of token ids.

    `numbers` are random numbers in (0, 1), one for each row, and `peaks` the highest logits.
    """
    temperatures = [one.temperature for one in params]
    every = _Rows(
        logits,
        peaks.unsqueeze(1),
        torch.tensor(temperatures, dtype=logits.dtype, device=logits.device).unsqueeze(1),
        torch.tensor(numbers, dtype=torch.float64, device=logits.device).unsqueeze(1),
    )
    filtered = [row for row, one in enumerate(params) if one.filters_tokens]
    unfiltered = [row for row, one in enumerate(params) if not one.filters_tokens]
    tokens = [0] * len(params)
    for rows, draw in ((unfiltered, _draw_unfiltered), (filtered, _draw_filtered)):
        if rows:
            for row, token in zip(rows, draw(every.select(rows), [params[row] for row in rows]), strict=True):
                tokens[row] = token
    return tokens


def _draw_unfiltered(rows: _Rows, params: list[SamplingParams]) -> list[int]:
    """Draw from the whole vocabulary: first the block, by the sums of the blocks, then the token in it."""
    weights = _weights(rows.logits, rows.peaks, rows.temperature)
    if any(one.min_p for one in params):
        minimum = torch.tensor([one.min_p for one in params], dtype=weights.dtype, device=weights.device)
        weights.masked_fill_(weights < minimum.unsqueeze(1), 0.0)
    blocks = _blocked(weights, _BLOCK, 0.0)
    block, below = _invert(blocks.sum(2).double(), rows.uniform)
    cells = blocks[torch.arange(len(blocks), device=blocks.device), block.squeeze(1)]
    inner, _ = _invert(cells.double(), below, absolute=True)
    tokens: list[int] = (block * _BLOCK + inner).squeeze(1).tolist()
    return tokens


def _draw_filtered(rows: _Rows, params: list[SamplingParams]) -> list[int]:
    """Draw from the tokens that top_k and top_p leave. Tries the few best candidates first, and more where needed."""
    vocab = rows.logits.shape[1]
    mass = _total_weights(rows, params)
    tokens = [0] * len(params)
    left = list(range(len(params)))
    size = max(_FIRST_CANDIDATES, max(one.top_k for one in params) + _TIES)
    while left:
        size = size if size * 4 < vocab else vocab
        part = rows.select(left)
        values, ids = _top_tokens(part.logits, size)
        weights = _weights(values, part.peaks, part.temperature).double()
        allowed, covered = _nucleus(values, weights, mass[left], [params[row] for row in left])
        ids, order = ids.sort(1)
        index, _ = _invert((weights * allowed).gather(1, order), part.uniform)
        for row, token in zip(left, ids.gather(1, index).squeeze(1).tolist(), strict=True):
            tokens[row] = token
        if size == vocab:
            break
        left = [row for row, enough in zip(left, covered.tolist(), strict=True) if not enough]
        size *= 8
    return tokens


def _total_weights(rows: _Rows, params: list[SamplingParams]) -> Tensor:
    """Return the sum of the weights of each row, as far as top_p needs it: rows with top_k sum their candidates."""
    if all(one.top_k for one in params):
        return torch.ones_like(rows.uniform)
    weights = _weights(rows.logits, rows.peaks, rows.temperature)
    return _blocked(weights, _BLOCK, 0.0).sum(2).double().sum(1, keepdim=True)


def _nucleus(values: Tensor, weights: Tensor, mass: Tensor, params: list[SamplingParams]) -> tuple[Tensor, Tensor]:
    """Return which candidates may be drawn, and for each row whether every token that may be drawn is among them.

    `values` fall along a row, `weights` are their probabilities times a constant, `mass` is the sum over the whole
    vocabulary for rows without top_k. Each rule becomes a minimum value, so equal values are treated alike.
    """
    device, size = values.device, values.shape[1]
    top_k = torch.tensor([one.top_k for one in params], device=device).unsqueeze(1)
    top_p = torch.tensor([one.top_p for one in params], dtype=torch.float64, device=device).unsqueeze(1)
    min_p = torch.tensor([one.min_p for one in params], dtype=torch.float64, device=device).unsqueeze(1)
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

    `uniform` is a share of the row's sum, or with `absolute` a weight. The weight at the index is above 0.
    """
    edges = weights.cumsum(1)
    total = edges[:, -1:]
    target = uniform if absolute else uniform * total
    # Rounding may move the target to the total or past it, where there is no index.
    target = torch.minimum(target, torch.nextafter(total, torch.zeros_like(total)))
    index = torch.searchsorted(edges, target, right=True)
    before = torch.where(index > 0, edges.gather(1, (index - 1).clamp(min=0)), 0.0)
    return index, target - before


def find_peaks(logits: Tensor) -> tuple[Tensor, Tensor]:
    """Return the highest logit of each row and the lowest id that has it; a row with a NaN has NaN."""
    blocks = _blocked(logits, _BLOCK, -math.inf)
    peaks, block = blocks.amax(2).max(1)
    inner = blocks[torch.arange(len(blocks), device=blocks.device), block].argmax(1)
    return peaks, block * _BLOCK + inner


def _top_tokens(logits: Tensor, size: int) -> tuple[Tensor, Tensor]:
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
    blocks = _blocked(logits, _TOP_BLOCK, -math.inf)
    places = blocks.amax(2).topk(size, sorted=False).indices
    cells = blocks.gather(1, places.unsqueeze(2).expand(-1, -1, _TOP_BLOCK)).view(rows, -1)
    values, inner = cells.topk(size)
    return values, places.gather(1, inner // _TOP_BLOCK) * _TOP_BLOCK + inner % _TOP_BLOCK


def _blocked(values: Tensor, size: int, padding: float) -> Tensor:
    """Return `values` [rows, vocab] as [rows, blocks, size], padded at the end where they do not fit."""
    rest = -values.shape[1] % size
    if rest:
        values = torch.nn.functional.pad(values, (0, rest), value=padding)
    return values.reshape(values.shape[0], -1, size)


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
            indices = _indices(rows, logits)
            part, part_peaks = logits.index_select(0, indices), peaks.index_select(0, indices)
        for row, token, (score, best) in zip(rows, tokens, token_logprobs(part, part_peaks, tokens, top), strict=True):
            results[row] = Sampled(token, Logprobs((score,), (best,)))


def token_logprobs(
    logits: Tensor, peaks: Tensor, tokens: list[int], top: int
) -> list[tuple[float, tuple[TopLogprob, ...]]]:
    """Return for each row the log-probability of its token, and its `top` best tokens; ties by lower id."""
    peaks = peaks.unsqueeze(1)
    sums = _blocked((logits - peaks).exp_(), _BLOCK, 0.0).sum(2).sum(1, keepdim=True)
    norms = peaks + sums.log_()
    chosen = logits.gather(1, torch.tensor(tokens, device=logits.device).unsqueeze(1)) - norms
    scores: list[float] = chosen.squeeze(1).tolist()
    if not top:
        return [(_finite(score), ()) for score in scores]
    size = min(top + 1, logits.shape[1])
    values, ids = _top_tokens(logits, size)
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
