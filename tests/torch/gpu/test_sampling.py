"""Tokens that are sampled on the device: a row without usable logits ends its own request, and nothing waits."""

import math

import pytest
import torch

pytest.importorskip("triton")

from baton.engines.torch.gpu.graphs import Decoded
from baton.engines.torch.gpu.sampling import SampledCopy, sample_on_device
from baton.engines.torch.sampling.sampler import Sampled, sample
from baton.engines.torch.sampling.vocabulary import find_peaks
from baton.engines.torch.sampling_params import make_sampling_params
from baton.engines.torch.sequence import Sequence
from baton.errors import EngineFailed
from baton.models.defaults import SamplingDefaults
from baton.ports.engine import Work
from baton.protocol.ids import RequestId
from baton.protocol.requests import Sampling

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
VOCAB = 300  # not a multiple of a block of the vocabulary
ON_GPU = pytest.mark.skipif(DEVICE.type != "cuda", reason="there is no GPU")


def sequence(number: int, sampling: Sampling) -> Sequence:
    work = Work(request_id=RequestId(str(number)), token_ids=(1, 2), max_tokens=9, sampling=sampling)
    return Sequence(work, 0, make_sampling_params(work, SamplingDefaults(), VOCAB), number)


def start(logits: torch.Tensor, sequences: list[Sequence], last: torch.Tensor) -> SampledCopy:
    rows = torch.arange(len(sequences), dtype=torch.int32, device=DEVICE)
    return sample_on_device(Decoded(logits, *find_peaks(logits)), sequences, last, rows, 0)


@pytest.mark.parametrize("damage", ["nan", "one nan", "minus infinity", "infinity"])
@pytest.mark.parametrize("filters", [{}, {"top_p": 0.9}, {"top_k": 5}])
def test_a_row_without_usable_logits_fails_alone(damage: str, filters: dict[str, float]) -> None:
    """On a GPU an index outside a tensor would end every request of the process."""
    sequences = [sequence(number, Sampling(temperature=0.8, seed=number, **filters)) for number in range(3)]
    logits = torch.randn(3, VOCAB, generator=torch.Generator().manual_seed(0))
    expected = sample(logits, sequences)
    match damage:
        case "nan":
            logits[1] = math.nan
        case "one nan":
            logits[1, 7] = math.nan
        case "minus infinity":
            logits[1] = -math.inf
        case "infinity":
            logits[1, 7] = math.inf
    last = torch.zeros(3, dtype=torch.int32, device=DEVICE)
    found = start(logits.to(DEVICE), sequences, last).wait()
    assert [found[0], found[2]] == [expected[0], expected[2]]
    assert isinstance(found[1], EngineFailed)
    assert all(0 <= token < VOCAB for token in last.tolist()), "the next step begins with these tokens"


def test_greedy_and_random_rows_of_a_batch_have_the_tokens_of_the_host() -> None:
    samplings = [Sampling(temperature=number % 2, seed=number, top_p=0.9 if number > 2 else 1.0) for number in range(6)]
    sequences = [sequence(number, sampling) for number, sampling in enumerate(samplings)]
    logits = torch.randn(6, VOCAB, generator=torch.Generator().manual_seed(1))
    last = torch.zeros(6, dtype=torch.int32, device=DEVICE)
    found = start(logits.to(DEVICE), sequences, last).wait()
    assert found == sample(logits, sequences)
    assert last.tolist() == [one.token for one in found if isinstance(one, Sampled)]


@ON_GPU
def test_sampling_does_not_wait_for_the_device() -> None:
    sequences = [sequence(number, Sampling(temperature=number % 2, seed=number, top_p=0.9)) for number in range(4)]
    logits = torch.randn(4, VOCAB, device=DEVICE)
    last = torch.zeros(4, dtype=torch.int32, device=DEVICE)
    start(logits, sequences, last).wait()  # what is done once, such as pinning memory, may wait
    torch.cuda.set_sync_debug_mode("error")
    try:
        copy = start(logits, sequences, last)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert all(isinstance(one, Sampled) for one in copy.wait())
