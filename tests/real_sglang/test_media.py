"""Images in the real SGLang, with a tiny random Qwen2-VL: as files, and as rows that were encoded elsewhere."""

import io
import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from baton.errors import InvalidRequest
from baton.protocol.media import MediaEmbedding, MediaFile
from tests.real_sglang.engines import Bench, TestedEngine
from tests.real_sglang.test_generating import answer_of, work

BEGIN, END, IMAGE, VIDEO = 260, 261, 262, 263
HIDDEN = 64


@pytest.fixture
def bench() -> Iterator[Bench]:
    made = Bench()
    yield made
    made.close()


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    import transformers

    directory = tmp_path_factory.mktemp("vl")
    text = {
        "vocab_size": 320,
        "hidden_size": HIDDEN,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 4096,
        "rope_scaling": {"type": "mrope", "mrope_section": [2, 3, 3]},
        "eos_token_id": 256,
        "bos_token_id": None,
    }
    vision = {"depth": 2, "embed_dim": 32, "hidden_size": HIDDEN, "num_heads": 2, "mlp_ratio": 2, "patch_size": 14}
    tokens = {"image_token_id": IMAGE, "video_token_id": VIDEO, "vision_start_token_id": BEGIN}
    config = transformers.Qwen2VLConfig(
        text_config=text, vision_config=vision, vision_end_token_id=END, tie_word_embeddings=False, **tokens
    )
    transformers.Qwen2VLForConditionalGeneration(config).float().save_pretrained(directory)
    write_processor(directory)
    written = json.loads((directory / "config.json").read_text())
    written["vision_config"]["in_chans"] = 3  # transformers has another name for it, SGLang has not
    (directory / "config.json").write_text(json.dumps(written))
    return directory


def write_processor(directory: Path) -> None:
    """Write a byte tokenizer with the model's special tokens, and how images are cut."""
    from tests.doubles.tiny_models import write_byte_tokenizer

    write_byte_tokenizer(directory)
    tokenizer = json.loads((directory / "tokenizer.json").read_text())
    marks = ("<|none|>", "<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>")
    plain = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    tokenizer["added_tokens"] += [{"id": 259 + n, "content": mark, **plain} for n, mark in enumerate(marks)]
    (directory / "tokenizer.json").write_text(json.dumps(tokenizer))
    settings = json.loads((directory / "tokenizer_config.json").read_text())
    (directory / "tokenizer_config.json").write_text(json.dumps(settings | {"pad_token": "<|endoftext|>"}))
    pixels = {"min_pixels": 784, "max_pixels": 50176, "patch_size": 14, "temporal_patch_size": 2, "merge_size": 2}
    kind = {"image_processor_type": "Qwen2VLImageProcessor", "processor_class": "Qwen2VLProcessor"}
    (directory / "preprocessor_config.json").write_text(
        json.dumps({**pixels, **kind, "image_mean": [0.5] * 3, "image_std": [0.5] * 3})
    )


def picture(seed: int) -> MediaFile:
    from PIL import Image

    file = io.BytesIO()
    Image.new("RGB", (56, 56), (seed, 255 - seed, 7)).save(file, "PNG")
    return MediaFile(modality="image", data=file.getvalue())


def rows(seed: int) -> MediaEmbedding:
    import torch

    torch.manual_seed(seed)
    data = torch.randn(4, HIDDEN).numpy().tobytes()
    return MediaEmbedding(modality="image", data=data, dtype="float32", shape=(4, HIDDEN), grid=((1, 4, 4),))


def test_images_are_seen_however_they_come(bench: Bench, model: Path) -> None:
    async def body() -> None:
        session = await bench.session(lambda: TestedEngine(model))
        assert session.engine.capabilities.modalities == {"text", "image", "video"}
        for prompt, images in (
            ((72, BEGIN, IMAGE, END, 74), [picture(1), picture(250)]),
            ((72, BEGIN, *(IMAGE,) * 4, END, 74), [rows(1), rows(2)]),
        ):
            answers = [(await answer_of(session, work(8, prompt=prompt, media=(image,))))[0] for image in images]
            assert answers[0] != answers[1]
            again = (await answer_of(session, work(8, prompt=prompt, media=(images[0],))))[0]
            assert again == answers[0]
        broken = MediaFile(modality="image", data=b"no image")
        with pytest.raises(InvalidRequest, match="image"):
            await answer_of(session, work(8, prompt=(72, BEGIN, IMAGE, END, 74), media=(broken,)))
        with pytest.raises(InvalidRequest, match="one precomputed embedding"):
            session.engine.submit(work(8, media=(rows(1), rows(2))))

    bench.run(body(), 150)
