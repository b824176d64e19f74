"""Videos, decoded with PyAV (FFmpeg). All functions are slow: engines call them with `decoding.run_decoding`.

Nothing in a header is trusted: the frames of the file are counted and their times read before any is decoded, and
limits apply to what was found. FFmpeg reads only the bytes of the file: its demuxers for playlists, which open other
URLs, are not used.
"""

import io
import time
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from fractions import Fraction
from typing import TYPE_CHECKING, Any

import msgspec

from baton.errors import BatonError, InvalidRequest, Unsupported
from baton.media import mp4_boxes
from baton.protocol.media import MediaFile

if TYPE_CHECKING:
    import numpy as np

CODECS = ("h264", "hevc", "vp8", "vp9", "av1", "libdav1d", "mpeg4", "mpeg2video", "mjpeg", "gif")
MAX_STREAMS = 16
_FORMATS = "MP4, MOV, WebM, Matroska, GIF"


class VideoInfo(msgspec.Struct, frozen=True, kw_only=True):
    """A video, as counted: its frames, their rate, its duration in seconds, and its size before it is rotated."""

    frames: int
    fps: float
    duration_s: float
    width: int
    height: int


class Video(msgspec.Struct, frozen=True, kw_only=True):
    """Frames taken from a video: RGB, as it is shown, as an array of frames x height x width x 3 bytes.

    `indices` are their numbers in the video, `timestamps` their times in seconds from the first frame of the video.
    """

    info: VideoInfo
    frames: "np.ndarray"
    indices: tuple[int, ...]
    timestamps: tuple[float, ...]


Sampling = Callable[[VideoInfo], Sequence[int]]


def by_count(count: int) -> Sampling:
    """Return a sampling that takes `count` frames, evenly from the first to the last, or all if there are fewer."""
    return lambda info: _evenly(info.frames, min(count, info.frames))


def by_fps(fps: float, least: int = 1, most: int = 768) -> Sampling:
    """Return a sampling that takes `fps` frames a second, evenly, but at least `least` and at most `most` of them."""
    return lambda info: _evenly(info.frames, min(max(int(info.frames / info.fps * fps), least), most, info.frames))


def video_size(file: MediaFile) -> tuple[int, int]:
    """Return width and height of a video before it is rotated, from its header; nothing is decoded.

    Raises InvalidRequest unless it is a video in a supported format and, as far as the header tells, within
    `file.limits`.
    """
    with _Reader(file) as reader:
        reader.check_header()
        return reader.width, reader.height


def decode_video(file: MediaFile, sampling: Sampling) -> Video:
    """Return the frames of `file` whose numbers `sampling` returns, in order of time. Keeps `file.limits`.

    Raises InvalidRequest for a video that cannot be read or exceeds a limit.
    """
    with _Reader(file) as reader:
        reader.check_header()
        packets = reader.scan()
        info = packets.info(reader)
        indices = tuple(sorted({min(max(int(index), 0), info.frames - 1) for index in sampling(info)}))
        if len(indices) * reader.width * reader.height > file.limits.max_video_pixels:
            raise InvalidRequest(
                f"{file.place}: {len(indices)} frames of {reader.width} x {reader.height} pixels exceed the limit of"
                f" {file.limits.max_video_pixels} pixels for the frames of a video"
            )
        frames = reader.decode(packets, indices)
    times = tuple(float((packets.times[index] - packets.times[0]) * reader.time_base) for index in indices)
    return Video(info=info, frames=frames, indices=indices, timestamps=times)


class _Packets(msgspec.Struct, frozen=True):
    """The frames of a file in order of their times: the times, and those of keyframes."""

    times: list[int]
    keyframes: list[int]

    def info(self, reader: "_Reader") -> VideoInfo:
        frames = len(self.times)
        span = float((self.times[-1] - self.times[0]) * reader.time_base)
        fps = float(reader.average_rate or 0) or ((frames - 1) / span if span > 0 else 1.0)
        return VideoInfo(frames=frames, fps=fps, duration_s=span + 1 / fps, width=reader.width, height=reader.height)


class _Reader:
    """An open video. Every method raises InvalidRequest, also for what PyAV raises."""

    def __init__(self, file: MediaFile) -> None:
        self._file = file
        self._av = _pyav()
        self._deadline = time.monotonic() + file.limits.timeout_s
        self._container: Any = None

    def __enter__(self) -> "_Reader":
        kind = _container_format(self._file.data)
        if kind is None:
            raise InvalidRequest(f"{self._file.place}: it is not a video in a supported format ({_FORMATS})")
        if kind == "mov" and (problem := mp4_boxes.damage(self._file.data)) is not None:
            raise InvalidRequest(f"{self._file.place}: cannot read the video: {problem}")
        try:
            self._container = self._open(kind)
            streams = self._container.streams.video
        except Exception as error:
            self.__exit__()
            raise self._unreadable(error) from error
        if not streams or len(self._container.streams) > MAX_STREAMS:
            self.__exit__()
            raise InvalidRequest(f"{self._file.place}: the file has no video, or more than {MAX_STREAMS} streams")
        self._stream: Any = streams[0]
        self._prepare_decoder()
        return self

    def _open(self, kind: str) -> Any:
        # FFmpeg decodes frames while it opens a file whose container does not name their size.
        options = [self._decoder_options()] * MAX_STREAMS
        return self._av.open(io.BytesIO(self._file.data), format=kind, io_open=_refuse_io, stream_options=options)

    def _prepare_decoder(self) -> None:
        decoder = self._stream.codec_context
        if decoder is None or decoder.name not in CODECS:
            name = decoder.name if decoder is not None else "of the file"
            self.__exit__()
            raise InvalidRequest(f"{self._file.place}: the video codec {name} is not supported")
        decoder.options = self._decoder_options()
        decoder.thread_count = 1  # more threads keep more frames in memory
        # Read once: while it decodes, a decoder changes them to those of the last frame.
        self.width, self.height = int(decoder.width), int(decoder.height)

    def _decoder_options(self) -> dict[str, str]:
        """Decoders allocate frames of the size in the stream, whatever the container says."""
        return {"max_pixels": str(self._file.limits.max_frame_pixels)}

    def __exit__(self, *raised: object) -> None:
        if self._container is not None:
            self._container.close()

    @property
    def time_base(self) -> Fraction:
        return Fraction(self._stream.time_base or Fraction(1, 1000))

    @property
    def average_rate(self) -> Fraction | None:
        rate = self._stream.average_rate
        return Fraction(rate) if rate else None

    def check_header(self) -> None:
        self._check_frame_size(self.width, self.height)
        if self._stream.duration:
            self._check_duration(float(self._stream.duration * self.time_base))
        elif self._container.duration:
            self._check_duration(self._container.duration / self._av.time_base)
        self._check_count(self._stream.frames)

    def scan(self) -> _Packets:
        """Read all packets of the video without decoding them."""
        times: list[int] = []
        keyframes: list[int] = []
        for packet in self._packets():
            if packet.is_discard or (packet.pts is None and packet.dts is None):
                continue  # cut off by the container, or the empty packet at the end
            moment = int(packet.pts if packet.pts is not None else packet.dts)
            times.append(moment)
            if packet.is_keyframe:
                keyframes.append(moment)
            self._check_count(len(times))
        if not times:
            raise InvalidRequest(f"{self._file.place}: the video has no frames")
        times.sort()
        self._check_duration(float((times[-1] - times[0]) * self.time_base))
        return _Packets(times, sorted(keyframes))

    def decode(self, packets: _Packets, indices: Sequence[int]) -> "np.ndarray":
        """Decode the frames with these numbers."""
        import numpy as np

        frames = np.empty((0,), np.uint8)
        position: int | None = None  # the time of the last frame that was decoded
        source: Iterator[Any] = iter(())
        for place, index in enumerate(indices):
            wanted = packets.times[index]
            if position is None or _is_shorter_by_seeking(packets.keyframes, position, wanted):
                source = self._frames_from(wanted)
            frame = self._first_from(source, wanted)
            if place == 0:
                turns = round(frame.rotation / 90)
                size = (self.width, self.height) if turns % 2 else (self.height, self.width)
                frames = np.empty((len(indices), *size, 3), np.uint8)
            frames[place] = np.rot90(self._picture(frame), turns)
            position = wanted if frame.pts is None else int(frame.pts)
        return frames

    def _picture(self, frame: Any) -> "np.ndarray":
        """Return a frame in RGB, at the size in the header."""
        try:
            picture: np.ndarray = frame.to_ndarray(format="rgb24", width=self.width, height=self.height)
        except Exception as error:
            raise self._unreadable(error) from error
        return picture

    def _first_from(self, source: Iterator[Any], wanted: int) -> Any:
        """Return the first frame that is not before `wanted`."""
        for frame in source:
            self._check_deadline()
            if frame.pts is None or frame.pts >= wanted:
                self._check_frame_size(frame.width, frame.height)
                return frame
        raise InvalidRequest(f"{self._file.place}: cannot read the video: it ends before its last frame")

    def _frames_from(self, wanted: int) -> Iterator[Any]:
        """Return the decoded frames from the last keyframe that is not after `wanted`."""
        try:
            self._container.seek(wanted, stream=self._stream, backward=True, any_frame=False)
        except Exception as error:
            raise self._unreadable(error) from error
        return self._guarded(self._container.decode(self._stream))

    def _packets(self) -> Iterator[Any]:
        for packet in self._guarded(self._container.demux(self._stream)):
            self._check_deadline()
            yield packet

    def _guarded(self, source: Iterator[Any]) -> Iterator[Any]:
        try:
            yield from source
        except BatonError:
            raise
        except Exception as error:
            raise self._unreadable(error) from error

    def _check_frame_size(self, width: int, height: int) -> None:
        limit = self._file.limits.max_frame_pixels
        if width < 1 or height < 1:
            raise InvalidRequest(
                f"{self._file.place}: its frames have no size, or one that exceeds the limit of {limit} for a frame"
            )
        if width * height > limit:
            raise InvalidRequest(
                f"{self._file.place}: frames of {width} x {height} pixels exceed the limit of {limit} for a frame"
            )

    def _check_duration(self, duration_s: float) -> None:
        limit = self._file.limits.max_duration_s
        if duration_s > limit:
            raise InvalidRequest(f"{self._file.place}: a video of {duration_s:g} s exceeds the limit of {limit:g} s")

    def _check_count(self, frames: int) -> None:
        limit = self._file.limits.max_frames
        if frames > limit:
            raise InvalidRequest(f"{self._file.place}: the video has more than the limit of {limit} frames")

    def _check_deadline(self) -> None:
        if time.monotonic() > self._deadline:
            limit = self._file.limits.timeout_s
            raise InvalidRequest(f"{self._file.place}: decoding the video took longer than {limit:g} s")

    def _unreadable(self, error: Exception) -> InvalidRequest:
        reason = " ".join(str(error).split())[:200] or type(error).__name__
        return InvalidRequest(f"{self._file.place}: cannot read the video: {reason}")


def _pyav() -> Any:
    try:
        import av
    except ImportError:
        raise Unsupported("video needs PyAV on the worker: pip install 'baton-serve[video]'") from None
    return av


def _container_format(data: bytes) -> str | None:
    """Return FFmpeg's name of the container format, by the first bytes: FFmpeg must not guess, see above."""
    if data[4:8] == b"ftyp":
        return "mov"
    if data[:4] == b"\x1a\x45\xdf\xa3":
        return "matroska"
    return "gif" if data[:6] in (b"GIF87a", b"GIF89a") else None


def _refuse_io(url: str, flags: int, options: dict[str, str]) -> io.BytesIO:
    raise PermissionError("a media file must not name other files")


def _is_shorter_by_seeking(keyframes: list[int], position: int, wanted: int) -> bool:
    """Return whether a keyframe lies between the last decoded frame and the wanted one."""
    at = bisect_right(keyframes, wanted)
    return at > 0 and keyframes[at - 1] > position


def _evenly(frames: int, count: int) -> list[int]:
    """Return `count` of the numbers below `frames`, from the first to the last, at equal distances, rounded."""
    if count <= 1:
        return [0][:count]
    return [round(place * (frames - 1) / (count - 1)) for place in range(count)]
