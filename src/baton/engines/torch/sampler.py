"""From logits to tokens. A row's token depends on that row and its sequence alone, never on the rest of the batch.

    raw logits -> bias -> penalties -> grammar -> min_tokens -> temperature -> top_k -> top_p -> min_p -> draw
        |
        +-> logprobs

Nothing sorts the vocabulary unless it must: rows are cut into blocks, and the maxima or sums of the blocks say where to
look. Tokens whose logits are equal are kept or dropped together, so no result depends on how a device breaks ties.
"""

import hashlib
import math
import struct
from array import array
from collections.abc import Sequence as Rows
from typing import NamedTuple

import torch
from torch import Tensor

from baton.engines.torch.sampling_params import Guide, SamplingPlan
from baton.engines.torch.sequence import Sequence
from baton.errors import BatonError, EngineFailed
from baton.protocol.outputs import Logprobs, TopLogprob

LEAST_LOGPROB = -9999.0  # stands for minus infinity, which JSON cannot say
_BLOCK = 256
_LEADER_BLOCK = 64
_FIRST_LOOK = 64
_TIES = 8
_SCORED_ROWS = 64
# For each byte of a mask, eight booleans in one word: whether its bits, lowest first, are off.
_FORBIDDEN = torch.tensor([[not byte >> bit & 1 for bit in range(8)] for byte in range(256)]).view(torch.int64).view(-1)


class Sampled(NamedTuple):
    """A token, and its log-probability if the request asked for it."""

    token: int
    logprobs: Logprobs | None


class SamplingState:
    """What the sampler remembers of a sequence between steps; kept in `Sequence.sampling_state`.

    slots   token -> position in the two arrays
    ids     [ tokens seen, each once ]
    counts  [ how often each was generated; 0 for those of the prompt only ]
    """

    __slots__ = ("counts", "ids", "read", "slots")

    def __init__(self, sequence: Sequence) -> None:
        self.slots: dict[int, int] = {}
        self.ids = array("q")
        self.counts = array("f")
        self.read = 0 if sequence.plan.repetition != 1.0 else sequence.prompt_length

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
    """Return the next token of each sequence, or why it can have none; `logits` are float32, a row for each.

    `logits` are left as they were. Guides have accepted their token on return; the sequences' tokens are not touched.
    """
    if not sequences:
        return []
    peaks, best = _peaks(logits)
    heights, tokens = peaks.tolist(), best.tolist()
    results: list[Sampled | BatonError] = [
        Sampled(token, None)
        if math.isfinite(height)
        else EngineFailed("the model gave no usable logits for this token")
        for height, token in zip(heights, tokens, strict=True)
    ]
    sound = [row for row, height in enumerate(heights) if math.isfinite(height)]
    chosen = [row for row in sound if not (sequences[row].plan.greedy and not _edited(sequences[row]))]
    if chosen:
        for row, choice in zip(chosen, _choose(logits, peaks, chosen, sequences), strict=True):
            results[row] = Sampled(choice, None) if isinstance(choice, int) else choice
    _score(logits, peaks, sequences, results)
    for row in sound:
        guide, result = sequences[row].guide, results[row]
        if guide is not None and isinstance(result, Sampled):
            try:
                guide.accept(result.token)
            except BatonError as error:
                results[row] = error
    return results


def prompt_logprobs(logits: Tensor, targets: list[int], top: int) -> Logprobs:
    """Return the log-probabilities of `targets`, each predicted by its row of `logits`, and `top` alternatives each."""
    chosen: list[float] = []
    tops: list[tuple[TopLogprob, ...]] = []
    for start in range(0, len(targets), _SCORED_ROWS):
        part = logits[start : start + _SCORED_ROWS]
        peaks = part.amax(1)
        for score, leaders in _logprobs(part, peaks, targets[start : start + _SCORED_ROWS], top):
            chosen.append(score)
            tops.append(leaders)
    return Logprobs(tuple(chosen), tuple(tops))


def uniform(seed: int, index: int, position: int) -> float:
    """Return the number in (0, 1) that chance gives token `position` of choice `index`, the same everywhere."""
    digest = hashlib.blake2b(struct.pack("<qQQ", seed, index, position), digest_size=8).digest()
    return ((int.from_bytes(digest, "little") >> 11) + 0.5) * 2.0**-53


def _edited(sequence: Sequence) -> bool:
    return sequence.plan.edits or sequence.guide is not None or _held_open(sequence)


def _held_open(sequence: Sequence) -> bool:
    plan = sequence.plan
    return sequence.generated < plan.min_tokens and bool(plan.ends or plan.stops)


def _choose(logits: Tensor, peaks: Tensor, rows: list[int], sequences: Rows[Sequence]) -> list[int | BatonError]:
    """Return the tokens of `rows`, which need more than the best of the raw logits."""
    mine = [sequences[row] for row in rows]
    everything = len(rows) == len(sequences)
    places = torch.tensor(rows, device=logits.device)
    picked = logits if everything else logits.index_select(0, places)
    errors: dict[int, BatonError] = {}
    if any(map(_edited, mine)):
        picked = picked.clone() if everything else picked
        errors = _edit(picked, mine)
        peaks, best = _peaks(picked)
        for row, height in enumerate(peaks.tolist()):
            if not math.isfinite(height):
                errors.setdefault(row, EngineFailed("no token is left after bias, penalties and grammar"))
        tokens = best.tolist()
    else:
        peaks = peaks.index_select(0, places)
        tokens = [0] * len(mine)
    drawn = [row for row, sequence in enumerate(mine) if not sequence.plan.greedy and row not in errors]
    if drawn:
        if len(drawn) < len(mine):
            places = torch.tensor(drawn, device=logits.device)
            picked, peaks = picked.index_select(0, places), peaks.index_select(0, places)
        for row, token in zip(drawn, _draw(picked, peaks, [mine[row] for row in drawn]), strict=True):
            tokens[row] = token
    return [errors.get(row, token) for row, token in enumerate(tokens)]


def _edit(logits: Tensor, sequences: list[Sequence]) -> dict[int, BatonError]:
    """Apply bias, penalties, grammars and min_tokens in place; return the rows whose grammar failed."""
    errors: dict[int, BatonError] = {}
    masks: dict[int, bytes] = {}
    for row, sequence in enumerate(sequences):
        if sequence.plan.bias:
            _add_bias(logits[row], sequence.plan)
        if sequence.plan.penalises:
            _penalise(logits[row], sequence)
        if sequence.guide is not None:
            try:
                masks[row] = sequence.guide.mask()
            except BatonError as error:
                errors[row] = error
    if masks:
        _apply_masks(logits, masks)
    for row, sequence in enumerate(sequences):
        if _held_open(sequence):
            _hold_open(logits[row], sequence.plan, sequence.guide)
    return errors


def _add_bias(row: Tensor, plan: SamplingPlan) -> None:
    ids = torch.tensor([token for token, _ in plan.bias], device=row.device)
    row.index_add_(0, ids, torch.tensor([value for _, value in plan.bias], dtype=row.dtype, device=row.device))


def _penalise(row: Tensor, sequence: Sequence) -> None:
    state, plan = sequence.sampling_state, sequence.plan
    if not isinstance(state, SamplingState):
        state = sequence.sampling_state = SamplingState(sequence)
    ids, counts = state.seen(sequence, row.device)
    values = row[ids]
    if plan.repetition != 1.0:
        values = torch.where(values > 0, values / plan.repetition, values * plan.repetition)
    values = values - plan.frequency * counts - plan.registration * (counts > 0)
    row[ids] = values.clamp(max=torch.finfo(row.dtype).max)


def _apply_masks(logits: Tensor, masks: dict[int, bytes]) -> None:
    """Forbid what the grammars forbid. Bit b of byte n stands for token 8 n + b."""
    vocab = logits.shape[1]
    packed = torch.frombuffer(bytearray(b"".join(masks.values())), dtype=torch.uint8)
    forbidden = _FORBIDDEN.index_select(0, packed.int()).view(torch.bool).view(len(masks), -1)
    for row, banned in zip(masks, forbidden.to(logits.device), strict=True):
        logits[row].masked_fill_(banned[:vocab], -math.inf)


def _hold_open(row: Tensor, plan: SamplingPlan, guide: Guide | None) -> None:
    """Forbid the tokens that would end the answer too early, unless the grammar leaves nothing else."""
    ids = torch.tensor(sorted(plan.ends | plan.stops), device=row.device)
    before = row[ids]
    row[ids] = -math.inf
    if guide is not None and row.amax().item() == -math.inf:
        row[ids] = before


class _Rows(NamedTuple):
    """Rows to draw from, one place each: logits [rows, vocab], and [rows, 1] of what else a draw needs."""

    logits: Tensor
    peaks: Tensor
    heat: Tensor
    chance: Tensor

    def take(self, rows: list[int]) -> "_Rows":
        """Return these rows, without a copy where they are all."""
        if len(rows) == len(self.logits):
            return self
        places = torch.tensor(rows, device=self.logits.device)
        return _Rows(*(value.index_select(0, places) for value in self))


def _draw(logits: Tensor, peaks: Tensor, sequences: list[Sequence]) -> list[int]:
    """Draw a token for each row by inverting its cumulated probabilities, in the order of token ids."""
    plans = [sequence.plan for sequence in sequences]
    chances = [uniform(sequence.plan.seed, sequence.index, sequence.generated) for sequence in sequences]
    every = _Rows(
        logits,
        peaks.unsqueeze(1),
        torch.tensor([plan.temperature for plan in plans], dtype=logits.dtype, device=logits.device).unsqueeze(1),
        torch.tensor(chances, dtype=torch.float64, device=logits.device).unsqueeze(1),
    )
    narrow = [row for row, plan in enumerate(plans) if plan.top_k or plan.top_p < 1.0]
    wide = [row for row, plan in enumerate(plans) if not (plan.top_k or plan.top_p < 1.0)]
    tokens = [0] * len(plans)
    for rows, draw in ((wide, _draw_wide), (narrow, _draw_narrow)):
        if rows:
            for row, token in zip(rows, draw(every.take(rows), [plans[row] for row in rows]), strict=True):
                tokens[row] = token
    return tokens


def _draw_wide(rows: _Rows, plans: list[SamplingPlan]) -> list[int]:
    """Draw from the whole vocabulary: first the block, by the sums of the blocks, then the token in it."""
    weights = _weights(rows.logits, rows.peaks, rows.heat)
    if any(plan.min_p for plan in plans):
        least = torch.tensor([plan.min_p for plan in plans], dtype=weights.dtype, device=weights.device)
        weights.masked_fill_(weights < least.unsqueeze(1), 0.0)
    blocks = _blocked(weights, _BLOCK, 0.0)
    block, below = _invert(blocks.sum(2).double(), rows.chance)
    cells = blocks[torch.arange(len(blocks), device=blocks.device), block.squeeze(1)]
    inner, _ = _invert(cells.double(), below, absolute=True)
    tokens: list[int] = (block * _BLOCK + inner).squeeze(1).tolist()
    return tokens


def _draw_narrow(rows: _Rows, plans: list[SamplingPlan]) -> list[int]:
    """Draw from the tokens that top_k and top_p leave. Looks at few leading tokens first and at more where needed."""
    vocab = rows.logits.shape[1]
    mass = torch.ones_like(rows.chance)
    if any(not plan.top_k for plan in plans):
        mass = _blocked(_weights(rows.logits, rows.peaks, rows.heat), _BLOCK, 0.0).sum(2).double().sum(1, keepdim=True)
    tokens = [0] * len(plans)
    left = list(range(len(plans)))
    size = max(_FIRST_LOOK, max(plan.top_k for plan in plans) + _TIES)
    while left:
        size = size if size * 4 < vocab else vocab
        part = rows.take(left)
        values, ids = _leaders(part.logits, size)
        weights = _weights(values, part.peaks, part.heat).double()
        allowed, covered = _nucleus(values, weights, mass[left], [plans[row] for row in left])
        ids, order = ids.sort(1)
        place, _ = _invert((weights * allowed).gather(1, order), part.chance)
        for row, token in zip(left, ids.gather(1, place).squeeze(1).tolist(), strict=True):
            tokens[row] = token
        if size == vocab:
            break
        left = [row for row, enough in zip(left, covered.tolist(), strict=True) if not enough]
        size *= 8
    return tokens


def _nucleus(values: Tensor, weights: Tensor, mass: Tensor, plans: list[SamplingPlan]) -> tuple[Tensor, Tensor]:
    """Return which of the leading tokens may be drawn, and for each row whether all that may be are among them.

    `values` fall along a row, `weights` are their probabilities times a constant, `mass` is the sum over the whole
    vocabulary for rows without top_k. Each rule becomes a least value, so equal values share their fate.
    """
    device, size = values.device, values.shape[1]
    top_k = torch.tensor([plan.top_k for plan in plans], device=device).unsqueeze(1)
    top_p = torch.tensor([plan.top_p for plan in plans], dtype=torch.float64, device=device).unsqueeze(1)
    min_p = torch.tensor([plan.min_p for plan in plans], dtype=torch.float64, device=device).unsqueeze(1)
    kth = values.gather(1, (top_k - 1).clamp(0, size - 1))
    least = torch.where(top_k > 0, kth, -math.inf)
    cumulated = (weights * (values >= least)).cumsum(1)
    total = torch.where(top_k > 0, cumulated[:, -1:], mass)
    crossing = (cumulated < top_p * total).sum(1, keepdim=True)
    pth = values.gather(1, crossing.clamp(max=size - 1))
    least = torch.where(top_p < 1.0, torch.maximum(least, pth), least)
    last = values[:, -1:]
    # What is past the last leading token is smaller than it, or equal to it and then perhaps allowed as well.
    covered = ((crossing < size) & (last < least)) | (last == -math.inf)
    return (values >= least) & (weights >= min_p), covered.squeeze(1)


def _weights(logits: Tensor, peaks: Tensor, heat: Tensor) -> Tensor:
    """Return probabilities times a constant: 1 for the best token. The difference comes first so nothing overflows."""
    return (logits - peaks).div_(heat).exp_()


def _invert(weights: Tensor, chance: Tensor, absolute: bool = False) -> tuple[Tensor, Tensor]:
    """Return the first place where the cumulated weights of a row pass `chance`, and how far past the place before.

    `chance` is a share of the row's sum, or with `absolute` a weight. The place found has a weight above 0.
    """
    edges = weights.cumsum(1)
    total = edges[:, -1:]
    target = chance if absolute else chance * total
    # Rounding may carry the target to the total or past it, where no place is.
    target = torch.minimum(target, torch.nextafter(total, torch.zeros_like(total)))
    place = torch.searchsorted(edges, target, right=True)
    before = torch.where(place > 0, edges.gather(1, (place - 1).clamp(min=0)), 0.0)
    return place, target - before


def _peaks(logits: Tensor) -> tuple[Tensor, Tensor]:
    """Return the highest logit of each row and the lowest id that has it; a row with a NaN has NaN."""
    blocks = _blocked(logits, _BLOCK, -math.inf)
    peaks, block = blocks.amax(2).max(1)
    inner = blocks[torch.arange(len(blocks), device=blocks.device), block].argmax(1)
    return peaks, block * _BLOCK + inner


def _leaders(logits: Tensor, size: int) -> tuple[Tensor, Tensor]:
    """Return the `size` highest logits of each row, falling, and their ids.

    They are in the blocks with the `size` highest maxima, so only those are looked through where they are few.
    """
    rows, vocab = logits.shape
    if size * _LEADER_BLOCK * 2 > vocab:
        if size < vocab:
            values, ids = logits.topk(size)
            return values, ids
        values, ids = logits.sort(1, descending=True)
        return values, ids
    blocks = _blocked(logits, _LEADER_BLOCK, -math.inf)
    places = blocks.amax(2).topk(size, sorted=False).indices
    cells = blocks.gather(1, places.unsqueeze(2).expand(-1, -1, _LEADER_BLOCK)).view(rows, -1)
    values, inner = cells.topk(size)
    return values, places.gather(1, inner // _LEADER_BLOCK) * _LEADER_BLOCK + inner % _LEADER_BLOCK


def _blocked(values: Tensor, size: int, padding: float) -> Tensor:
    """Return `values` [rows, vocab] as [rows, blocks, size], padded at the end where they do not fit."""
    rest = -values.shape[1] % size
    if rest:
        values = torch.nn.functional.pad(values, (0, rest), value=padding)
    return values.reshape(values.shape[0], -1, size)


def _score(logits: Tensor, peaks: Tensor, sequences: Rows[Sequence], results: list[Sampled | BatonError]) -> None:
    """Put the log-probabilities of the raw logits into the results that want them."""
    groups: dict[int, list[int]] = {}
    for row, (sequence, result) in enumerate(zip(sequences, results, strict=True)):
        if sequence.plan.logprobs is not None and isinstance(result, Sampled):
            groups.setdefault(sequence.plan.logprobs, []).append(row)
    for top, rows in groups.items():
        tokens = [result.token for row in rows if isinstance(result := results[row], Sampled)]
        part, heights = logits, peaks
        if len(rows) < len(sequences):
            places = torch.tensor(rows, device=logits.device)
            part, heights = logits.index_select(0, places), peaks.index_select(0, places)
        for row, token, (score, leaders) in zip(rows, tokens, _logprobs(part, heights, tokens, top), strict=True):
            results[row] = Sampled(token, Logprobs((score,), (leaders,)))


def _logprobs(logits: Tensor, peaks: Tensor, tokens: list[int], top: int) -> list[tuple[float, tuple[TopLogprob, ...]]]:
    """Return for each row the log-probability of its token, and its `top` best tokens; equal ones by lower id."""
    peaks = peaks.unsqueeze(1)
    sums = _blocked((logits - peaks).exp_(), _BLOCK, 0.0).sum(2).sum(1, keepdim=True)
    norms = peaks + sums.log_()
    chosen = logits.gather(1, torch.tensor(tokens, device=logits.device).unsqueeze(1)) - norms
    scores: list[float] = chosen.squeeze(1).tolist()
    if not top:
        return [(_finite(score), ()) for score in scores]
    size = min(top + 1, logits.shape[1])
    values, ids = _leaders(logits, size)
    rows = zip((values - norms).tolist(), ids.tolist(), strict=True)
    leaders = []
    for row, (row_values, row_ids) in enumerate(rows):
        if size > top and row_values[top - 1] == row_values[top]:
            # More tokens than fit have the last value: find all of them, to name those with the lowest ids.
            equal = (logits[row] >= values[row, top - 1]).nonzero().squeeze(1)
            row_values, row_ids = (logits[row, equal] - norms[row]).tolist(), equal.tolist()
        best = sorted(zip(row_values, row_ids, strict=True), key=lambda pair: (-pair[0], pair[1]))[:top]
        leaders.append(tuple(TopLogprob(rank, token, _finite(value)) for rank, (value, token) in enumerate(best, 1)))
    return [(_finite(score), best) for score, best in zip(scores, leaders, strict=True)]


def _finite(value: float) -> float:
    return value if value > LEAST_LOGPROB else LEAST_LOGPROB  # NaN is not above it either
