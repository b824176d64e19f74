"""Samples on the device: the next step can begin with the tokens before the host has them."""

import torch
from torch import Tensor

from baton.engines.torch.gpu.graphs import Decoded
from baton.engines.torch.gpu.transfers import HostCopy
from baton.engines.torch.sampling.draws import draw_on_device, uniform
from baton.engines.torch.sampling.sampler import Sampled, samples_on_device
from baton.engines.torch.sampling.vocabulary import row_indices
from baton.engines.torch.sequence import Sequence
from baton.errors import BatonError, EngineFailed

_SAMPLED, _UNUSABLE, _UNDECIDED = range(3)


class SampledCopy:
    """Tokens of sequences, on their way to the host. A sequence without a usable token has an error.

    One that has None needs another step, in which the host samples: top_p leaves more tokens than were searched.
    """

    def __init__(self, tokens: Tensor, states: Tensor, sequences: list[Sequence]) -> None:
        self._copy = HostCopy(torch.stack((tokens, states.to(tokens.dtype))))
        self._sequences = sequences

    def wait(self) -> list[Sampled | BatonError | None]:
        """Return the results, in the order of the sequences."""
        tokens, states = self._copy.wait()
        results: list[Sampled | BatonError | None] = [Sampled(token, None) for token in tokens]
        if any(states):
            for row, state in enumerate(states):
                if state == _UNUSABLE:
                    results[row] = EngineFailed("the model gave no usable logits for this token")
                elif state == _UNDECIDED:
                    results[row] = None
                    self._sequences[row].sampled_by_host = True
        return results


def can_sample(sequences: list[Sequence]) -> bool:
    """Whether the device can sample for all of these."""
    return all(map(samples_on_device, sequences)) and not any(sequence.sampled_by_host for sequence in sequences)


def sample_on_device(
    decoded: Decoded, sequences: list[Sequence], last: Tensor, rows: Tensor, ahead: int
) -> SampledCopy:
    """Sample the next token of each sequence, and write it to its row of `last`.

    `ahead` is how many tokens of each sequence the host does not have yet.
    """
    tokens, states = decoded.best, (~torch.isfinite(decoded.peaks)).to(torch.int64)
    drawn = [row for row, sequence in enumerate(sequences) if not sequence.params.greedy]
    if drawn:
        chosen = [sequences[row] for row in drawn]
        numbers = [uniform(one.params.seed, one.index, one.generated + ahead) for one in chosen]
        places = row_indices(drawn, tokens) if len(drawn) < len(sequences) else slice(None)
        found, right = draw_on_device(
            decoded.logits[places], decoded.peaks[places], [one.params for one in chosen], numbers
        )
        tokens, wrong = tokens.clone(), torch.zeros_like(states)
        tokens[places] = found
        wrong[places] = torch.where(right, _SAMPLED, _UNDECIDED)
        unusable = states == _UNUSABLE
        tokens.masked_fill_(unusable, 0)  # the next step may begin with it, so it has to be a token of the model
        states = torch.where(unusable, states, wrong)
    last.index_copy_(0, rows.long(), tokens.to(torch.int32))
    return SampledCopy(tokens, states, sequences)
