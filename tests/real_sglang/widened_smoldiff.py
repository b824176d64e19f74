"""smoldiff with the mask token that SGLang takes for granted in an SDAR model. Needs neither SGLang nor torch."""

import json
import shutil
from collections.abc import Iterator
from pathlib import Path

from baton.engine_kit.safetensors_file import SafetensorsFile
from baton.engine_kit.safetensors_writing import write_bfloat16_tensors
from baton.models.directory import resolve_model

MASK = 151669
VOCABULARY = 151680
_EMBEDDINGS = "model.embed_tokens.weight"
_OUTPUT = "lm_head.weight"
_WEIGHTS = "model.safetensors"


def widened_smoldiff(directory: Path) -> Path:
    """Write smoldiff with SGLang's mask token to `directory`, which must not exist; return it.

    The rows of added tokens are zeros: in training such tokens were counted beside the vocabulary, so that they do not
    change confidences. The row of the mask moves to its new place. All other tokens keep their ids, and the tokenizer
    stays as it is. The configuration says qwen3 because transformers does not know sdar; SGLang goes by the
    architecture. The output layer gets a table of its own, equal to the embeddings: SGLang cannot load an SDAR model
    that shares it.
    """
    smoldiff = resolve_model("smoldiff", directory)
    shutil.copytree(smoldiff, directory, ignore=shutil.ignore_patterns("*.py", "__pycache__", _WEIGHTS, "*.jsonl"))
    config = json.loads((smoldiff / "config.json").read_text())
    changes = {"model_type": "qwen3", "vocab_size": VOCABULARY, "mask_token_id": MASK, "tie_word_embeddings": False}
    (directory / "config.json").write_text(json.dumps(config | changes, indent=2))
    with SafetensorsFile(smoldiff / _WEIGHTS) as file:
        shapes = {name: tensor.shape for name, tensor in file.tensors.items()}
        shapes[_EMBEDDINGS] = shapes[_OUTPUT] = (VOCABULARY, shapes[_EMBEDDINGS][1])
        write_bfloat16_tensors(directory / _WEIGHTS, shapes, _tensors(file, config["mask_token_id"]))
    return directory


def _tensors(file: SafetensorsFile, mask: int) -> Iterator[bytes]:
    """Yield the tensors in the order of the file, and the output layer."""
    for name in (*file.tensors, _EMBEDDINGS):
        tensor = file.tensors[name]
        data = bytearray(tensor.nbytes)
        file.read_into(name, data)
        yield _widened(bytes(data), 2 * tensor.shape[1], mask) if name == _EMBEDDINGS else bytes(data)


def _widened(table: bytes, row_bytes: int, mask: int) -> bytes:
    rows = [table[start : start + row_bytes] for start in range(0, len(table), row_bytes)]
    nothing = bytes(row_bytes)
    moved = [*rows[:mask], nothing, *rows[mask + 1 :]]
    added = (MASK - len(rows)) * row_bytes
    return b"".join((*moved, bytes(added), rows[mask], bytes((VOCABULARY - MASK - 1) * row_bytes)))
