"""A step that has been started: its tokens can be read when they are computed."""

from typing import TYPE_CHECKING, Protocol

from baton.engines.torch.diffusion.candidates import Decided
from baton.engines.torch.sampling.sampler import Sampled
from baton.engines.torch.sequence import Sequence
from baton.errors import BatonError

if TYPE_CHECKING:
    from baton.engines.torch.gpu.sampling import SampledCopy

Sampling = list[tuple[Sequence, Sampled | Decided | BatonError]]


class PendingStep(Protocol):
    """A started step."""

    @property
    def sampled_on_device(self) -> bool:
        """Whether the next step can be started with the tokens of this one before they are read."""

    def wait(self) -> Sampling:
        """Return what the step has sampled, when it is computed. A sequence that is not in it needs another step."""


class ComputedStep:
    """A step whose tokens are known."""

    sampled_on_device = False

    def __init__(self, sampling: Sampling) -> None:
        self._sampling = sampling

    def wait(self) -> Sampling:
        """See `PendingStep.wait`."""
        return self._sampling


class StartedStep:
    """A step whose tokens are sampled on the device."""

    sampled_on_device = True

    def __init__(self, copy: "SampledCopy", sequences: list[Sequence]) -> None:
        self._copy = copy
        self._sequences = sequences

    def wait(self) -> Sampling:
        """See `PendingStep.wait`."""
        results = zip(self._sequences, self._copy.wait(), strict=True)
        return [(sequence, result) for sequence, result in results if result is not None]
