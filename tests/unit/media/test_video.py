"""Videos: frames taken, their times, and limits that a header cannot get around."""

from contextlib import suppress
from typing import Any

import pytest

from baton.errors import InvalidRequest
from baton.media.video import Sampling, Video, VideoInfo, by_count, by_fps, decode_video, video_size
from baton.protocol.media import DecodeLimits, MediaFile
from tests.unit.media.media_sites import PLACE, damaged, png
from tests.unit.media.videos import brightness, lying_samples, of_sizes, turned, video

SIX = by_count(6)


def file_of(data: bytes, **limits: Any) -> MediaFile:
    return MediaFile(modality="video", data=data, place=PLACE, limits=DecodeLimits(**limits))


def decode(data: bytes, sampling: Sampling = SIX, **limits: Any) -> Video:
    return decode_video(file_of(data, **limits), sampling)


def info(frames: int, fps: float) -> VideoInfo:
    return VideoInfo(frames=frames, fps=fps, duration_s=frames / fps, width=1, height=1)


@pytest.mark.parametrize(
    ("kind", "codec"),
    [
        ("mp4", "mpeg4"),
        ("mov", "mpeg4"),
        ("mp4", "libx264"),
        ("matroska", "mpeg4"),
        ("webm", "libvpx-vp9"),
        ("gif", "gif"),
    ],
)
def test_frames_are_taken_evenly_with_their_times(kind: str, codec: str) -> None:
    data = video(20, 10, kind, codec)
    taken = decode(data)
    assert video_size(file_of(data)) == (32, 24)
    assert (taken.info.frames, taken.info.fps) == (20, 10.0)
    assert taken.info.duration_s == pytest.approx(2.0)
    assert taken.frames.shape == (6, 24, 32, 3)
    assert taken.indices == (0, 4, 8, 11, 15, 19)
    assert taken.timestamps == pytest.approx([0.0, 0.4, 0.8, 1.1, 1.5, 1.9])
    for frame, index in zip(taken.frames, taken.indices, strict=True):
        assert float(frame.mean()) == pytest.approx(brightness(index, 20), abs=6)


def test_every_frame_can_be_taken_in_one_pass() -> None:
    taken = decode(video(12), lambda _: range(12))
    assert taken.indices == tuple(range(12))
    assert [int(frame.mean()) for frame in taken.frames] == sorted(int(frame.mean()) for frame in taken.frames)


@pytest.mark.parametrize(("clockwise", "white"), [(0, "left"), (1, "top"), (2, "right"), (3, "bottom")])
def test_frames_are_rotated_as_the_video_is_shown(clockwise: int, white: str) -> None:
    data = turned(clockwise)
    frames = decode(data, SIX).frames
    height, width = (24, 32) if clockwise % 2 == 0 else (32, 24)
    assert frames.shape[1:3] == (height, width)
    half = {
        "left": frames[:, :, : width // 2],
        "right": frames[:, :, width // 2 :],
        "top": frames[:, : height // 2],
        "bottom": frames[:, height // 2 :],
    }
    assert max(half, key=lambda name: half[name].mean()) == white
    assert video_size(file_of(data)) == (32, 24)


def test_numbers_outside_of_the_video_become_its_first_or_last_frame() -> None:
    assert decode(video(5), lambda _: (-3, 2, 2, 99)).indices == (0, 2, 4)


def test_frames_a_second_are_bounded_by_count() -> None:
    assert list(by_fps(2)(info(30, 10))) == [0, 6, 12, 17, 23, 29]
    assert len(by_fps(2, most=4)(info(3000, 10))) == 4
    assert list(by_fps(0.01)(info(30, 10))) == [0]
    assert list(by_fps(0.01, least=2)(info(30, 10))) == [0, 29]
    assert list(by_count(8)(info(3, 10))) == [0, 1, 2]


@pytest.mark.parametrize(
    ("limits", "reason"),
    [
        ({"max_frame_pixels": 767}, "exceeds? the limit of 767 for a frame"),
        ({"max_frames": 19}, "more than the limit of 19 frames"),
        ({"max_duration_s": 1.5}, r"a video of 2 s exceeds the limit of 1\.5 s"),
        ({"max_video_pixels": 6 * 32 * 24 - 1}, "6 frames of 32 x 24 pixels exceed the limit of 4607 pixels"),
        ({"timeout_s": 1e-9}, "took longer than"),
    ],
)
@pytest.mark.parametrize("kind", ["mp4", "matroska"])
def test_limits(kind: str, limits: dict[str, Any], reason: str) -> None:
    with pytest.raises(InvalidRequest, match=reason) as refusal:
        decode(video(kind=kind), **limits)
    assert refusal.value.message.startswith(f"{PLACE}: ")


def test_a_long_video_of_few_bytes_is_refused_by_its_times() -> None:
    data = video(3, 1, "matroska", seconds_between=400_000)
    assert len(data) < 5_000
    with pytest.raises(InvalidRequest, match=r"exceeds the limit of 3600 s"):
        decode(data)


def test_a_header_cannot_claim_more_samples_than_there_are_bytes() -> None:
    for claimed in (1_000_000, 2**32 - 1):
        with pytest.raises(InvalidRequest, match="more samples than the file has room for"):
            video_size(file_of(lying_samples(video(), claimed)))


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (b"", "not a video"),
        (png(), "not a video"),
        (b"#EXTM3U\n#EXTINF:1,\nfile:///etc/passwd\n", "not a video"),
        (b"ffconcat version 1.0\nfile /etc/passwd\n", "not a video"),
        (b"\x00\x00\x00\x18ftypmp42" + bytes(200), "cannot read the video|no video"),
        (video()[:300], "cannot read the video|no video"),
        (video(kind="matroska")[:200], "cannot read the video|no video|no size|no frames"),
        (video().replace(b"stsz", b"cmov"), "compressed headers"),
    ],
)
def test_what_is_no_video_is_refused(data: bytes, reason: str) -> None:
    with pytest.raises(InvalidRequest, match=reason):
        decode(data)


@pytest.mark.parametrize(
    ("kind", "codec"),
    [("mp4", "mpeg4"), ("mp4", "libx264"), ("matroska", "mpeg4"), ("webm", "libvpx-vp9"), ("gif", "gif")],
)
def test_damaged_videos_are_refused_or_have_other_frames_and_nothing_else(kind: str, codec: str) -> None:
    for data in damaged(video(12, kind=kind, codec=codec), 200):
        with suppress(InvalidRequest):
            taken = decode(data)
            assert taken.frames.shape == (len(taken.indices), taken.info.height, taken.info.width, 3)


def test_a_frame_above_the_limit_is_not_decoded_whatever_the_header_says() -> None:
    with pytest.raises(InvalidRequest, match=r"cannot read the video|exceed the limit of 1000 for a frame"):
        decode(of_sizes((32, 24), (64, 64)), lambda _: range(2), max_frame_pixels=1000)


def test_frames_of_another_size_are_scaled_to_the_first() -> None:
    taken = decode(of_sizes((32, 24), (32, 24), (64, 64), (10, 10)), lambda _: range(4))
    assert taken.frames.shape == (4, 24, 32, 3)
