"""The Llama family (Llama, SmolLM2, Mistral, Qwen2, Qwen3) over a paged KV cache, with merged projections.

Weights are plain tensors in the row order of the model's files; nothing is packed, so they can be replaced in place.
Sparse layers of the mixture-of-experts models have experts (`sparse.py`) besides or instead of a dense network.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F  # noqa: N812 - the usual name

from baton.engines.torch.models.config import LlamaConfig, inverse_frequencies
from baton.engines.torch.models.sparse import Dispatch, ExpertWeights, RoutedLayer, carve_experts, mix_experts

Carve = Callable[[tuple[int, ...]], Tensor]


class Layer(NamedTuple):
    """The weights of one layer. `qkv` is query, key, value rows; `gate_up` is gate, then up rows.

    In a sparse layer, which has `experts`, `gate_up` and `down` are the shared expert's, if there is one.
    """

    input_norm: Tensor
    qkv: Tensor
    qkv_bias: Tensor | None
    q_norm: Tensor | None
    k_norm: Tensor | None
    o: Tensor
    o_bias: Tensor | None
    post_norm: Tensor
    gate_up: Tensor | None
    down: Tensor | None
    experts: ExpertWeights | None = None


class Weights(NamedTuple):
    """The weights of a model; `head` is `embed` itself when they are tied."""

    embed: Tensor
    layers: tuple[Layer, ...]
    norm: Tensor
    head: Tensor


def dense_ffn(config: LlamaConfig, layer: int) -> int:
    """Return the width of the network that every token uses in a layer; 0 if a sparse layer has no shared expert."""
    return config.experts.shared_ffn if config.experts and layer in config.experts.layers else config.ffn


def carve_weights(config: LlamaConfig, tensor: Carve, slots: int = 0) -> Weights:
    """Return weights without content, each created by `tensor(shape)`. Sparse layers have `slots` for experts."""
    hidden, q, kv = config.hidden, config.q_size, config.kv_size

    def layer(number: int) -> Layer:
        ffn = dense_ffn(config, number)
        return Layer(
            input_norm=tensor((hidden,)),
            qkv=tensor((q + 2 * kv, hidden)),
            qkv_bias=tensor((q + 2 * kv,)) if config.qkv_bias else None,
            q_norm=tensor((config.head_dim,)) if config.qk_norm else None,
            k_norm=tensor((config.head_dim,)) if config.qk_norm else None,
            o=tensor((hidden, q)),
            o_bias=tensor((hidden,)) if config.o_bias else None,
            post_norm=tensor((hidden,)),
            gate_up=tensor((2 * ffn, hidden)) if ffn else None,
            down=tensor((hidden, ffn)) if ffn else None,
            experts=(
                carve_experts(config.experts, hidden, slots, tensor)
                if config.experts and number in config.experts.layers
                else None
            ),
        )

    embed = tensor((config.vocab, hidden))
    layers = tuple(layer(number) for number in range(config.layers))
    return Weights(embed, layers, tensor((hidden,)), embed if config.tied else tensor((config.vocab, hidden)))


def named_parts(config: LlamaConfig, weights: Weights) -> dict[str, Tensor]:
    """Return the target of each tensor of the model's files, by its name there, without those of routed experts."""
    parts = {"model.embed_tokens.weight": weights.embed, "model.norm.weight": weights.norm}
    if not config.tied:
        parts["lm_head.weight"] = weights.head
    q, kv = config.q_size, config.kv_size
    for number, layer in enumerate(weights.layers):
        prefix = f"model.layers.{number}."
        parts[prefix + "input_layernorm.weight"] = layer.input_norm
        parts[prefix + "post_attention_layernorm.weight"] = layer.post_norm
        for kind, merged in (("weight", layer.qkv), ("bias", layer.qkv_bias)):
            if merged is not None:
                parts[prefix + f"self_attn.q_proj.{kind}"] = merged[:q]
                parts[prefix + f"self_attn.k_proj.{kind}"] = merged[q : q + kv]
                parts[prefix + f"self_attn.v_proj.{kind}"] = merged[q + kv :]
        for kind, tensor in (("weight", layer.o), ("bias", layer.o_bias)):
            if tensor is not None:
                parts[prefix + f"self_attn.o_proj.{kind}"] = tensor
        if layer.q_norm is not None and layer.k_norm is not None:
            parts[prefix + "self_attn.q_norm.weight"] = layer.q_norm
            parts[prefix + "self_attn.k_norm.weight"] = layer.k_norm
        parts |= _named_network(prefix + "mlp.", layer, dense_ffn(config, number))
    return parts


def _named_network(prefix: str, layer: Layer, ffn: int) -> dict[str, Tensor]:
    """Return the named targets of what follows attention in a layer."""
    parts: dict[str, Tensor] = {}
    if layer.experts is not None:
        parts[prefix + "gate.weight"] = layer.experts.router
        if layer.experts.shared_gate is not None:
            parts[prefix + "shared_expert_gate.weight"] = layer.experts.shared_gate
        prefix += "shared_expert."
    if layer.gate_up is not None and layer.down is not None:
        parts[prefix + "gate_proj.weight"] = layer.gate_up[:ffn]
        parts[prefix + "up_proj.weight"] = layer.gate_up[ffn:]
        parts[prefix + "down_proj.weight"] = layer.down
    return parts


def rotary_tables(config: LlamaConfig, positions: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return cosine and sine for every position and pair of dimensions, float32 [positions, head_dim / 2]."""
    frequencies, factor = inverse_frequencies(config)
    angles = torch.outer(torch.arange(positions, dtype=torch.float32), torch.tensor(frequencies, dtype=torch.float32))
    return (angles.cos() * factor).to(device), (angles.sin() * factor).to(device)


class Span(NamedTuple):
    """A part of a prompt: rows [first, first + length) of the step, after `before` tokens that are in the cache.

    `slots` are the cache rows of all tokens up to its end. A row sees the tokens up to the end of its block, which has
    `block` tokens; with 1 attention is causal.
    """

    first: int
    length: int
    before: int
    slots: Tensor
    block: int = 1


class Decodes(NamedTuple):
    """Rows that decode: from `first` on, n times `block` rows, each so many for one block of tokens.

    The rows of a block see the same tokens: `slots` are their cache rows, [n, longest], and `mask` hides the padding.
    """

    first: int
    slots: Tensor
    mask: Tensor
    block: int = 1

    @property
    def rows(self) -> slice:
        """The rows of the step."""
        return slice(self.first, self.first + len(self.slots) * self.block)


class Step(NamedTuple):
    """The input of one forward pass: one row for each token.

    `positions` are [rows], or [3, rows] in time, height and width. `embedded` are rows of media, each with the row of
    the step from which on they replace the embeddings of the tokens.
    """

    tokens: Tensor
    positions: Tensor
    slots: Tensor
    spans: list[Span]
    decodes: Sequence[Decodes]
    embedded: Sequence[tuple[int, Tensor]] = ()


class LlamaModel:
    """The forward pass in torch. `kv` is [layers, 2, slots, kv_heads, head_dim], where a slot holds one token."""

    def __init__(
        self,
        config: LlamaConfig,
        weights: Weights,
        kv: Tensor,
        cos: Tensor,
        sin: Tensor,
        dispatch: Dispatch | None = None,
    ) -> None:
        """`dispatch` selects the slots of a mixture-of-experts model."""
        self._config = config
        self._weights = weights
        self._kv = kv
        self._cos = cos
        self._sin = sin
        self._dispatch = dispatch
        self.routed: list[RoutedLayer] = []
        """The experts and slots of each row of the last pass, for each sparse layer."""

    def forward(self, step: Step) -> Tensor:
        """Compute all rows, write their keys and values to the cache, and return the last hidden states."""
        config = self._config
        x = self._weights.embed[step.tokens]
        for first, rows in step.embedded:
            x[first : first + len(rows)] = rows
        cos, sin = self._angles(self._cos, step.positions), self._angles(self._sin, step.positions)
        self.routed = []
        for layer, (keys, values) in zip(self._weights.layers, self._kv, strict=True):
            h = F.rms_norm(x, (config.hidden,), layer.input_norm, config.eps)
            attended = self._attend(layer, F.linear(h, layer.qkv, layer.qkv_bias), cos, sin, keys, values, step)
            x = x + F.linear(attended, layer.o, layer.o_bias)
            h = F.rms_norm(x, (config.hidden,), layer.post_norm, config.eps)
            x = x + network(config, layer, self._dispatch, h, step.positions, self.routed)
        return F.rms_norm(x, (config.hidden,), self._weights.norm, config.eps)

    def logits(self, hidden: Tensor) -> Tensor:
        """Return float32 logits for rows of hidden states."""
        return F.linear(hidden, self._weights.head).float()

    def _angles(self, table: Tensor, positions: Tensor) -> Tensor:
        """Return the cosines or sines of each row, [rows, 1, head_dim / 2]."""
        angles = table[positions]
        if positions.dim() == 2 and self._config.spatial is not None:
            parts = torch.split(angles, list(self._config.spatial.sections), dim=-1)
            angles = torch.cat([part[direction] for direction, part in enumerate(parts)], dim=-1)
        return angles.unsqueeze(1)

    def _attend(
        self, layer: Layer, qkv: Tensor, cos: Tensor, sin: Tensor, keys: Tensor, values: Tensor, step: Step
    ) -> Tensor:
        config = self._config
        heads, kv_heads, size = config.heads, config.kv_heads, config.head_dim
        rows = qkv.view(len(qkv), heads + 2 * kv_heads, size)
        qk, v = rows[:, : heads + kv_heads], rows[:, heads + kv_heads :]
        if layer.q_norm is not None and layer.k_norm is not None:
            q = F.rms_norm(qk[:, :heads], (size,), layer.q_norm, config.eps)
            k = F.rms_norm(qk[:, heads:], (size,), layer.k_norm, config.eps)
            qk = torch.cat((q, k), dim=1)
        qk = _rotate(qk, cos, sin)
        q, k = qk[:, :heads], qk[:, heads:]
        keys.index_copy_(0, step.slots, k)
        values.index_copy_(0, step.slots, v)
        out = torch.empty(len(qkv), heads, size, dtype=qkv.dtype, device=qkv.device)
        for span in step.spans:
            part = slice(span.first, span.first + span.length)
            if span.before:
                out[part] = _attend_span(q[part], keys[span.slots], values[span.slots], span.before, span.block)
            else:
                out[part] = _attend_span(q[part], k[part], v[part], 0, span.block)
        for decodes in step.decodes:
            out[decodes.rows] = _attend_decodes(q[decodes.rows], keys, values, decodes)
        return out.view(len(qkv), heads * size)


def _gated(gate_up: Tensor) -> Tensor:
    """Return silu of the first half of each row times the second half."""
    gate, up = gate_up.chunk(2, dim=-1)
    return F.silu(gate) * up


def network(
    config: LlamaConfig,
    layer: Layer,
    dispatch: Dispatch | None,
    h: Tensor,
    positions: Tensor,
    routed: list[RoutedLayer],
    gated: Callable[[Tensor], Tensor] = _gated,
) -> Tensor:
    """Compute what follows attention: the dense network, or the experts of each row and the shared one.

    `routed` has the sparse layers before this one, and gets this one if it is sparse.
    """
    out: Tensor | None = None
    if layer.gate_up is not None and layer.down is not None:
        out = F.linear(gated(F.linear(h, layer.gate_up)), layer.down)
    if layer.experts is None or dispatch is None or config.experts is None:
        assert out is not None
        return out
    if out is not None and layer.experts.shared_gate is not None:
        out = torch.sigmoid(F.linear(h, layer.experts.shared_gate)) * out
    mixed, chosen = mix_experts(config.experts, layer.experts, dispatch.layer(len(routed)), h, positions)
    routed.append(chosen)
    return mixed if out is None else mixed + out


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate each pair (i, i + half) of dimensions by the angle of its row."""
    a, b = x.float().chunk(2, dim=-1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1).to(x.dtype)


def _attend_span(q: Tensor, k: Tensor, v: Tensor, before: int, block: int) -> Tensor:
    """Attention of consecutive rows, after `before` keys of earlier rows, each to the end of its block."""
    group = q.shape[1] // k.shape[1]
    q, k, v = (x.transpose(0, 1).unsqueeze(0) for x in (q, k, v))
    if group > 1:
        k, v = k.repeat_interleave(group, dim=1), v.repeat_interleave(group, dim=1)
    if before == 0 and block == 1:
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True)
    else:
        positions = torch.arange(k.shape[2], device=q.device)
        ends = (positions[before:] // block + 1) * block
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=positions < ends.unsqueeze(1))
    return out.squeeze(0).transpose(0, 1)


def _attend_decodes(q: Tensor, keys: Tensor, values: Tensor, decodes: Decodes) -> Tensor:
    """Attention of one block per sequence: all its queries that share a key head are the rows of one attention call."""
    rows, heads, size = q.shape
    kv_heads, block = keys.shape[1], decodes.block
    k, v = keys[decodes.slots].transpose(1, 2), values[decodes.slots].transpose(1, 2)
    by_position = (rows // block, block, kv_heads, heads // kv_heads, size)
    grouped = q.view(by_position).transpose(1, 2).reshape(rows // block, kv_heads, -1, size)
    out = F.scaled_dot_product_attention(grouped, k, v, attn_mask=decodes.mask)
    return out.reshape(rows // block, kv_heads, block, -1, size).transpose(1, 2).reshape(rows, heads, size)
