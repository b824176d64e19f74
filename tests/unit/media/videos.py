"""Small videos, made by PyAV. Frame `i` of `n` is grey, of the brightness 255 * i / (n - 1)."""

import io
from collections.abc import Iterator
from typing import Any

import av
import numpy as np


def brightness(index: int, frames: int) -> int:
    return 255 * index // max(frames - 1, 1)


def video(
    frames: int = 20,
    fps: int = 10,
    kind: str = "mp4",
    codec: str = "mpeg4",
    size: tuple[int, int] = (32, 24),
    keyframe_every: int = 8,
    seconds_between: int | None = None,
) -> bytes:
    """Return a video file; with `seconds_between` its frames are that far apart, whatever `fps` says."""
    file = io.BytesIO()
    with av.open(file, "w", format=kind) as container:
        stream: Any = container.add_stream(codec, rate=fps)
        stream.width, stream.height = size
        stream.pix_fmt = "rgb8" if codec == "gif" else "yuv420p"
        stream.gop_size = keyframe_every
        for frame in _grey(frames, size):
            if seconds_between is not None:
                frame.pts = frame.pts * fps * seconds_between
            container.mux(stream.encode(frame))
        container.mux(stream.encode())
    return file.getvalue()


def lying_samples(data: bytes, count: int) -> bytes:
    """Return an MP4 whose header claims `count` samples of one byte each."""
    at = data.index(b"stsz") + 8
    return data[:at] + (1).to_bytes(4, "big") + count.to_bytes(4, "big") + data[at + 8 :]


def _grey(frames: int, size: tuple[int, int]) -> Iterator[Any]:
    for index in range(frames):
        picture = np.full((size[1], size[0], 3), brightness(index, frames), np.uint8)
        frame = av.VideoFrame.from_ndarray(picture, format="rgb24")
        frame.pts = index
        yield frame
