"""What towers have in common: where their weights come from, and attention without a mask."""

from collections.abc import Callable
from typing import Protocol

import torch
from torch import Tensor
from torch.nn import functional as F  # noqa: N812 - the usual name

from baton.errors import ConfigError

Carve = Callable[..., Tensor]
"""Returns a tensor of the given shape without content."""

_ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "gelu": F.gelu,
    "gelu_pytorch_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "quick_gelu": lambda x: x * torch.sigmoid(1.702 * x),
    "relu": F.relu,
    "silu": F.silu,
}


class Tower(Protocol):
    """A vision tower with its connector to the language model. Used from one thread."""

    @property
    def parts(self) -> dict[str, Tensor]:
        """The tensors to load, by their name in the model's files without the prefix (see `identity.py`)."""

    def forward(self, patches: Tensor, grid: tuple[int, int]) -> Tensor:
        """Return rows [part, row, number] of normalised patches [part, patch, value] of `grid` (height, width)."""


def pair(name: str, weight_and_bias: tuple[Tensor, Tensor]) -> dict[str, Tensor]:
    """Return the weight and bias of a module, by their names in the model's files."""
    return {f"{name}.weight": weight_and_bias[0], f"{name}.bias": weight_and_bias[1]}


def activation(name: str) -> Callable[[Tensor], Tensor]:
    """Return an activation function. Raises ConfigError for one that is not supported."""
    if name not in _ACTIVATIONS:
        raise ConfigError(f"hidden_act {name!r} is not supported in a vision tower; {', '.join(_ACTIVATIONS)} are")
    return _ACTIVATIONS[name]


def heads_of(qkv: Tensor, heads: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return query, key and value, each [sequence, token, head, dimension], of [sequence, token, all of them]."""
    q, k, v = qkv.view(*qkv.shape[:2], 3, heads, -1).unbind(2)
    return q, k, v


def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Attention within each sequence: all are [sequence, token, head, dimension]."""
    out = F.scaled_dot_product_attention(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2))
    return out.transpose(1, 2)
