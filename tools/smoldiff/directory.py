"""The files around smoldiff's weights: configuration, tokenizer and chat template.

A token is a byte, so that any text has tokens; the special tokens follow. The layout is that of SDAR.
"""

import json
from pathlib import Path

SHAPE = {
    "hidden_size": 256,
    "intermediate_size": 640,
    "num_hidden_layers": 6,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 32,
}
BYTES = 256
SPECIAL = (
    "<|end|>",
    "<|system|>",
    "<|user|>",
    "<|assistant|>",
    "<|mask|>",
    "<|unused_0|>",
    "<|unused_1|>",
    "<|unused_2|>",
)
END, SYSTEM, USER, ASSISTANT, MASK = range(BYTES, BYTES + 5)
VOCABULARY = BYTES + len(SPECIAL)
CONTEXT = 1024
THETA = 10_000.0
EPS = 1e-6
BLOCK_LENGTH = 16
THRESHOLD = 0.9
TEMPLATE = """\
{%- for message in messages -%}
  {{- '<|' ~ message.role ~ '|>' -}}
  {%- if message.content is string -%}
    {{- message.content -}}
  {%- else -%}
    {%- for part in message.content or [] -%}
      {{- part.text -}}
    {%- endfor -%}
  {%- endif -%}
  {{- '<|end|>' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}
  {{- '<|assistant|>' -}}
{%- endif -%}
"""


def write_directory(directory: Path) -> None:
    """Write all files of the model directory but the weights."""
    directory.mkdir(parents=True, exist_ok=True)
    ends = {"bos_token_id": None, "eos_token_id": END, "pad_token_id": END}
    _write(directory / "config.json", {**_config(), **ends, "mask_token_id": MASK, "block_size": BLOCK_LENGTH})
    decoding = {
        "temperature": 0.0,
        "remasking_strategy": "low_confidence_dynamic",
        "confidence_threshold": THRESHOLD,
    }
    _write(directory / "generation_config.json", {**ends, **decoding})
    _write(directory / "tokenizer.json", _tokenizer())
    _write(
        directory / "tokenizer_config.json",
        {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "eos_token": SPECIAL[0],
            "pad_token": SPECIAL[0],
            "mask_token": SPECIAL[MASK - BYTES],
            "model_max_length": CONTEXT,
            "clean_up_tokenization_spaces": False,
            "chat_template": TEMPLATE,
        },
    )


def _config() -> dict[str, object]:
    return {
        "architectures": ["SDARForCausalLM"],
        "model_type": "sdar",
        "vocab_size": VOCABULARY,
        **SHAPE,
        "hidden_act": "silu",
        "rms_norm_eps": EPS,
        "rope_theta": THETA,
        "max_position_embeddings": CONTEXT,
        "attention_bias": False,
        "tie_word_embeddings": True,
        "torch_dtype": "bfloat16",
    }


def _tokenizer() -> dict[str, object]:
    plain = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False, "use_regex": False}
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [{"id": BYTES + number, "content": token, **plain} for number, token in enumerate(SPECIAL)],
        "normalizer": None,
        "pre_tokenizer": level,
        "post_processor": None,
        "decoder": level,
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "vocab": {character: byte for byte, character in enumerate(byte_characters())},
            "merges": [],
        },
    }


def byte_characters() -> list[str]:
    """Return the characters for the bytes 0 to 255 in byte-level vocabularies: bytes that do not print have others."""
    printable = {*range(33, 127), *range(161, 173), *range(174, 256)}
    others = iter(range(256, 512))
    return [chr(byte if byte in printable else next(others)) for byte in range(BYTES)]


def _write(path: Path, content: dict[str, object]) -> None:
    path.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n")
