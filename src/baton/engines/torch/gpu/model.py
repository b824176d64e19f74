"""The Llama family over a paged KV cache with the kernels of this package. `models/llama.py` is the reference."""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F  # noqa: N812 - the usual name

from baton.engines.torch.gpu.decode_attention import DecodeScratch, decode
from baton.engines.torch.gpu.fused import add_norm, gate, rotate_and_store
from baton.engines.torch.gpu.prefill_attention import prefill, prefill_uncached
from baton.engines.torch.models.config import LlamaConfig
from baton.engines.torch.models.llama import Layer, Weights, network
from baton.engines.torch.models.sparse import Dispatch, RoutedLayer


class PagedStep(NamedTuple):
    """The input of one forward pass: one row for each token, in int32.

    `rows` are rows of the block tables and `indexes` the places of tokens in their sequences. `positions` are [tokens],
    or [3, tokens] in time, height and width. The last `decodes` tokens are each the newest of a sequence; the `tiles`
    (see `prefill_attention.prefill`) have all others; the first `uncached` of them have only keys that the pass
    computes. `embedded` are rows of media, each with the token from which on they replace embeddings.
    """

    tokens: Tensor
    rows: Tensor
    indexes: Tensor
    positions: Tensor
    tiles: Tensor | None
    uncached: int
    decodes: int
    embedded: Sequence[tuple[int, Tensor]] = ()


class PagedLlama:
    """The forward pass. `kv` is [layers, 2, slots, kv_heads, head_dim], in blocks of `size` slots.

    `tables` has the blocks of sequences. At most `most_decodes` tokens decode in a pass.
    """

    def __init__(
        self,
        config: LlamaConfig,
        weights: Weights,
        kv: Tensor,
        cos: Tensor,
        sin: Tensor,
        tables: Tensor,
        size: int,
        most_decodes: int,
        dispatch: Dispatch | None = None,
    ) -> None:
        """`dispatch` selects the slots of a mixture-of-experts model."""
        self._config = config
        self._weights = weights
        self._kv = kv
        self._cos = cos
        self._sin = sin
        self._tables = tables
        self._size = size
        self._dispatch = dispatch
        self._sections = config.spatial.sections if config.spatial is not None else ()
        self._scratch = DecodeScratch(most_decodes, config.heads, config.head_dim, config.kv_heads, kv.device)
        self.routed: list[RoutedLayer] = []
        """The experts and slots of each row of the last pass, for each sparse layer."""

    def forward(self, step: PagedStep) -> Tensor:
        """Compute all rows, write their keys and values to the cache, and return the last hidden states."""
        config = self._config
        x = F.embedding(step.tokens, self._weights.embed)
        for first, rows in step.embedded:
            x[first : first + len(rows)] = rows
        self.routed = []
        added: Tensor | None = None
        for layer, (keys, values) in zip(self._weights.layers, self._kv, strict=True):
            h = add_norm(x, added, layer.input_norm, config.eps)
            attended = self._attend(layer, F.linear(h, layer.qkv, layer.qkv_bias), keys, values, step)
            added = F.linear(attended, layer.o, layer.o_bias)
            h = add_norm(x, added, layer.post_norm, config.eps)
            added = network(config, layer, self._dispatch, h, step.positions, self.routed, gate)
        return add_norm(x, added, self._weights.norm, config.eps)

    def logits(self, hidden: Tensor) -> Tensor:
        """Return float32 logits for rows of hidden states."""
        return F.linear(hidden, self._weights.head).float()

    def _attend(self, layer: Layer, qkv: Tensor, keys: Tensor, values: Tensor, step: PagedStep) -> Tensor:
        config, tables, size = self._config, self._tables, self._size
        norms = (layer.q_norm, layer.k_norm) if layer.q_norm is not None and layer.k_norm is not None else None
        qkv = rotate_and_store(
            qkv,
            config.heads,
            step.positions,
            self._sections,
            self._cos,
            self._sin,
            norms,
            config.eps,
            keys,
            values,
            tables,
            step.rows,
            step.indexes,
            size,
        )
        out = torch.empty(len(qkv), config.heads, config.head_dim, dtype=qkv.dtype, device=qkv.device)
        q = qkv[:, : config.heads]
        if step.uncached and step.tiles is not None:
            prefill_uncached(qkv, config.heads, step.indexes, step.tiles[: step.uncached], out)
        if step.tiles is not None and step.uncached < len(step.tiles):
            prefill(q, keys, values, tables, step.rows, step.indexes, step.tiles[step.uncached :], size, out)
        if step.decodes:
            last = slice(len(qkv) - step.decodes, None)
            rows, indexes = step.rows[last], step.indexes[last]
            decode(q[last], keys, values, tables, rows, indexes, size, self._scratch, out[last])
        return out.view(len(qkv), config.q_size)
