"""From files to text: an engine that encodes for itself generates exactly what transformers generates."""

from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
pytest.importorskip("av")

from baton.config.engines import TorchOptions  # noqa: E402
from baton.engines.torch.vision.model import read_layout  # noqa: E402
from baton.engines.torch.vision.prepare import prepare  # noqa: E402
from baton.engines.torch.vision.qwen import QwenLayout  # noqa: E402
from baton.engines.torch.vision.runner import normalise  # noqa: E402
from baton.engines.torch.vision_language_engine import TorchVisionLanguageEngine  # noqa: E402
from baton.handlers.placeholders import expand, find_placeholders  # noqa: E402
from baton.ports.engine import EncodeWork, EngineInfo, Work  # noqa: E402
from baton.protocol.ids import new_request_id  # noqa: E402
from baton.protocol.media import MediaEmbedding, MediaFile, PlacedItem  # noqa: E402
from baton.protocol.requests import Sampling, StopConditions  # noqa: E402
from baton.testing import run_bounded, running  # noqa: E402
from tests.torch.torch_sessions import read  # noqa: E402
from tests.unit.media.videos import video  # noqa: E402
from tests.vision_models import make_tiny_idefics3, make_tiny_qwen25vl, noise, noise_png  # noqa: E402

TOKENS = 20
ENGINE = TorchOptions(device="cpu", dtype="float32", threads=1, blocks=256)
# So short that its positions in time do not exceed those in space: see `rule_of_qwen` in test_media_exact.py.
VIDEO = video(20, 10, size=(84, 56))


def prompt_text(tokenizer: Any, *parts: str) -> str:
    """Render a chat: a part is a text, or "image" or "video"."""
    content = [{"type": part} if part in ("image", "video") else {"type": "text", "text": part} for part in parts]
    chat = [{"role": "user", "content": content}]
    return str(tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True))


def generate(model: Any, inputs: dict[str, Any]) -> list[int]:
    """Generate with transformers."""
    length = inputs["input_ids"].shape[1]
    options: dict[str, Any] = {"max_new_tokens": TOKENS, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    return [int(token) for token in model.generate(**inputs, **options)[0, length:]]


async def answer(engine: TorchVisionLanguageEngine, info: EngineInfo, tokens: list[int], files: list[MediaFile]) -> Any:
    """Return the expanded prompt, and what the engine generates."""
    assert info.media is not None
    request = EncodeWork(request_id=new_request_id("encode"), token_ids=tuple(tokens), media=tuple(files))
    encoded = (await engine.encode(request)).items
    placed = []
    for modality in {file.modality for file in files}:
        items = [rows.item for rows in encoded if rows.item.modality == modality]
        found = find_placeholders(tokens, info.media.placeholders[modality], modality, len(items), None)
        placed += [PlacedItem(item=item, index=index) for item, index in zip(items, found, strict=True)]
    placed.sort(key=lambda each: each.index)
    expanded, positions = expand(tokens, placed)
    media = [
        MediaEmbedding(item=rows.item, position=position, dtype=rows.dtype, size=rows.size, data=rows.data)
        for rows, position in zip(encoded, positions, strict=True)
    ]
    work = Work(
        request_id=new_request_id("generate"),
        token_ids=expanded,
        media=tuple(media),
        max_tokens=TOKENS,
        stop=StopConditions(ignore_eos=True),
        sampling=Sampling(temperature=0.0),
    )
    return list(expanded), (await read(engine.submit(work)))[0]


def ask(directory: Path, text: str, files: list[MediaFile]) -> Any:
    tokens = transformers.AutoTokenizer.from_pretrained(directory)(text)["input_ids"]

    async def body() -> Any:
        engine = TorchVisionLanguageEngine(ENGINE, directory, "tiny")
        async with running(engine) as info:
            return await answer(engine, info, tokens, files)

    return run_bounded(body(), 60)


@pytest.mark.parametrize("split", [False, True])
@pytest.mark.parametrize("sizes", [[(150, 90)], [(64, 64), (37, 211), (64, 64)]])
def test_idefics3(split: bool, sizes: list[tuple[int, int]], tmp_path: Path) -> None:
    make_tiny_idefics3(tmp_path, split=split)
    processor = transformers.AutoProcessor.from_pretrained(tmp_path)
    model = transformers.Idefics3ForConditionalGeneration.from_pretrained(tmp_path, dtype=torch.float32)
    text = prompt_text(processor.tokenizer, "first", *(part for _ in sizes for part in ("image", "and")), "end")
    images = [noise(*size, seed=number) for number, size in enumerate(sizes)]
    files = [MediaFile(modality="image", data=noise_png(*size, seed=number)) for number, size in enumerate(sizes)]
    inputs = processor(text=text, images=images, return_tensors="pt")
    expanded, tokens = ask(tmp_path, text, files)
    assert expanded == inputs["input_ids"][0].tolist()
    assert tokens == generate(model, dict(inputs))


@pytest.mark.parametrize("kinds", [["image"], ["image", "image"], ["video"], ["image", "video", "image"]])
def test_qwen(kinds: list[str], tmp_path: Path) -> None:
    make_tiny_qwen25vl(tmp_path)
    model = transformers.Qwen2_5_VLForConditionalGeneration.from_pretrained(tmp_path, dtype=torch.float32)
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path)
    text = prompt_text(tokenizer, "first", *(part for kind in kinds for part in (kind, "and")), "end")
    data = {"video": VIDEO, "image": noise_png(150, 90)}
    files = [MediaFile(modality=kind, data=data[kind]) for kind in kinds]
    expanded, tokens = ask(tmp_path, text, files)
    assert tokens == generate(model, qwen_inputs(tmp_path, model.config, expanded, files))


def qwen_inputs(directory: Path, config: Any, tokens: list[int], files: list[MediaFile]) -> dict[str, Any]:
    """Return the inputs of transformers; its processor of video needs torchvision, so pixels are prepared here."""
    layout = read_layout(directory)
    assert isinstance(layout, QwenLayout)
    ids = torch.tensor([tokens])
    kinds = (ids == config.image_token_id).int() + 2 * (ids == config.video_token_id).int()
    inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "mm_token_type_ids": kinds}
    for modality, name in (("image", "pixel_values"), ("video", "pixel_values_videos")):
        prepared = [prepare(layout, "", file) for file in files if file.modality == modality]
        if prepared:
            pixels = [normalise(one.patches, layout.colours.table()) for one in prepared]
            inputs[name] = torch.cat([torch.from_numpy(each).flatten(0, 1) for each in pixels])
            inputs[f"{modality}_grid_thw"] = torch.tensor([one.item.grid[0] for one in prepared])
        if prepared and modality == "video":
            inputs["second_per_grid_ts"] = torch.tensor([one.item.seconds_per_grid for one in prepared])
    return inputs
