"""smoldiff as a torch model: the modules of Qwen3 under their usual names, with attention that is given as a mask."""

import torch
from torch import nn
from torch.nn import functional

from tools.smoldiff.directory import EPS, SHAPE, THETA, VOCABULARY

HIDDEN, FFN, HEAD = SHAPE["hidden_size"], SHAPE["intermediate_size"], SHAPE["head_dim"]
HEADS, KV_HEADS = SHAPE["num_attention_heads"], SHAPE["num_key_value_heads"]


class Attention(nn.Module):
    """Grouped-query attention with normalised queries and keys."""

    def __init__(self) -> None:
        super().__init__()
        self.q_proj = nn.Linear(HIDDEN, HEADS * HEAD, bias=False)
        self.k_proj = nn.Linear(HIDDEN, KV_HEADS * HEAD, bias=False)
        self.v_proj = nn.Linear(HIDDEN, KV_HEADS * HEAD, bias=False)
        self.o_proj = nn.Linear(HEADS * HEAD, HIDDEN, bias=False)
        self.q_norm = nn.RMSNorm(HEAD, EPS)
        self.k_norm = nn.RMSNorm(HEAD, EPS)

    def forward(self, hidden: torch.Tensor, rope: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        """Return the sum over the positions that `mask` ([queries, keys] or one for each row) allows."""
        rows, length, _ = hidden.shape
        queries = _rotate(self.q_norm(self.q_proj(hidden).view(rows, length, HEADS, HEAD)), rope)
        keys = _rotate(self.k_norm(self.k_proj(hidden).view(rows, length, KV_HEADS, HEAD)), rope)
        values = self.v_proj(hidden).view(rows, length, KV_HEADS, HEAD).transpose(1, 2)
        keys, values = (each.repeat_interleave(HEADS // KV_HEADS, 1) for each in (keys, values))
        queries, keys = queries.to(values.dtype), keys.to(values.dtype)
        mixed = functional.scaled_dot_product_attention(queries, keys, values, attn_mask=mask)
        result: torch.Tensor = self.o_proj(mixed.transpose(1, 2).reshape(rows, length, HEADS * HEAD))
        return result


def _rotate(states: torch.Tensor, rope: torch.Tensor) -> torch.Tensor:
    """Return the states ([rows, length, heads, size]) with their positions, as [rows, heads, length, size]."""
    cosine, sine = rope
    first, second = states.transpose(1, 2).float().chunk(2, -1)
    return torch.cat((first * cosine - second * sine, second * cosine + first * sine), -1)


class Mlp(nn.Module):
    """A gated feed-forward network."""

    def __init__(self) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(HIDDEN, FFN, bias=False)
        self.up_proj = nn.Linear(HIDDEN, FFN, bias=False)
        self.down_proj = nn.Linear(FFN, HIDDEN, bias=False)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return what is added to the hidden states."""
        result: torch.Tensor = self.down_proj(functional.silu(self.gate_proj(hidden)) * self.up_proj(hidden))
        return result


class Layer(nn.Module):
    """One layer of the transformer."""

    def __init__(self) -> None:
        super().__init__()
        self.self_attn = Attention()
        self.mlp = Mlp()
        self.input_layernorm = nn.RMSNorm(HIDDEN, EPS)
        self.post_attention_layernorm = nn.RMSNorm(HIDDEN, EPS)

    def forward(self, hidden: torch.Tensor, rope: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        """Return the hidden states after this layer."""
        hidden = hidden + self.self_attn(self.input_layernorm(hidden), rope, mask)
        result: torch.Tensor = hidden + self.mlp(self.post_attention_layernorm(hidden))
        return result


class Smoldiff(nn.Module):
    """The whole model; its output is for the token AT a position, not for the next one."""

    def __init__(self) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(VOCABULARY, HIDDEN)
        self.layers = nn.ModuleList(Layer() for _ in range(SHAPE["num_hidden_layers"]))
        self.norm = nn.RMSNorm(HIDDEN, EPS)
        for name, weight in self.named_parameters():
            if weight.ndim == 2:
                deep = name.endswith(("o_proj.weight", "down_proj.weight"))
                nn.init.normal_(weight, std=0.02 if "embed" in name else (0.5 if deep else 1.0) * HIDDEN**-0.5)

    def forward(self, ids: torch.Tensor, positions: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        """Return the last hidden states of `ids` ([rows, length]), all of which have these `positions`."""
        hidden = self.embed_tokens(ids)
        rope = rotations(positions)
        for layer in self.layers:
            hidden = layer(hidden, rope, mask)
        result: torch.Tensor = self.norm(hidden)
        return result

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return the logits of the tokens at the positions of these hidden states."""
        return functional.linear(hidden, self.embed_tokens.weight)

    def tensors(self) -> dict[str, torch.Tensor]:
        """Return the weights under the names of Qwen3, in bfloat16."""
        return {
            f"model.{name}": weight.detach().to("cpu", torch.bfloat16).contiguous()
            for name, weight in self.state_dict().items()
        }

    def load_tensors(self, tensors: dict[str, torch.Tensor]) -> None:
        """Take weights that `tensors` returned."""
        self.load_state_dict({name.removeprefix("model."): weight for name, weight in tensors.items()})


def rotations(positions: torch.Tensor) -> torch.Tensor:
    """Return cosine and sine of the rotary angles, [2, positions, half a head]."""
    pairs = torch.arange(0, HEAD, 2, device=positions.device, dtype=torch.float32)
    angles = positions[:, None].float() * THETA ** (-pairs / HEAD)
    return torch.stack((angles.cos(), angles.sin()))


def block_causal(length: int, block_length: int, device: torch.device | str) -> torch.Tensor:
    """Return the mask with which a position sees all positions up to the end of its block."""
    block = torch.arange(length, device=device) // block_length
    return block[:, None] >= block[None, :]


def doubled(length: int, block_length: int, device: torch.device | str) -> torch.Tensor:
    """Return the mask for a clean copy of a text followed by a noisy one.

    Clean blocks are block-causal. A noisy block sees the clean blocks before it, and itself.
    """
    block = torch.arange(length, device=device) // block_length
    queries, keys = block[:, None], block[None, :]
    clean = torch.cat((queries >= keys, torch.zeros(length, length, dtype=torch.bool, device=device)), 1)
    return torch.cat((clean, torch.cat((queries > keys, queries == keys), 1)))
