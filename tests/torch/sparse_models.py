"""Random mixture-of-experts models in memory, their slots, and steps of them with torch and with the native step."""

import math
from collections.abc import Sequence
from typing import Any

import msgspec
import pytest
import torch
from torch import Tensor

from baton.engines.torch.experts.slots import ExpertSlots
from baton.engines.torch.models.config import LlamaConfig, Rope
from baton.engines.torch.models.experts import ExpertShape
from baton.engines.torch.models.llama import LlamaModel, Span, Step, carve_weights, named_parts, rotary_tables
from baton.engines.torch.models.sparse import RoutedLayer
from baton.engines.torch.native.decoder import NativeDecoder, Rows
from baton.engines.torch.native.library import load_decoder_library
from baton.experts.placement import Row, Shape

EXPERTS = ExpertShape(count=8, per_token=3, ffn=40, shared_ffn=0, normalised=True, layers=(0, 1))
BLOCK = 16
BLOCKS = 40


def sparse_config(experts: dict[str, Any] | None = None, **changes: Any) -> LlamaConfig:
    plain = LlamaConfig(
        family="qwen3_moe",
        vocab=97,
        hidden=64,
        ffn=72,
        layers=2,
        heads=4,
        kv_heads=2,
        head_dim=16,
        eps=1e-6,
        context=BLOCK * BLOCKS,
        theta=10000.0,
        rope=Rope(),
        tied=True,
        qkv_bias=False,
        o_bias=False,
        qk_norm=True,
        experts=msgspec.structs.replace(EXPERTS, **(experts or {})),
    )
    return msgspec.structs.replace(plain, **changes)


class SparseModel:
    """One random model: the same weights for the same configuration, whatever its slots and ranks."""

    def __init__(
        self,
        config: LlamaConfig,
        dtype: torch.dtype = torch.float32,
        redundant: int = 0,
        ranks: int = 1,
        dynamic: bool = False,
    ) -> None:
        assert config.experts is not None
        self.config, self.dtype = config, dtype
        self.shape = Shape(experts=config.experts.count, redundant=redundant, ranks=ranks)
        self.weights = carve_weights(config, lambda shape: torch.zeros(shape, dtype=dtype), self.shape.physical)
        layers = [layer.experts for layer in self.weights.layers if layer.experts is not None]
        self.slots = ExpertSlots(self.shape, config.experts.layers, layers, dynamic, torch.device("cpu"))
        self.fill(seed=1)
        self.kv = torch.zeros(config.layers, 2, BLOCKS, BLOCK, config.kv_heads, config.head_dim, dtype=dtype)
        self.angles = rotary_tables(config, config.context, torch.device("cpu"))

    def fill(self, seed: int) -> None:
        """Replace all weights by random ones."""
        numbers = torch.Generator().manual_seed(seed)
        parts = named_parts(self.config, self.weights) | self.slots.parts
        for name in sorted(parts):
            part = parts[name]
            scale, mean = (0.2, 1.0) if part.dim() == 1 else (1.5 / math.sqrt(part.shape[-1]), 0.0)
            part.copy_(mean + scale * torch.randn(part.shape, generator=numbers))
        self.slots.fill_copies()

    def native(self, threads: int = 2) -> NativeDecoder:
        if load_decoder_library() is None:
            pytest.skip("no native step on this machine")
        return NativeDecoder(self.config, self.weights, self.kv, *self.angles, threads, self.slots)

    def prompt(self, length: int, seed: int = 0) -> list[int]:
        numbers = torch.Generator().manual_seed(seed)
        return torch.randint(self.config.vocab, (length,), generator=numbers).tolist()

    def expected(self, tokens: Sequence[int]) -> Tensor:
        """Return the logits of a prompt as torch computes them."""
        return self.computed(tokens)[0]

    def computed(self, tokens: Sequence[int]) -> tuple[Tensor, list[RoutedLayer]]:
        """Return the logits of a prompt and the routes of its rows as torch computes them, in a cache of its own."""
        config = self.config
        kv = torch.zeros(config.layers, 2, BLOCKS * BLOCK, config.kv_heads, config.head_dim, dtype=self.dtype)
        model = LlamaModel(config, self.weights, kv, *self.angles, self.slots.dispatch)
        positions = torch.arange(len(tokens))
        step = Step(torch.tensor(tokens), positions, positions, [Span(0, len(tokens), 0, positions)], [])
        return model.logits(model.forward(step)), model.routed


def rows(tokens: Sequence[int], start: int = 0, first_block: int = 0) -> Rows:
    """Return tokens of a sequence whose blocks follow each other."""
    blocks = -(-(start + len(tokens)) // BLOCK)
    return Rows(list(tokens), start, list(range(first_block, first_block + blocks)))


def random_row(shape: Shape, seed: int) -> Row:
    """Return a row of a layout with every expert at least once."""
    numbers = torch.Generator().manual_seed(seed)
    more = torch.randint(shape.experts, (shape.redundant,), generator=numbers)
    row = torch.cat((torch.arange(shape.experts), more))
    return row[torch.randperm(len(row), generator=numbers)].tolist()
