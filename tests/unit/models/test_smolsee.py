"""smolsee: its directory is SmolLM2's with the trained weights merged, in the layout of Idefics3."""

import json
from pathlib import Path

import numpy as np
import pytest

from baton.engine_kit.bfloat16 import from_float32, to_float32
from baton.engine_kit.safetensors_file import SafetensorsFile
from baton.engine_kit.safetensors_writing import write_bfloat16_tensors
from baton.models.smolsee.build import FILES, build_smolsee

HIDDEN = 576
TOKENS = 5
QUERY = "layers.0.self_attn.q_proj"
ENDS = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 2}


@pytest.fixture
def base(tmp_path: Path) -> Path:
    """A directory like SmolLM2's, with a few of its tensors."""
    directory = tmp_path / "base"
    directory.mkdir()
    config = {"vocab_size": TOKENS, "tie_word_embeddings": True, "hidden_size": HIDDEN, **ENDS}
    (directory / "config.json").write_text(json.dumps(config))
    (directory / "generation_config.json").write_text(json.dumps({**ENDS, "repetition_penalty": 1.1}))
    (directory / "tokenizer.json").write_text(json.dumps({"added_tokens": [{"id": 0, "content": "<|im_start|>"}]}))
    (directory / "tokenizer_config.json").write_text(json.dumps({"chat_template": "old"}))
    shapes = {
        "model.embed_tokens.weight": (TOKENS, HIDDEN),
        f"model.{QUERY}.weight": (HIDDEN, HIDDEN),
        "model.norm.weight": (HIDDEN,),
    }
    ones = (from_float32(np.ones(shape, dtype=np.float32)) for shape in shapes.values())
    write_bfloat16_tensors(directory / "model.safetensors", shapes, ones)
    return directory


def read(path: Path, name: str) -> "np.ndarray[tuple[int, ...], np.dtype[np.float32]]":
    with SafetensorsFile(path) as file:
        data = bytearray(file.tensors[name].nbytes)
        file.read_into(name, data)
        return to_float32(bytes(data)).reshape(file.tensors[name].shape)


def test_adapters_are_merged_and_new_tokens_follow_the_old(base: Path, tmp_path: Path) -> None:
    build_smolsee(base, tmp_path / "smolsee")
    weights, trained = tmp_path / "smolsee" / "model.safetensors", FILES / "weights.safetensors"
    name = f"model.text_model.{QUERY}"
    expected = 1 + read(trained, f"{name}.lora_B.weight") @ read(trained, f"{name}.lora_A.weight")
    assert np.allclose(read(weights, f"{name}.weight"), expected, rtol=0.01)
    table = read(weights, "model.text_model.embed_tokens.weight")
    assert np.array_equal(table[:TOKENS], np.ones((TOKENS, HIDDEN)))
    assert np.array_equal(table[TOKENS:], read(trained, "new_rows"))
    assert np.array_equal(read(weights, "model.text_model.norm.weight"), np.ones(HIDDEN))
    connector = "model.connector.modality_projection.proj.weight"
    assert np.array_equal(read(weights, connector), read(trained, connector))


def test_the_files_around_the_weights_describe_a_model_that_sees(base: Path, tmp_path: Path) -> None:
    build_smolsee(base, tmp_path / "smolsee")

    def content(name: str) -> dict[str, object]:
        return dict(json.loads((tmp_path / "smolsee" / f"{name}.json").read_text()))

    assert content("config")["image_token_id"] == TOKENS
    added = content("tokenizer")["added_tokens"]
    assert isinstance(added, list)
    assert [(token["id"], token["content"]) for token in added[1:]] == [
        (TOKENS, "<image>"),
        (TOKENS + 1, "<fake_token_around_image>"),
        (TOKENS + 2, "<global-img>"),
    ]
    assert "<image>" in str(content("tokenizer_config")["chat_template"])
    assert content("generation_config") == {**ENDS, "temperature": 0.0}
    assert content("processor_config")["image_seq_len"] == 16
