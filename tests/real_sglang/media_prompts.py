"""Prompts with media for a tiny random Qwen2.5-VL, and what plain transformers makes of them."""

import base64
import io
import json
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from baton.handlers.placeholders import expand
from baton.ports.engine import EncodedRows, EncodeWork
from baton.protocol.ids import new_request_id
from baton.protocol.media import MediaEmbedding, MediaFile, PlacedItem
from tests.real_sglang.hardware import HAS_VIDEO
from tests.vision_models import noise_frames, noise_png, special_token

IMAGE, VIDEO = special_token("qwen", "<|image_pad|>"), special_token("qwen", "<|video_pad|>")
START, END = special_token("qwen", "<|vision_start|>"), special_token("qwen", "<|vision_end|>")


def video_file(frames: int = 16, rate: int = 8, seed: int = 0) -> MediaFile:
    """Return an MP4 file. Needs PyAV."""
    import av

    file = io.BytesIO()
    with av.open(file, "w", format="mp4") as container:
        stream: Any = container.add_stream("mpeg4", rate=rate)
        stream.width, stream.height, stream.pix_fmt = 80, 64, "yuv420p"
        stream.bit_rate = 4_000_000
        for picture in noise_frames(frames, 80, 64, seed):
            container.mux(stream.encode(av.VideoFrame.from_ndarray(picture, format="rgb24")))
        container.mux(stream.encode())
    return MediaFile(modality="video", data=file.getvalue())


FILES = {
    "small": MediaFile(modality="image", data=noise_png(60, 60, 1)),
    "wide": MediaFile(modality="image", data=noise_png(150, 60, 2)),
    "tall": MediaFile(modality="image", data=noise_png(60, 150, 3)),
    "other": MediaFile(modality="image", data=noise_png(60, 60, 4)),
    **({"film": video_file()} if HAS_VIDEO else {}),
}
# What a prompt consists of: text, and media by their names.
Parts = Sequence[str]
_PROMPTS: dict[str, Parts] = {
    "one image": ("See: ", "@small", " What is it?"),
    "another image": ("See: ", "@other", " What is it?"),
    "images and text": ("First ", "@wide", " then ", "@tall", " and again ", "@wide", " end."),
    "images without text": ("@tall", "@small", "@small"),
    "video": ("Look: ", "@film", " What happens?"),
    "images and videos": ("@small", " before ", "@film", " and ", "@tall", " between ", "@film", " end."),
}
PROMPTS = {name: parts for name, parts in _PROMPTS.items() if HAS_VIDEO or "@film" not in parts}


def files_of(parts: Parts, files: Mapping[str, MediaFile]) -> tuple[MediaFile, ...]:
    return tuple(files[part[1:]] for part in parts if part.startswith("@"))


def encode_work(parts: Parts, files: Mapping[str, MediaFile]) -> EncodeWork:
    return EncodeWork(
        request_id=new_request_id("encode"), token_ids=rendered(parts, files), media=files_of(parts, files)
    )


def rendered(parts: Parts, files: Mapping[str, MediaFile]) -> tuple[int, ...]:
    """Return the tokens of a prompt as a chat template renders it: one placeholder for each item."""
    tokens: list[int] = []
    for part in parts:
        if part.startswith("@"):
            tokens += [START, VIDEO if files[part[1:]].modality == "video" else IMAGE, END]
        else:
            tokens += tokens_of(part)
    return tuple(tokens)


def tokens_of(text: str) -> list[int]:
    """Return the tokens of a text of printable ASCII."""
    return [ord(letter) - 33 if letter != " " else 220 for letter in text]


def placed(
    tokens: Sequence[int], rows: Sequence[EncodedRows], with_data: bool = True
) -> tuple[tuple[int, ...], tuple[MediaEmbedding, ...]]:
    """Return the expanded prompt and its media, as handlers place them."""
    indexes = [index for index, token in enumerate(tokens) if token in (IMAGE, VIDEO)]
    items = [PlacedItem(item=each.item, index=index) for each, index in zip(rows, indexes, strict=True)]
    expanded, positions = expand(tokens, items)
    return expanded, tuple(
        MediaEmbedding(
            item=each.item,
            position=position,
            dtype=each.dtype,
            size=each.size,
            data=each.data if with_data else None,
        )
        for each, position in zip(rows, positions, strict=True)
    )


def transformers_answers(model: Path, prompts: Mapping[str, Parts], files: Mapping[str, MediaFile], tokens: int) -> Any:
    """Return what plain transformers answers to `prompts`, by their names."""

    def part_of(part: str) -> object:
        if not part.startswith("@"):
            return part
        file = files[part[1:]]
        return {"modality": file.modality, "data": base64.b64encode(file.data).decode()}

    done = subprocess.run(
        [sys.executable, "-m", "tests.real_sglang.plain_transformers", str(model), str(tokens)],
        input=json.dumps([[part_of(part) for part in parts] for parts in prompts.values()]),
        stdout=subprocess.PIPE,
        cwd=Path(__file__).parents[2],
        text=True,
        timeout=300,
        check=True,
    )
    answers = next(line for line in done.stdout.splitlines() if line.startswith("@"))
    return dict(zip(prompts, json.loads(answers[1:]), strict=True))
