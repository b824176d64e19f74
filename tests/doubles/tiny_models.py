"""Tiny random models in the Hugging Face layout, for tests that need a real one. Needs torch and transformers."""

import json
from pathlib import Path

WORDS = 300  # tokens of the tiny tokenizer: bytes, then specials
CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
SPECIALS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")


def make_tiny_model(directory: Path, family: str = "llama", seed: int = 0, **changes: object) -> Path:
    """Write a random model of `family` (llama, mistral, qwen2, qwen3) with a byte tokenizer; return `directory`.

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
    prefix = {"llama": "Llama", "mistral": "Mistral", "qwen2": "Qwen2", "qwen3": "Qwen3"}[family]
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
