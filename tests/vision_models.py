"""Tiny random vision-language models in the Hugging Face layout, and pictures. Needs torch and transformers.

Both models have a byte tokenizer with one merge (two line breaks are one token, as in real tokenizers), a chat template
and the files of their processor. Weights are float32.
"""

import io
import json
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image

CHAT_SPECIALS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
IDEFICS3_SPECIALS = (
    "<image>",
    "<fake_token_around_image>",
    "<global-img>",
    "<end_of_utterance>",
    *(f"<row_{row}_col_{column}>" for row in range(1, 7) for column in range(1, 7)),
)
QWEN_SPECIALS = ("<|vision_start|>", "<|vision_end|>", "<|vision_pad|>", "<|image_pad|>", "<|video_pad|>")
_FIRST_SPECIAL = 257  # after the bytes and the merge
VOCABULARY = 320

_TEMPLATE = (
    "{%- for message in messages -%}{{- '<|im_start|>' ~ message.role ~ '\\n' -}}"
    "{%- if message.content is string -%}{{- message.content -}}{%- else -%}"
    "{%- for part in message.content or [] -%}PART{%- endfor -%}{%- endif -%}"
    "{{- '<|im_end|>\\n' -}}{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\\n' -}}{%- endif -%}"
)
IDEFICS3_TEMPLATE = _TEMPLATE.replace("PART", "{{- part.text if part.type == 'text' else '<image>' -}}")
QWEN_TEMPLATE = _TEMPLATE.replace(
    "PART",
    "{%- if part.type == 'text' -%}{{- part.text -}}"
    "{%- elif part.type in ['video', 'video_url'] -%}{{- '<|vision_start|><|video_pad|><|vision_end|>' -}}"
    "{%- else -%}{{- '<|vision_start|><|image_pad|><|vision_end|>' -}}{%- endif -%}",
)

_TEXT: dict[str, object] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 4096,
    "initializer_range": 0.3,
    "tie_word_embeddings": False,
    "bos_token_id": None,
    "pad_token_id": None,
    "eos_token_id": _FIRST_SPECIAL,
}


def make_tiny_idefics3(directory: Path, seed: int = 0, split: bool = False, **vision: object) -> Path:
    """Write a random Idefics3 model; return `directory`. With `split`, large images become several frames.

    A frame is 64 x 64 pixels and 16 rows. `vision` goes to the configuration of the tower.
    """
    import transformers

    tower = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
    config = transformers.Idefics3Config(
        vision_config={**tower, "image_size": 64, "patch_size": 8, "initializer_range": 0.2, **vision},
        text_config={"model_type": "llama", "head_dim": 16, **_TEXT},
        image_token_id=special_token("idefics3", "<image>"),
        scale_factor=2,
        tie_word_embeddings=False,
        pad_token_id=None,
    )
    _save_random(transformers.Idefics3ForConditionalGeneration, config, directory, seed)
    _write_tokenizer(directory, IDEFICS3_SPECIALS, IDEFICS3_TEMPLATE, "Idefics3Processor")
    preprocessor = {
        "image_processor_type": "Idefics3ImageProcessor",
        "size": {"longest_edge": 256 if split else 64},
        "max_image_size": {"longest_edge": 64},
        "resample": 1,
        "do_image_splitting": split,
        "image_mean": [0.5, 0.5, 0.5],
        "image_std": [0.5, 0.5, 0.5],
    }
    (directory / "preprocessor_config.json").write_text(json.dumps(preprocessor))
    (directory / "processor_config.json").write_text(
        json.dumps({"processor_class": "Idefics3Processor", "image_seq_len": 16})
    )
    return directory


def make_tiny_qwen25vl(directory: Path, seed: int = 0, wide_heads: bool = False, **vision: object) -> Path:
    """Write a random Qwen2.5-VL model; return `directory`. `vision` goes to the configuration of the tower.

    The heads of the language model have 16 numbers; with `wide_heads` 64, as kernels for GPUs want them.

    Patches are 14 x 14 pixels, one row of the language model is 2 x 2 patches, images have 4 to 64 rows.
    """
    import transformers

    tower: dict[str, object] = {"depth": 3, "hidden_size": 32, "intermediate_size": 48, "num_heads": 2}
    text = {**_TEXT, "hidden_size": 256, "intermediate_size": 384, "initializer_range": 0.12} if wide_heads else _TEXT
    sections = [8, 12, 12] if wide_heads else [2, 3, 3]
    config = transformers.Qwen2_5_VLConfig(
        vision_config={
            **tower,
            "out_hidden_size": text["hidden_size"],
            "window_size": 56,
            "fullatt_block_indexes": [1],
            "tokens_per_second": 2,
            "initializer_range": 0.2,
            **vision,
        },
        text_config={
            "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": sections},
            **text,
        },
        image_token_id=special_token("qwen", "<|image_pad|>"),
        video_token_id=special_token("qwen", "<|video_pad|>"),
        vision_start_token_id=special_token("qwen", "<|vision_start|>"),
        vision_end_token_id=special_token("qwen", "<|vision_end|>"),
        tie_word_embeddings=False,
    )
    _save_random(transformers.Qwen2_5_VLForConditionalGeneration, config, directory, seed)
    _write_tokenizer(directory, QWEN_SPECIALS, QWEN_TEMPLATE, "Qwen2_5_VLProcessor")
    preprocessor = {
        "image_processor_type": "Qwen2VLImageProcessor",
        "processor_class": "Qwen2_5_VLProcessor",
        "min_pixels": 4 * 28 * 28,
        "max_pixels": 64 * 28 * 28,
        "patch_size": 14,
        "temporal_patch_size": 2,
        "merge_size": 2,
        "image_mean": [0.48145466, 0.4578275, 0.40821073],
        "image_std": [0.26862954, 0.26130258, 0.27577711],
    }
    (directory / "preprocessor_config.json").write_text(json.dumps(preprocessor))
    return directory


def special_token(layout: str, text: str) -> int:
    """Return the token of `text` in the tokenizer of a layout (idefics3, qwen)."""
    specials = {"idefics3": IDEFICS3_SPECIALS, "qwen": QWEN_SPECIALS}[layout]
    return _FIRST_SPECIAL + (*CHAT_SPECIALS, *specials).index(text)


def noise(width: int, height: int, seed: int = 0) -> Image.Image:
    """Return a picture of random colours with soft edges, so that resizing keeps it apart from others."""
    coarse = np.random.default_rng(seed).integers(0, 256, (5, 5, 3), dtype=np.uint8)
    return Image.fromarray(coarse).resize((width, height), Image.Resampling.BICUBIC)


def noise_png(width: int, height: int, seed: int = 0) -> bytes:
    """Return `noise` as a PNG file."""
    file = io.BytesIO()
    noise(width, height, seed).save(file, "PNG")
    return file.getvalue()


def noise_frames(count: int, width: int, height: int, seed: int = 0) -> NDArray[np.uint8]:
    """Return different frames, [frame, y, x, colour]."""
    return np.stack([np.asarray(noise(width, height, 1000 * seed + number)) for number in range(count)])


def _save_random(kind: Any, config: Any, directory: Path, seed: int) -> None:
    import torch

    torch.manual_seed(seed)
    model = kind(config).to(torch.float32)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name or "ln_q" in name or name.endswith("bias"):
                parameter.add_(torch.randn_like(parameter) * 0.2)  # else nobody would notice them missing
    model.save_pretrained(directory)


def _write_tokenizer(directory: Path, specials: tuple[str, ...], template: str, processor: str) -> None:
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    letters = [*sorted(pre_tokenizers.ByteLevel.alphabet()), "ĊĊ"]
    tokenizer = Tokenizer(models.BPE({letter: number for number, letter in enumerate(letters)}, [("Ċ", "Ċ")]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    added = [AddedToken(special, special=True, normalized=False) for special in (*CHAT_SPECIALS, *specials)]
    tokenizer.add_special_tokens(added)
    tokenizer.save(str(directory / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": "<|im_end|>",
        "pad_token": "<|endoftext|>",
        "additional_special_tokens": list(specials),
        "chat_template": template,
        "processor_class": processor,
    }
    (directory / "tokenizer_config.json").write_text(json.dumps(settings))
