"""Muon: gradient descent with momentum, in which the update of a matrix is made orthogonal.

Matrices of the same shape are updated together, so that a step of a small model takes few kernels.
"""

from collections import defaultdict
from collections.abc import Iterable

import torch

# Coefficients of the Newton-Schulz iteration that Muon uses: they bring all singular values near 1 in few iterations.
QUINTIC = (3.4445, -4.7750, 2.0315)
ITERATIONS = 5
# With this factor, an update is about as large as AdamW's with the same learning rate.
SIZE = 0.2


class Muon:
    """The optimizer for `matrices`, all of which have a gradient in every step."""

    def __init__(self, matrices: Iterable[torch.nn.Parameter], momentum: float, decay: float) -> None:
        groups: defaultdict[torch.Size, list[torch.Tensor]] = defaultdict(list)
        for matrix in matrices:
            groups[matrix.shape].append(matrix)
        self._groups = [(group, torch.zeros_like(torch.stack(group))) for group in groups.values()]
        self._momentum = momentum
        self._decay = decay

    @torch.no_grad()
    def step(self, rate: float) -> None:
        """Change the matrices by their gradients, and drop the gradients."""
        for group, momentum in self._groups:
            gradients = torch.stack([matrix.grad for matrix in group if matrix.grad is not None])
            momentum.lerp_(gradients, 1 - self._momentum)
            updates = orthogonal(gradients.lerp_(momentum, self._momentum))
            updates = updates * (rate * SIZE * max(updates.shape[1:]) ** 0.5)
            torch._foreach_mul_(group, 1 - rate * self._decay)
            torch._foreach_sub_(group, list(updates.unbind()))
            for matrix in group:
                matrix.grad = None


def orthogonal(matrices: torch.Tensor) -> torch.Tensor:
    """Return matrices with about the same singular vectors and singular values near 1."""
    wide = matrices.mT if matrices.shape[1] > matrices.shape[2] else matrices
    result = wide.bfloat16()
    result = result / (result.norm(dim=(1, 2), keepdim=True) + 1e-7)
    first, third, fifth = QUINTIC
    for _ in range(ITERATIONS):
        square = result @ result.mT
        result = first * result + (third * square + fifth * square @ square) @ result
    upright: torch.Tensor = result.mT if matrices.shape[1] > matrices.shape[2] else result
    return upright.float()
