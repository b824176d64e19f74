"""Embedding files: rows that a client has computed for a piece of media, in a safetensors file.

A file with one tensor has the rows under any name. With several, the rows are `mm_embeddings`, and the others are known
by their names: grids, seconds per grid, timestamps. Reading one is slow.
"""

import math
from collections.abc import Mapping
from itertools import pairwise
from typing import Any
from urllib.parse import unquote, urlsplit

from baton.errors import InvalidRequest
from baton.media.data_urls import is_data_url, media_type
from baton.media.safetensors_header import DamagedHeader, Entry, read_header
from baton.protocol.media import EmbeddingFile, MediaUrl

SUFFIX = ".safetensors"
MEDIA_TYPE = "application/safetensors"
MODALITIES = ("image", "video")
ROWS = "mm_embeddings"
MAX_GRID_SIDE = 1_000_000
_PICKLE_SUFFIXES = (".pt", ".pth", ".bin", ".pkl", ".pickle", ".ckpt")
_PICKLE_STARTS = (b"PK\x03\x04", b"\x80\x02", b"\x80\x03", b"\x80\x04", b"\x80\x05")
_NO_PICKLE = "PyTorch and pickle files are refused, because reading one executes code of its author; send safetensors"
_DTYPES = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}
_FORMATS: dict[str, Any] = {"F64": "d", "F32": "f", "I64": "q", "I32": "i"}  # of memoryview, on little-endian machines
# A number whose exponent has all of these bits is infinite or not a number.
_EXPONENTS: dict[str, tuple[str, int]] = {"F32": ("<u4", 0x7F800000), "F16": ("<u2", 0x7C00), "BF16": ("<u2", 0x7F80)}
_GRIDS = {"image": ("grid_thw", "image_grid_thw"), "video": ("grid_thw", "video_grid_thw")}
_SECONDS, _TIMESTAMPS = "second_per_grid_ts", "video_timestamps"


def names_embeddings(media: MediaUrl) -> bool:
    """Return whether `media` is an embedding file, by its URL. Raises InvalidRequest for a pickle file."""
    if media.modality not in MODALITIES:
        return False
    if is_data_url(media.url):
        return media_type(media.url) == MEDIA_TYPE
    try:
        path = unquote(urlsplit(media.url).path).lower()
    except ValueError:
        return False  # not a URL, which the fetcher reports
    if path.endswith(_PICKLE_SUFFIXES):
        raise InvalidRequest(f"{media.place}: {_NO_PICKLE}")
    return path.endswith(SUFFIX)


def refuse_pickle(data: bytes, place: str) -> None:
    """Raise InvalidRequest if `data` begins as a pickle or a zip archive does."""
    if data.startswith(_PICKLE_STARTS):
        raise InvalidRequest(f"{place}: {_NO_PICKLE}")


def read_embeddings(media: MediaUrl, data: bytes) -> EmbeddingFile:
    """Return the checked content of an embedding file. Raises InvalidRequest."""
    refuse_pickle(data, media.place)
    try:
        tensors, body = read_header(data)
        return _checked(media, tensors, body)
    except DamagedHeader as error:
        raise InvalidRequest(f"{media.place}: {error}") from None


def _checked(media: MediaUrl, tensors: Mapping[str, Entry], body: memoryview) -> EmbeddingFile:
    name = ROWS if ROWS in tensors else next(iter(tensors), "")
    if not tensors or (len(tensors) > 1 and name != ROWS):
        raise DamagedHeader(f"it has {len(tensors)} tensors, and none of them is {ROWS}")
    known = (ROWS, *_GRIDS[media.modality], *((_SECONDS, _TIMESTAMPS) if media.modality == "video" else ()))
    unknown = [other for other in tensors if other != name and other not in known]
    if unknown:
        raise DamagedHeader(f"for {media.modality} embeddings, it has unknown tensors: {', '.join(unknown)[:200]}")
    rows, size = _shape(name, tensors[name])
    data = _bytes(tensors[name], body)
    _refuse_infinite(name, tensors[name].dtype, data)
    return EmbeddingFile(
        modality=media.modality,
        data=data,
        dtype=_DTYPES[tensors[name].dtype],
        rows=rows,
        size=size,
        grid=_grid(tensors, body, media.modality, rows),
        seconds_per_grid=_seconds(tensors, body),
        timestamps=_timestamps(tensors, body),
        place=media.place,
    )


def _shape(name: str, entry: Entry) -> tuple[int, int]:
    """Return rows and size of the embeddings, which may be a batch of one."""
    if entry.dtype not in _DTYPES:
        raise DamagedHeader(f"{name} has the type {entry.dtype}; embeddings are {', '.join(_DTYPES)}")
    shape = entry.shape[1:] if len(entry.shape) == 3 and entry.shape[0] == 1 else entry.shape
    if len(shape) != 2:
        raise DamagedHeader(f"{name} has the shape {list(entry.shape)} instead of rows x size, of one item")
    return shape[0], shape[1]


def _bytes(entry: Entry, body: memoryview) -> memoryview:
    return body[slice(*entry.data_offsets)]


def _refuse_infinite(name: str, dtype: str, data: memoryview) -> None:
    import numpy as np

    integer, exponent = _EXPONENTS[dtype]
    numbers = np.frombuffer(data, integer)
    if bool(((numbers & exponent) == exponent).any()):
        raise DamagedHeader(f"{name} has numbers that are infinite or not a number")


def _numbers(name: str, tensors: Mapping[str, Entry], body: memoryview, kind: str) -> list[Any] | None:
    """Return the numbers of the auxiliary tensor `name`, if there is one; `kind` is the first letter of its type."""
    if (entry := tensors.get(name)) is None:
        return None
    allowed = [dtype for dtype in _FORMATS if dtype[0] == kind]
    if entry.dtype not in allowed:
        raise DamagedHeader(f"{name} has the type {entry.dtype} instead of {' or '.join(allowed)}")
    numbers = bytes(_bytes(entry, body))
    listed: list[Any] = memoryview(numbers).cast(_FORMATS[entry.dtype]).tolist()
    if not all(math.isfinite(number) for number in listed):
        raise DamagedHeader(f"{name} has numbers that are infinite or not a number")
    return listed


def _grid_name(tensors: Mapping[str, Entry], modality: str) -> str | None:
    """Return the name of the tensor that is the grid, if there is one."""
    given = [name for name in _GRIDS[modality] if name in tensors]
    if not given:
        return None
    shape = tensors[given[0]].shape
    if len(given) > 1 or shape[-1:] != (3,) or len(shape) > 2:
        raise DamagedHeader(f"{' and '.join(given)}: a grid is one tensor of n x 3 numbers: time, height, width")
    return given[0]


def _grid(tensors: Mapping[str, Entry], body: memoryview, modality: str, rows: int) -> tuple[tuple[int, int, int], ...]:
    name = _grid_name(tensors, modality)
    sides = _numbers(name, tensors, body, "I") if name is not None else None
    if sides is None:
        return ()
    if min(sides) < 1 or max(sides) > MAX_GRID_SIDE:
        raise DamagedHeader(f"{name} has numbers that are not between 1 and {MAX_GRID_SIDE}")
    grid = tuple(zip(sides[::3], sides[1::3], sides[2::3], strict=True))
    patches = sum(map(math.prod, grid))
    if patches % rows:
        raise DamagedHeader(f"{name} has {patches} patches, which is no multiple of the {rows} rows")
    return grid


def _seconds(tensors: Mapping[str, Entry], body: memoryview) -> float | None:
    numbers = _numbers(_SECONDS, tensors, body, "F")
    if numbers is None:
        return None
    if len(numbers) != 1 or numbers[0] <= 0:
        raise DamagedHeader(f"{_SECONDS} is one number above 0")
    return float(numbers[0])


def _timestamps(tensors: Mapping[str, Entry], body: memoryview) -> tuple[float, ...]:
    numbers = _numbers(_TIMESTAMPS, tensors, body, "F")
    if numbers is None:
        return ()
    if len(tensors[_TIMESTAMPS].shape) != 1 or numbers[0] < 0 or any(late < early for early, late in pairwise(numbers)):
        raise DamagedHeader(f"{_TIMESTAMPS} is a list of seconds that does not decrease")
    return tuple(numbers)
