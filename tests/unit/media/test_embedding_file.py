"""Embedding files: what is read from them, and what is refused."""

import json
import math
import struct
from contextlib import suppress
from typing import Any

import pytest

from baton.errors import InvalidRequest
from baton.media.embedding_file import names_embeddings, read_embeddings
from baton.media.safetensors_header import MAX_HEADER_BYTES
from baton.protocol.media import EmbeddingFile, MediaUrl
from tests.unit.media.embedding_files import floats, ints, safetensors
from tests.unit.media.media_sites import PLACE, damaged

ROWS = floats([4, 2], *range(8))


def read(data: bytes, modality: str = "image") -> EmbeddingFile:
    return read_embeddings(MediaUrl(modality=modality, url="https://h/a.safetensors", place=PLACE), data)


def assert_refused(data: bytes, reason: str, modality: str = "image") -> None:
    with pytest.raises(InvalidRequest, match=reason) as refusal:
        read(data, modality)
    assert refusal.value.message.startswith(f"{PLACE}: ")


def test_one_tensor_is_the_rows_whatever_its_name() -> None:
    for shape in ([4, 2], [1, 4, 2]):
        item = read(safetensors(any_name=floats(shape, *range(8))))
        assert (item.rows, item.size, item.dtype) == (4, 2, "float32")
        assert struct.unpack("<8f", item.data) == tuple(range(8))
        assert (item.grid, item.seconds_per_grid, item.timestamps) == ((), None, ())


@pytest.mark.parametrize(("dtype", "name"), [("BF16", "bfloat16"), ("F16", "float16")])
def test_rows_of_half_precision(dtype: str, name: str) -> None:
    item = read(safetensors(rows=(dtype, [2, 3], bytes(12))))
    assert (item.rows, item.size, item.dtype, item.data.nbytes) == (2, 3, name, 12)


def test_auxiliary_tensors_of_a_video() -> None:
    item = read(
        safetensors(
            mm_embeddings=ROWS,
            video_grid_thw=ints([1, 3], 1, 4, 4),
            second_per_grid_ts=floats([1], 0.5),
            video_timestamps=floats([2], 0.0, 0.5),
        ),
        "video",
    )
    assert item.grid == ((1, 4, 4),)
    assert item.seconds_per_grid == 0.5
    assert item.timestamps == (0.0, 0.5)


def test_a_grid_may_have_several_parts_or_one_dimension() -> None:
    assert read(safetensors(mm_embeddings=ROWS, grid_thw=ints([2, 3], 1, 2, 2, 1, 2, 2))).grid == ((1, 2, 2), (1, 2, 2))
    assert read(safetensors(mm_embeddings=ROWS, image_grid_thw=ints([3], 1, 2, 2))).grid == ((1, 2, 2),)


@pytest.mark.parametrize(
    ("tensors", "reason"),
    [
        ({}, "0 tensors"),
        ({"a": ROWS, "b": ROWS}, "none of them is mm_embeddings"),
        ({"mm_embeddings": ROWS, "weights": ROWS}, "unknown tensors: weights"),
        ({"mm_embeddings": ROWS, "video_timestamps": floats([1], 0.0)}, "unknown tensors: video_timestamps"),
        ({"rows": floats([8], *range(8))}, "instead of rows x size"),
        ({"rows": floats([2, 2, 2], *range(8))}, "instead of rows x size"),
        ({"rows": ints([4, 2], *range(8))}, "the type I64; embeddings are F32"),
        ({"rows": ("U8", [4, 2], bytes(8))}, "the type U8"),
        ({"rows": ("F32", [0, 2], b"")}, r"the shape \[0, 2\]"),
        ({"rows": ("F32", [-4, -2], bytes(32))}, r"the shape \[-4, -2\]"),
        ({"rows": floats([1, 2], 1.0, math.nan)}, "infinite or not a number"),
        ({"rows": floats([1, 2], 1.0, math.inf)}, "infinite or not a number"),
        ({"rows": ("BF16", [1, 1], b"\x80\xff")}, "infinite or not a number"),
        ({"mm_embeddings": ROWS, "grid_thw": ints([1, 3], 1, 3, 3)}, "9 patches, which is no multiple of the 4 rows"),
        ({"mm_embeddings": ROWS, "grid_thw": ints([1, 3], 0, 2, 2)}, "not between 1 and"),
        ({"mm_embeddings": ROWS, "grid_thw": ints([1, 4], 1, 2, 2, 1)}, "n x 3 numbers"),
        ({"mm_embeddings": ROWS, "grid_thw": floats([1, 3], 1, 2, 2)}, "F32 instead of I64 or I32"),
        ({"mm_embeddings": ROWS, "grid_thw": ints([3], 1, 2, 2), "image_grid_thw": ints([3], 1, 2, 2)}, "one tensor"),
    ],
)
def test_tensors_that_do_not_fit_are_refused(tensors: dict[str, Any], reason: str) -> None:
    assert_refused(safetensors(**tensors), reason)


@pytest.mark.parametrize(
    ("tensors", "reason"),
    [
        ({"second_per_grid_ts": floats([1], -1.0)}, "one number above 0"),
        ({"second_per_grid_ts": floats([2], 1.0, 1.0)}, "one number above 0"),
        ({"second_per_grid_ts": floats([1], math.nan)}, "not a number"),
        ({"video_timestamps": floats([2], 1.0, 0.5)}, "does not decrease"),
        ({"video_timestamps": floats([1], -1.0)}, "does not decrease"),
        ({"image_grid_thw": ints([3], 1, 2, 2)}, "unknown tensors"),
    ],
)
def test_times_of_a_video_are_checked(tensors: dict[str, Any], reason: str) -> None:
    assert_refused(safetensors(mm_embeddings=ROWS, **tensors), reason, "video")


def header_of(entries: Any, body: bytes) -> bytes:
    header = json.dumps(entries).encode()
    return len(header).to_bytes(8, "little") + header + body


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (b"", "longer than the file"),
        (b"\xff" * 8 + b"{}", "longer than the file"),
        ((2**20).to_bytes(8, "little") + bytes(2**20), f"more than {MAX_HEADER_BYTES} bytes"),
        (b"\x04" + bytes(7) + b"nope", "cannot be read"),
        (header_of([], b""), "cannot be read"),
        (header_of({"a": {"dtype": "F32", "shape": [1, 1]}}, bytes(4)), "cannot be read"),
        (header_of({str(n): {} for n in range(17)}, b""), "more than 16 tensors"),
        (header_of({"a": {"dtype": "F32", "shape": [9, 9], "data_offsets": [0, 4]}}, bytes(4)), "takes 324 bytes"),
        (header_of({"a": {"dtype": "F32", "shape": [1, 1], "data_offsets": [-4, 0]}}, bytes(4)), "header is wrong"),
        (header_of({"a": {"dtype": "F32", "shape": [2**40, 2**40], "data_offsets": [0, 4]}}, bytes(4)), "wrong"),
        (header_of({"a": {"dtype": "F32", "shape": [1, 1], "data_offsets": [0, 4]}}, bytes(9)), "do not fill"),
        (header_of({"a": {"dtype": "F32", "shape": [1, 2], "data_offsets": [0, 8]}}, bytes(4)), "do not fill"),
        (
            header_of(
                {
                    "a": {"dtype": "F32", "shape": [1, 1], "data_offsets": [0, 4]},
                    "b": {"dtype": "F32", "shape": [1, 1], "data_offsets": [0, 4]},
                },
                bytes(4),
            ),
            "do not fill",
        ),
        (b"PK\x03\x04" + bytes(100), "executes code"),
        (b"\x80\x04\x95" + bytes(100), "executes code"),
    ],
)
def test_headers_that_lie_are_refused(data: bytes, reason: str) -> None:
    assert_refused(data, reason)


def test_damaged_files_are_refused_or_have_other_rows_and_nothing_else() -> None:
    whole = safetensors(mm_embeddings=ROWS, video_grid_thw=ints([1, 3], 1, 4, 4), video_timestamps=floats([2], 0, 1))
    for data in damaged(whole, 1000):
        with suppress(InvalidRequest):
            item = read(data, "video")
            assert item.data.nbytes == item.rows * item.size * (4 if item.dtype == "float32" else 2)


@pytest.mark.parametrize(
    ("url", "expected"),
    [
        ("https://h/a.safetensors", True),
        ("https://h/A.SafeTensors?token=x.png", True),
        ("https://h/a%2Esafetensors", True),
        ("file:///dir/a.safetensors", True),
        ("data:application/safetensors;base64,AAAA", True),
        ("https://h/a.png?x=.safetensors", False),
        ("data:image/png;base64,AAAA.safetensors", False),
        ("http://[broken", False),
    ],
)
def test_embedding_files_are_known_by_their_url(url: str, expected: bool) -> None:
    assert names_embeddings(MediaUrl(modality="image", url=url, place=PLACE)) is expected
    assert not names_embeddings(MediaUrl(modality="audio", url=url, place=PLACE))


@pytest.mark.parametrize("suffix", [".pt", ".pth", ".bin", ".PT"])
def test_pickle_files_are_refused_by_their_name(suffix: str) -> None:
    with pytest.raises(InvalidRequest, match="executes code of its author; send safetensors"):
        names_embeddings(MediaUrl(modality="image", url=f"https://h/a{suffix}?x", place=PLACE))
