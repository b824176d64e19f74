"""A tiny mixture-of-experts model whose router prefers the experts that the trivial layout puts on the first rank."""

from pathlib import Path

from tests.real_sglang.hardware import ON_GPU

EXPERTS = 8
LAYERS = 2
PREFERRED = 3
PREFERENCE = 5.0


def make_moe_model(directory: Path) -> Path:
    """Write a random model in the layout of Qwen3-MoE with a byte tokenizer; return `directory`."""
    import torch
    import transformers

    from tests.doubles.tiny_models import write_byte_tokenizer

    hidden, head = (256, 64) if ON_GPU else (64, 16)
    sizes = {"hidden_size": hidden, "intermediate_size": 128, "moe_intermediate_size": 64, "num_hidden_layers": LAYERS}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": head, "vocab_size": 300}
    experts = {"num_experts": EXPERTS, "num_experts_per_tok": 2, "norm_topk_prob": True}
    rest = {
        "eos_token_id": 256,
        "bos_token_id": None,
        "initializer_range": 0.12 if ON_GPU else 0.3,
        "max_position_embeddings": 4096,
    }
    torch.manual_seed(5)
    model = transformers.Qwen3MoeForCausalLM(transformers.Qwen3MoeConfig(**sizes, **heads, **experts, **rest))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("mlp.gate.weight"):
                parameter[:PREFERRED] *= PREFERENCE
    model.to(torch.float32).save_pretrained(directory)
    write_byte_tokenizer(directory)
    return directory
