"""Tiny random models in the Hugging Face layout, for tests that need a real one. Needs torch and transformers."""

import json
from pathlib import Path

WORDS = 300  # tokens of the tiny tokenizer: bytes, then specials
CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
SPECIALS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
PREFIXES = {
    "llama": "Llama",
    "mistral": "Mistral",
    "qwen2": "Qwen2",
    "qwen3": "Qwen3",
    "qwen2_moe": "Qwen2Moe",
    "qwen3_moe": "Qwen3Moe",
}


def make_tiny_model(directory: Path, family: str = "llama", seed: int = 0, **changes: object) -> Path:
    """Write a random model of `family`, a key of PREFIXES, with a byte tokenizer; return `directory`.

    `changes` go to the model's configuration.
    """
    import torch
    import transformers

    settings: dict[str, object] = {
        "vocab_size": WORDS,
        "hidden_size": 48,
        "intermediate_size": 96,
        "num_hidden_layers": 3,
        "num_attention_heads": 6,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "max_position_embeddings": 4096,
        "initializer_range": 0.3,
        "tie_word_embeddings": False,
        "bos_token_id": None,
        "pad_token_id": None,
        "eos_token_id": 256,
    }
    if family == "mistral":
        settings["sliding_window"] = None
    if family.endswith("_moe"):
        settings |= {"num_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 32}
    if family == "qwen2_moe":
        settings["shared_expert_intermediate_size"] = 40
    prefix = PREFIXES[family]
    config = getattr(transformers, f"{prefix}Config")(**(settings | changes))
    torch.manual_seed(seed)
    model = getattr(transformers, f"{prefix}ForCausalLM")(config).to(torch.float32)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith(("norm.weight", "bias")):
                parameter.add_(torch.randn_like(parameter) * 0.2)  # else nobody would notice them missing
    model.save_pretrained(directory)
    write_byte_tokenizer(directory)
    return directory


MASK = WORDS - 1  # no text becomes this token
_DIFFUSION = {
    "sdar": ("qwen3", "SDARForCausalLM"),
    "sdar_moe": ("qwen3_moe", "SDARMoeForCausalLM"),
    "llada": ("llama", "LLaDAModelLM"),
}
_LLADA_TOP = {"embed_tokens": "wte", "norm": "ln_f"}
_LLADA_LAYER = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "q_proj",
    "self_attn.k_proj": "k_proj",
    "self_attn.v_proj": "v_proj",
    "self_attn.o_proj": "attn_out",
    "post_attention_layernorm": "ff_norm",
    "mlp.gate_proj": "ff_proj",
    "mlp.up_proj": "up_proj",
    "mlp.down_proj": "ff_out",
}


def make_tiny_diffusion(
    directory: Path, layout: str = "sdar", seed: int = 0, changes: dict[str, object] | None = None, **fields: object
) -> Path:
    """Write a random diffusion language model of `layout` (sdar, sdar_moe, llada); return `directory`.

    `changes` go to the configuration of the plain Qwen3 or Llama in `directory`/plain, which has the same weights, and
    `fields` to the config.json of the diffusion model.
    """
    from safetensors.torch import load_file, save_file

    family, architecture = _DIFFUSION[layout]
    plain = make_tiny_model(directory / "plain", family, seed, **(changes or {}))
    content = json.loads((plain / "config.json").read_text())
    tensors = load_file(plain / "model.safetensors")
    if layout != "llada":
        content |= {"architectures": [architecture], "model_type": layout, "block_size": 4}
    else:
        content = _llada_config(content)
        tensors = {_llada_name(name): tensor for name, tensor in tensors.items()}
    save_file(tensors, directory / "model.safetensors")
    (directory / "config.json").write_text(json.dumps({**content, "mask_token_id": MASK, **fields}))
    write_byte_tokenizer(directory)
    return directory


def _llada_config(content: dict[str, object]) -> dict[str, object]:
    names = {
        "d_model": "hidden_size",
        "n_layers": "num_hidden_layers",
        "n_heads": "num_attention_heads",
        "n_kv_heads": "num_key_value_heads",
        "mlp_hidden_size": "intermediate_size",
        "max_sequence_length": "max_position_embeddings",
        "weight_tying": "tie_word_embeddings",
        "rms_norm_eps": "rms_norm_eps",
        "vocab_size": "vocab_size",
        "embedding_size": "vocab_size",
        "eos_token_id": "eos_token_id",
        "head_dim": "head_dim",
    }
    written = {name: content[plain] for name, plain in names.items()}
    kind = {"block_type": "llama", "layer_norm_type": "rms", "activation_type": "silu", "rope": True, "alibi": False}
    return {"architectures": [_DIFFUSION["llada"][1]], "model_type": "llada", "rope_theta": 10000.0, **written, **kind}


def _llada_name(name: str) -> str:
    if name == "lm_head.weight":
        return "model.transformer.ff_out.weight"
    part = name.removeprefix("model.").removesuffix(".weight")
    if not part.startswith("layers."):
        return f"model.transformer.{_LLADA_TOP[part]}.weight"
    _, number, rest = part.split(".", 2)
    return f"model.transformer.blocks.{number}.{_LLADA_LAYER[rest]}.weight"


def write_byte_tokenizer(directory: Path) -> None:
    """Write a tokenizer with one token for each byte, and a chat template."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({letter: number for number, letter in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(special, special=True) for special in SPECIALS])
    tokenizer.save(str(directory / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": SPECIALS[0],
        "chat_template": CHAT_TEMPLATE,
    }
    (directory / "tokenizer_config.json").write_text(json.dumps(settings))
