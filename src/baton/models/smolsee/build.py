"""Builds the model directory of smolsee from that of SmolLM2 and the trained weights."""

import json
from collections.abc import Iterator
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

from baton.engine_kit.bfloat16 import from_float32, to_float32
from baton.engine_kit.safetensors_file import SafetensorsFile
from baton.engine_kit.safetensors_writing import write_bfloat16_tensors

if TYPE_CHECKING:
    import numpy as np

    Floats = np.ndarray[Any, Any]

SMOLSEE_REVISION = "1"  # increment when the weights or the files of the directory change
FILES = Path(__file__).parent
IMAGE_SIZE = 128
PATCH_SIZE = 16
SCALE = 2
IMAGE_TOKENS = (IMAGE_SIZE // PATCH_SIZE // SCALE) ** 2
NEW_TOKENS = ("<image>", "<fake_token_around_image>", "<global-img>")
VISION = {
    "model_type": "idefics3_vision",
    "hidden_size": 256,
    "intermediate_size": 1024,
    "num_hidden_layers": 8,
    "num_attention_heads": 4,
    "image_size": IMAGE_SIZE,
    "patch_size": PATCH_SIZE,
}
_TEXT = "model.text_model."
_EMBEDDINGS = f"{_TEXT}embed_tokens.weight"


def build_smolsee(base: Path, target: Path) -> None:
    """Write the model directory `target`; `base` is the directory of SmolLM2. Raises ConfigError and OSError."""
    target.mkdir()
    vocabulary = _write_config(base, target)
    _write_generation(base, target)
    _write_tokenizer(base, target, vocabulary)
    _write_processor(target)
    _write_weights(base, target)


def _write_config(base: Path, target: Path) -> int:
    """Write the configuration; return how many tokens SmolLM2 has."""
    text = json.loads((base / "config.json").read_text())
    vocabulary: int = text["vocab_size"]
    _write_json(
        target / "config.json",
        {
            "architectures": ["Idefics3ForConditionalGeneration"],
            "model_type": "idefics3",
            "image_token_id": vocabulary,
            "scale_factor": SCALE,
            "tie_word_embeddings": text["tie_word_embeddings"],
            "torch_dtype": "bfloat16",
            "vision_config": VISION,
            "text_config": {**text, "vocab_size": vocabulary + len(NEW_TOKENS)},
            **{name: text[name] for name in ("bos_token_id", "eos_token_id", "pad_token_id")},
        },
    )
    return vocabulary


def _write_generation(base: Path, target: Path) -> None:
    """It answers with what it sees, so nothing is left to chance."""
    generation = json.loads((base / "generation_config.json").read_text())
    ends = {name: generation[name] for name in ("bos_token_id", "eos_token_id", "pad_token_id")}
    _write_json(target / "generation_config.json", {**ends, "temperature": 0.0})


def _write_tokenizer(base: Path, target: Path, vocabulary: int) -> None:
    tokenizer = json.loads((base / "tokenizer.json").read_text())
    plain = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    tokenizer["added_tokens"] += [
        {"id": vocabulary + number, "content": token, **plain} for number, token in enumerate(NEW_TOKENS)
    ]
    (target / "tokenizer.json").write_text(json.dumps(tokenizer))
    config = json.loads((base / "tokenizer_config.json").read_text())
    config |= {
        "chat_template": (FILES / "template.jinja").read_text(),
        "additional_special_tokens": list(NEW_TOKENS),
        "processor_class": "Idefics3Processor",
    }
    _write_json(target / "tokenizer_config.json", config)


def _write_processor(target: Path) -> None:
    """A picture becomes one square, however wide it is: smolsee has not learned to read splits."""
    _write_json(
        target / "preprocessor_config.json",
        {
            "image_processor_type": "Idefics3ImageProcessor",
            "processor_class": "Idefics3Processor",
            "do_convert_rgb": True,
            "do_resize": True,
            "size": {"longest_edge": IMAGE_SIZE},
            "max_image_size": {"longest_edge": IMAGE_SIZE},
            "resample": 1,
            "do_image_splitting": False,
            "do_rescale": True,
            "rescale_factor": 1 / 255,
            "do_normalize": True,
            "image_mean": [0.5, 0.5, 0.5],
            "image_std": [0.5, 0.5, 0.5],
            "do_pad": True,
        },
    )
    _write_json(
        target / "processor_config.json", {"processor_class": "Idefics3Processor", "image_seq_len": IMAGE_TOKENS}
    )


def _write_weights(base: Path, target: Path) -> None:
    """Write SmolLM2's weights with the adapters merged, and the tower and connector."""
    with SafetensorsFile(base / "model.safetensors") as language, SafetensorsFile(FILES / "weights.safetensors") as new:
        shapes = {_TEXT + name.removeprefix("model."): tensor.shape for name, tensor in language.tensors.items()}
        rows, size = shapes[_EMBEDDINGS]
        shapes[_EMBEDDINGS] = (rows + len(NEW_TOKENS), size)
        seeing = [name for name in new.tensors if name.startswith(("model.vision_model.", "model.connector."))]
        shapes |= {name: new.tensors[name].shape for name in seeing}
        tensors = chain(_language(language, new), (_read(new, name) for name in seeing))
        write_bfloat16_tensors(target / "model.safetensors", shapes, tensors)


def _language(language: SafetensorsFile, new: SafetensorsFile) -> Iterator[bytes]:
    for base_name in language.tensors:
        name = _TEXT + base_name.removeprefix("model.")
        data = _read(language, base_name)
        adapter = name.removesuffix(".weight")
        if f"{adapter}.lora_A.weight" in new.tensors:
            data = _merge(data, _floats(new, f"{adapter}.lora_A.weight"), _floats(new, f"{adapter}.lora_B.weight"))
        elif name == _EMBEDDINGS:
            data += _read(new, "new_rows")
        yield data


def _merge(weight: bytes, down: "Floats", up: "Floats") -> bytes:
    """Return the weight with what its adapter adds."""
    added = up @ down
    return from_float32(to_float32(weight).reshape(added.shape) + added)


def _floats(file: SafetensorsFile, name: str) -> "Floats":
    return to_float32(_read(file, name)).reshape(file.tensors[name].shape)


def _read(file: SafetensorsFile, name: str) -> bytes:
    data = bytearray(file.tensors[name].nbytes)
    file.read_into(name, data)
    return bytes(data)


def _write_json(path: Path, content: dict[str, object]) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n")
