"""The tower of the Idefics3 and SmolVLM layout: SigLIP with learned positions, and a pixel shuffle to the connector."""

import functools
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F  # noqa: N812 - the usual name

from baton.engines.torch.vision.idefics3 import Idefics3Config
from baton.engines.torch.vision.tower import Carve, activation, attend, heads_of, pair


class _Layer(NamedTuple):
    """The weights of one layer; `qkv` is query, key, value rows. The first of a pair is the weight."""

    norm1: tuple[Tensor, Tensor]
    qkv: tuple[Tensor, Tensor]
    out: tuple[Tensor, Tensor]
    norm2: tuple[Tensor, Tensor]
    up: tuple[Tensor, Tensor]
    down: tuple[Tensor, Tensor]


class Idefics3Tower:
    """A Tower (see `tower.py`). Without a mask: all patches of a frame are of the image."""

    def __init__(self, config: Idefics3Config, tensor: Carve) -> None:
        tower = config.vision_config
        hidden, ffn = tower.hidden_size, tower.intermediate_size
        self._config = config
        self._side = tower.image_size // tower.patch_size
        self._activation = activation(tower.hidden_act)
        self._patch = tensor(hidden, tower.num_channels, tower.patch_size, tower.patch_size), tensor(hidden)
        self._positions = tensor(self._side**2, hidden)
        self._layers = [
            _Layer(
                norm1=(tensor(hidden), tensor(hidden)),
                qkv=(tensor(3 * hidden, hidden), tensor(3 * hidden)),
                out=(tensor(hidden, hidden), tensor(hidden)),
                norm2=(tensor(hidden), tensor(hidden)),
                up=(tensor(ffn, hidden), tensor(ffn)),
                down=(tensor(hidden, ffn), tensor(hidden)),
            )
            for _ in range(tower.num_hidden_layers)
        ]
        self._norm = tensor(hidden), tensor(hidden)
        self._connector = tensor(config.text_config.hidden_size, hidden * config.scale_factor**2)
        self._position_of = functools.cache(self._find_positions)

    @property
    def parts(self) -> dict[str, Tensor]:
        """See `Tower.parts`."""
        parts = {
            "vision_model.embeddings.position_embedding.weight": self._positions,
            "connector.modality_projection.proj.weight": self._connector,
            **pair("vision_model.embeddings.patch_embedding", self._patch),
            **pair("vision_model.post_layernorm", self._norm),
        }
        hidden = self._config.vision_config.hidden_size
        for number, layer in enumerate(self._layers):
            prefix = f"vision_model.encoder.layers.{number}"
            for index, name in enumerate(("q_proj", "k_proj", "v_proj")):
                rows = slice(index * hidden, (index + 1) * hidden)
                parts |= pair(f"{prefix}.self_attn.{name}", (layer.qkv[0][rows], layer.qkv[1][rows]))
            parts |= pair(f"{prefix}.self_attn.out_proj", layer.out)
            parts |= pair(f"{prefix}.layer_norm1", layer.norm1) | pair(f"{prefix}.layer_norm2", layer.norm2)
            parts |= pair(f"{prefix}.mlp.fc1", layer.up) | pair(f"{prefix}.mlp.fc2", layer.down)
        return parts

    def forward(self, patches: Tensor, grid: tuple[int, int]) -> Tensor:
        """See `Tower.forward`."""
        x = F.linear(patches, self._patch[0].flatten(1), self._patch[1]) + self._positions[self._position_of(grid)]
        for layer in self._layers:
            x = x + self._attend(layer, self._normed(x, layer.norm1))
            x = x + F.linear(self._activation(F.linear(self._normed(x, layer.norm2), *layer.up)), *layer.down)
        return F.linear(self._shuffled(self._normed(x, self._norm), grid), self._connector)

    def _normed(self, x: Tensor, norm: tuple[Tensor, Tensor]) -> Tensor:
        return F.layer_norm(x, x.shape[-1:], *norm, self._config.vision_config.layer_norm_eps)

    def _attend(self, layer: _Layer, x: Tensor) -> Tensor:
        q, k, v = heads_of(F.linear(x, *layer.qkv), self._config.vision_config.num_attention_heads)
        return F.linear(attend(q, k, v).flatten(2), *layer.out)

    def _shuffled(self, x: Tensor, grid: tuple[int, int]) -> Tensor:
        """Return one row for every square of patches: their values, in rows of the square."""
        scale = self._config.scale_factor
        squares = x.view(len(x), grid[0] // scale, scale, grid[1] // scale, scale, x.shape[-1])
        return squares.transpose(2, 3).reshape(len(x), -1, scale**2 * x.shape[-1])

    def _find_positions(self, grid: tuple[int, int]) -> Tensor:
        """Return the learned position of each patch: that at the same fraction of height and width."""
        down, across = (self._fractions(count) for count in grid)
        return (down[:, None] * self._side + across[None, :]).flatten().to(self._positions.device)

    def _fractions(self, count: int) -> Tensor:
        bounds = torch.arange(1 / self._side, 1.0, 1 / self._side)
        fractions = torch.arange(count, dtype=torch.float32) * (1.0 / torch.tensor(count))
        return torch.bucketize(fractions.clamp(max=1.0 - 1e-6), bounds, right=True)
