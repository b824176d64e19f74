"""What a request changes in its logits before a token is drawn: bias, penalties, bad words, grammar, min_tokens."""

import math
from array import array

import torch
from torch import Tensor

from baton.engines.torch.sampling_params import Guide, SamplingParams
from baton.engines.torch.sequence import Sequence
from baton.errors import BatonError

# For each byte of a mask, eight booleans in one word: whether its bits, lowest first, are off.
_FORBIDDEN = torch.tensor([[not byte >> bit & 1 for bit in range(8)] for byte in range(256)]).view(torch.int64).view(-1)


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


def is_edited(sequence: Sequence) -> bool:
    return sequence.params.edits_logits or sequence.guide is not None or below_min_tokens(sequence)


def below_min_tokens(sequence: Sequence) -> bool:
    params = sequence.params
    return sequence.generated < params.min_tokens and bool(params.eos_token_ids or params.stop_token_ids)


def edit_logits(logits: Tensor, sequences: list[Sequence]) -> dict[int, BatonError]:
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
        if below_min_tokens(sequence):
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
