"""The built-in engine over HTTP, token for token equal to a plain transformers forward: images and video, in every
layout and over every transport."""

import base64
import io
import json
from collections.abc import Iterator, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
from PIL import Image

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from safetensors.torch import save  # noqa: E402

from baton.engines.torch.vision.model import read_layout  # noqa: E402
from baton.engines.torch.vision.prepare import prepare  # noqa: E402
from baton.engines.torch.vision.runner import normalise  # noqa: E402
from baton.protocol.media import MediaFile  # noqa: E402
from tests.e2e.disagg_load import EXACT, MODEL  # noqa: E402
from tests.e2e.harness import Serve, eventually  # noqa: E402
from tests.unit.media.videos import video as make_video  # noqa: E402
from tests.vision_models import make_tiny_idefics3, make_tiny_qwen25vl, noise, special_token  # noqa: E402

pytestmark = [pytest.mark.e2e, pytest.mark.torch]

TOKENS = 12
LAYOUTS: dict[str, dict[str, int]] = {
    "all in one": {},
    "EP/D": {"prefill": 1, "decode": 1},
    "E/PD": {"encoders": 1},
    "E/P/D": {"prefill": 1, "decode": 1, "encoders": 1},
}
slow = pytest.mark.slow


class Case(NamedTuple):
    """One system to start."""

    model: str
    layout: str
    transport: str = "shm"


CASES = [
    Case("idefics3", "all in one"),
    Case("qwen", "E/P/D"),
    *(pytest.param(Case("idefics3", layout), marks=slow) for layout in ("EP/D", "E/PD", "E/P/D")),
    *(pytest.param(Case("qwen", layout), marks=slow) for layout in ("all in one", "EP/D", "E/PD")),
    *(pytest.param(Case("qwen", "E/P/D", transport), marks=slow) for transport in ("tcp", "nixl")),
    *(pytest.param(Case("idefics3", "E/PD", transport), marks=slow) for transport in ("tcp", "nixl")),
]


class Video(NamedTuple):
    data: bytes


class Rows(NamedTuple):
    """An embedding file: the rows of an image, computed by the client."""

    image: Image.Image


Part = str | Image.Image | Video | Rows


@lru_cache(maxsize=1)
def video() -> Video:
    return Video(make_video(frames=8, size=(84, 56), fps=4))


def prompts(model: str) -> list[tuple[Part, ...]]:
    """Return prompts: one image, several, mixed with text, and video where the model takes it."""
    one, two = noise(100, 80, 1), noise(37, 90, 2)
    found: list[tuple[Part, ...]] = [("what is this? ", one), (one, "and ", two, two, "are what?")]
    found += [("rows ", Rows(two), " and ", one)]
    if model == "qwen":
        found += [("see ", video()), (one, "before ", video(), " and after ", two, ".")]
    return found


class Reference:
    """The model in transformers."""

    def __init__(self, name: str, directory: Path) -> None:
        self._name = name
        self._model: Any = transformers.AutoModelForImageTextToText.from_pretrained(directory, dtype=torch.float32)
        self._processor: Any = transformers.AutoImageProcessor.from_pretrained(directory)
        self._tokenizer: Any = transformers.AutoTokenizer.from_pretrained(directory)
        self._layout: Any = read_layout(directory)

    def tokens(self, parts: Sequence[Part]) -> list[int]:
        """Return what the model generates, greedily."""
        body = "".join(self._expanded(part) for part in parts)
        text = f"<|im_start|>user\n{body}<|im_end|>\n<|im_start|>assistant\n"
        ids = torch.tensor([self._tokenizer.encode(text, add_special_tokens=False)])
        with torch.no_grad():
            out = self._model.generate(
                input_ids=ids,
                attention_mask=torch.ones_like(ids),
                **self._inputs(parts, ids),
                max_new_tokens=TOKENS,
                min_new_tokens=TOKENS,
                do_sample=False,
                pad_token_id=0,
            )
        return [int(token) for token in out[0, ids.shape[1] :]]

    def file(self, image: Image.Image) -> bytes:
        """Return the rows of an image as an embedding file."""
        inputs = self._inputs([image], torch.zeros(1, 1))
        second = inputs["pixel_attention_mask" if self._name == "idefics3" else "image_grid_thw"]
        with torch.no_grad():
            found = self._model.model.get_image_features(inputs["pixel_values"], second).pooler_output
        rows = torch.cat(list(found)).reshape(-1, found[0].shape[-1]).contiguous()
        grid = {} if self._name == "idefics3" else {"image_grid_thw": second}
        return bytes(save({"mm_embeddings": rows, **grid}))

    def _expanded(self, part: Part) -> str:
        if isinstance(part, str):
            return part
        if isinstance(part, Rows):
            part = part.image
        if self._name == "idefics3":
            return "<fake_token_around_image><global-img>" + "<image>" * 16 + "<fake_token_around_image>"
        kind = "video" if isinstance(part, Video) else "image"
        frames, height, width = self._video(part).item.grid[0] if isinstance(part, Video) else self._grid(part)
        return f"<|vision_start|>{f'<|{kind}_pad|>' * (frames * height * width // 4)}<|vision_end|>"

    def _grid(self, image: Image.Image) -> tuple[int, int, int]:
        [grid] = self._processor(images=[image], return_tensors="np")["image_grid_thw"].tolist()
        return tuple(grid)

    def _video(self, part: Video) -> Any:
        return prepare(self._layout, "model", MediaFile(modality="video", data=part.data))

    def _inputs(self, parts: Sequence[Part], ids: Any) -> dict[str, Any]:
        parts = [part.image if isinstance(part, Rows) else part for part in parts]
        images = [part for part in parts if isinstance(part, Image.Image)]
        inputs: dict[str, Any] = {}
        if images:
            nested = [images] if self._name == "idefics3" else images
            inputs = dict(self._processor(images=nested, return_tensors="pt"))
        videos = [self._video(part) for part in parts if isinstance(part, Video)]
        if videos:
            pixels = [normalise(one.patches, self._layout.colours.table()) for one in videos]
            inputs["pixel_values_videos"] = torch.from_numpy(np.concatenate(pixels)).flatten(0, 1)
            inputs["video_grid_thw"] = torch.tensor([one.item.grid[0] for one in videos])
            inputs["second_per_grid_ts"] = torch.tensor([one.item.seconds_per_grid for one in videos])
        if self._name == "qwen":
            pads = [special_token("qwen", f"<|{kind}_pad|>") for kind in ("image", "video")]
            inputs["mm_token_type_ids"] = (ids == pads[0]).long() + 2 * (ids == pads[1]).long()
        return inputs


class Running(NamedTuple):
    case: Case
    system: Serve
    reference: Reference


@pytest.fixture(scope="module", params=CASES, ids=lambda case: f"{case.model}-{case.layout}-{case.transport}")
def running(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    case: Case = request.param
    make = {"idefics3": make_tiny_idefics3, "qwen": make_tiny_qwen25vl}[case.model]
    directory = make(tmp_path_factory.mktemp(case.model))
    counts = LAYOUTS[case.layout]
    flags = ("--encode", str(counts["encoders"])) if "encoders" in counts else ()
    system = Serve(
        tmp_path_factory.mktemp("system"),
        *("--model", str(directory), *EXACT, *flags),
        *("--kv-transports", case.transport, "--torch-threads", "1"),
        engine="torch",
        **counts,
    )
    try:
        system.wait_ready()
        yield Running(case, system, Reference(case.model, directory))
        system.stop()
    finally:
        system.close()


def _part(part: Part, reference: Reference) -> dict[str, Any]:
    if isinstance(part, str):
        return {"type": "text", "text": part}
    if isinstance(part, Rows):
        url = "data:application/safetensors;base64," + base64.b64encode(reference.file(part.image)).decode()
        return {"type": "image_url", "image_url": {"url": url}}
    if isinstance(part, Video):
        url = "data:video/mp4;base64," + base64.b64encode(part.data).decode()
        return {"type": "video_url", "video_url": {"url": url}}
    file = io.BytesIO()
    part.save(file, "PNG")
    url = "data:image/png;base64," + base64.b64encode(file.getvalue()).decode()
    return {"type": "image_url", "image_url": {"url": url}}


def answer(running: Running, parts: Sequence[Part]) -> dict[str, Any]:
    body = {
        "model": MODEL,
        "messages": [{"role": "user", "content": [_part(part, running.reference) for part in parts]}],
        "temperature": 0,
        "max_tokens": TOKENS,
        "ignore_eos": True,
        "return_token_ids": True,
    }
    status, text = running.system.post("/v1/chat/completions", body)
    assert status == 200, text
    return dict(json.loads(text))


def test_tokens_equal_those_of_transformers(running: Running) -> None:
    case, system, reference = running
    if "encoders" in LAYOUTS[case.layout]:
        encoder = system.workers - 1
        eventually(
            lambda: answer(running, (noise(8, 8),)) and system.ended("completed", encoder, role="encode"),
            what="the encode worker is called",
        )
    for parts in prompts(case.model):
        assert answer(running, parts)["choices"][0]["token_ids"] == reference.tokens(parts), parts
    system.assert_quiet()
