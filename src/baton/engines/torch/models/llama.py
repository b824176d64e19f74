"""The Llama family (Llama, SmolLM2, Mistral, Qwen2, Qwen3) over a paged KV cache, with merged projections.

Weights are plain tensors with rows as the model's files have them; nothing is packed, so they can be replaced in place.
"""

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from baton.engines.torch.models.config import LlamaConfig, inverse_frequencies


class Layer(NamedTuple):
    """The weights of one layer. `qkv` is query, key, value rows; `gate_up` is gate, then up rows."""

    input_norm: Tensor
    qkv: Tensor
    qkv_bias: Tensor | None
    q_norm: Tensor | None
    k_norm: Tensor | None
    o: Tensor
    o_bias: Tensor | None
    post_norm: Tensor
    gate_up: Tensor
    down: Tensor


class Weights(NamedTuple):
    """The weights of a model; `head` is `embed` itself when they are tied."""

    embed: Tensor
    layers: tuple[Layer, ...]
    norm: Tensor
    head: Tensor
