"""Small videos, made by PyAV. Frame `i` of `n` is grey, of the brightness 255 * i / (n - 1)."""

import io
import struct
from collections.abc import Iterator
from fractions import Fraction
from typing import Any

import av
import numpy as np
from PIL import Image


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


def turned(clockwise: int) -> bytes:
    """Return an MP4 whose stored frames are white on the left, shown after so many quarter turns."""
    file = io.BytesIO()
    with av.open(file, "w", format="mp4") as container:
        stream: Any = container.add_stream("mpeg4", rate=10)
        stream.width, stream.height, stream.pix_fmt = 32, 24, "yuv420p"
        picture = np.zeros((24, 32, 3), np.uint8)
        picture[:, :16] = 255
        for _ in range(6):
            container.mux(stream.encode(av.VideoFrame.from_ndarray(picture, format="rgb24")))
        container.mux(stream.encode())
    data, one = file.getvalue(), 0x10000
    at = data.index(struct.pack(">9i", one, 0, 0, 0, one, 0, 0, 0, 1 << 30), data.index(b"tkhd"))
    first, second = [(one, 0), (0, one), (-one, 0), (0, -one)][clockwise]
    matrix = struct.pack(">9i", first, second, 0, -second, first, 0, 0, 0, 1 << 30)
    return data[:at] + matrix + data[at + len(matrix) :]


def of_sizes(*sizes: tuple[int, int]) -> bytes:
    """Return a video with a frame of each size. Its header has the first."""
    file = io.BytesIO()
    with av.open(file, "w", format="matroska") as container:
        stream: Any = container.add_stream("mjpeg", rate=10)
        stream.width, stream.height = sizes[0]
        stream.pix_fmt = "yuvj420p"
        for index, size in enumerate(sizes):
            picture = io.BytesIO()
            Image.new("RGB", size).save(picture, "JPEG")
            packet = av.Packet(picture.getvalue())
            packet.stream, packet.is_keyframe, packet.time_base = stream, True, Fraction(1, 10)
            packet.pts = packet.dts = index
            container.mux(packet)
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
