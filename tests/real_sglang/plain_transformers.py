"""Greedy answers of plain transformers, one whole forward for each prompt, in a process that has no SGLang.

Usage: plain_transformers.py MODEL TOKENS. It reads prompts as JSON from its standard input: lists of texts, and of
media as {modality, data}, where data are base64. It writes a list of lists of tokens.
"""

import base64
import io
import json
import sys
from pathlib import Path
from typing import Any

import torch
import transformers
from PIL import Image

MARKS = {
    "image": "<|vision_start|><|image_pad|><|vision_end|>",
    "video": "<|vision_start|><|video_pad|><|vision_end|>",
}


def inputs_of(processor: Any, parts: list[Any]) -> Any:
    """Return what the model's own processor makes of a prompt."""
    media: dict[str, list[Any]] = {"image": [], "video": []}
    for part in parts:
        if isinstance(part, dict):
            media[part["modality"]].append(base64.b64decode(part["data"]))
    text = "".join(part if isinstance(part, str) else MARKS[part["modality"]] for part in parts)
    options: dict[str, Any] = {}
    if media["image"]:
        options["images"] = [Image.open(io.BytesIO(data)).convert("RGB") for data in media["image"]]
    if media["video"]:
        options |= videos_of(media["video"])
    return processor(text=[text], return_tensors="pt", **options)


def videos_of(files: list[bytes]) -> dict[str, Any]:
    """Return videos with the frames that Baton takes: two a second, and at least four."""
    from baton.media.video import by_fps, decode_video
    from baton.protocol.media import MediaFile

    videos = [decode_video(MediaFile(modality="video", data=data), by_fps(2.0, 4, 768)) for data in files]
    return {
        "videos": [torch.from_numpy(video.frames).permute(0, 3, 1, 2) for video in videos],
        "do_sample_frames": False,
        "video_metadata": [
            {"fps": video.info.fps, "total_num_frames": video.info.frames, "frames_indices": list(video.indices)}
            for video in videos
        ],
    }


def main(model: Path, tokens: int) -> None:
    processor = transformers.AutoProcessor.from_pretrained(model)
    network = transformers.AutoModelForImageTextToText.from_pretrained(model, dtype=torch.float32).eval()
    answers = []
    for parts in json.load(sys.stdin):
        inputs = inputs_of(processor, parts)
        with torch.no_grad():
            made = network.generate(**inputs, max_new_tokens=tokens, min_new_tokens=tokens, do_sample=False)
        answers.append(made[0][inputs["input_ids"].shape[1] :].tolist())
    print("@" + json.dumps(answers))


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
