"""The model of the experts benchmark: a random mixture of experts in the layout of Qwen3-MoE, of a middle size."""

import json
import math
import random
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

CONFIG: dict[str, Any] = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "vocab_size": 8192,
    "hidden_size": 512,
    "intermediate_size": 1024,
    "moe_intermediate_size": 256,
    "num_hidden_layers": 8,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 64,
    "num_experts": 64,
    "num_experts_per_tok": 8,
    "norm_topk_prob": True,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
    "hidden_act": "silu",
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1_000_000.0,
    "tie_word_embeddings": False,
    "attention_bias": False,
    "use_sliding_window": False,
    "bos_token_id": None,
    "eos_token_id": 0,
    "torch_dtype": "bfloat16",
}
SHORT: dict[str, Any] = {"num_hidden_layers": 2, "num_experts": 16, "num_experts_per_tok": 2, "vocab_size": 1024}
"""Changes for a quick run."""
HOT_FACTOR = 3.0


def make_model(directory: Path, changes: dict[str, Any], skewed: bool = False) -> Path:
    """Write the model to `directory` and return it.

    In a skewed one, routers prefer the second quarter of the experts. In the initial layout these are on the first of
    two ranks, and have no copies.
    """
    config = CONFIG | changes
    directory.mkdir(parents=True)
    (directory / "config.json").write_text(json.dumps(config))
    torch.manual_seed(0)
    weights = {name: _random(shape) for name, shape in _shapes(config).items()}
    if skewed:
        quarter = config["num_experts"] // 4
        for name, value in weights.items():
            if name.endswith("mlp.gate.weight"):
                value[quarter : 2 * quarter] *= HOT_FACTOR
    save_file(weights, directory / "model.safetensors", {"format": "pt"})
    return directory


def make_token_prompts(changes: dict[str, Any], count: int, length: int, seed: str) -> list[list[int]]:
    """Return prompts of random tokens, since the model has no tokenizer."""
    tokens = range(1, (CONFIG | changes)["vocab_size"])
    return [random.Random(f"{seed} {number}").choices(tokens, k=length) for number in range(count)]


def _random(shape: tuple[int, ...]) -> torch.Tensor:
    if len(shape) == 1:
        return torch.ones(shape, dtype=torch.bfloat16)
    return (torch.randn(shape) / math.sqrt(shape[-1])).to(torch.bfloat16)


def _shapes(config: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    hidden, vocab = config["hidden_size"], config["vocab_size"]
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (vocab, hidden),
        "model.norm.weight": (hidden,),
        "lm_head.weight": (vocab, hidden),
    }
    for layer in range(config["num_hidden_layers"]):
        shapes |= {f"model.layers.{layer}.{name}.weight": shape for name, shape in _layer_shapes(config).items()}
    return shapes


def _layer_shapes(config: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    hidden, head, ffn = config["hidden_size"], config["head_dim"], config["moe_intermediate_size"]
    queries, keys = head * config["num_attention_heads"], head * config["num_key_value_heads"]
    shapes: dict[str, tuple[int, ...]] = {
        "input_layernorm": (hidden,),
        "post_attention_layernorm": (hidden,),
        "self_attn.q_proj": (queries, hidden),
        "self_attn.k_proj": (keys, hidden),
        "self_attn.v_proj": (keys, hidden),
        "self_attn.o_proj": (hidden, queries),
        "self_attn.q_norm": (head,),
        "self_attn.k_norm": (head,),
        "mlp.gate": (config["num_experts"], hidden),
    }
    for expert in range(config["num_experts"]):
        shapes |= {
            f"mlp.experts.{expert}.gate_proj": (ffn, hidden),
            f"mlp.experts.{expert}.up_proj": (ffn, hidden),
            f"mlp.experts.{expert}.down_proj": (hidden, ffn),
        }
    return shapes
