"""The header of a safetensors file that a client sent, checked against the bytes that follow it. Pure."""

import math
from itertools import pairwise

import msgspec

MAX_HEADER_BYTES = 64 * 1024
MAX_TENSORS = 16
MAX_DIMENSIONS = 4
BYTES_OF = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2, "I64": 8, "I32": 4}
_LENGTH_BYTES = 8


class DamagedHeader(Exception):
    """The file is not a valid safetensors file; the message is the reason for the client."""


class Entry(msgspec.Struct, frozen=True):
    """One tensor: `data_offsets` are its first byte and the one after its last, behind the header."""

    dtype: str
    shape: tuple[int, ...]
    data_offsets: tuple[int, int]


def read_header(data: bytes) -> tuple[dict[str, Entry], memoryview]:
    """Return the tensors by name and the bytes behind the header, which they fill completely. Raises DamagedHeader."""
    length = int.from_bytes(data[:_LENGTH_BYTES], "little")
    if len(data) < _LENGTH_BYTES or length > len(data) - _LENGTH_BYTES:
        raise DamagedHeader("it is not a safetensors file: its header is longer than the file")
    if length > MAX_HEADER_BYTES:
        raise DamagedHeader(f"its header has more than {MAX_HEADER_BYTES} bytes")
    end = _LENGTH_BYTES + length
    tensors = _decode(data[_LENGTH_BYTES:end])
    body = memoryview(data)[end:]
    for name, entry in tensors.items():
        _check_entry(name, entry)
    _check_coverage(tensors, len(body))
    return tensors, body


def _decode(header: bytes) -> dict[str, Entry]:
    try:
        entries = msgspec.json.decode(header, type=dict[str, msgspec.Raw])
        entries.pop("__metadata__", None)
        if len(entries) > MAX_TENSORS:
            raise DamagedHeader(f"it has more than {MAX_TENSORS} tensors")
        return {name: msgspec.json.decode(entry, type=Entry) for name, entry in entries.items()}
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise DamagedHeader(f"it is not a safetensors file: its header cannot be read: {error}") from None


def _check_entry(name: str, entry: Entry) -> None:
    if entry.dtype not in BYTES_OF:
        raise DamagedHeader(f"{name} has the type {entry.dtype}; supported are {', '.join(BYTES_OF)}")
    if len(entry.shape) > MAX_DIMENSIONS or any(side < 1 for side in entry.shape):
        raise DamagedHeader(f"{name} has the shape {list(entry.shape)}")
    first, end = entry.data_offsets
    wanted = math.prod(entry.shape) * BYTES_OF[entry.dtype]
    if first < 0 or end - first != wanted:
        raise DamagedHeader(f"its header is wrong: {name} takes {wanted} bytes, and has the offsets {first} and {end}")


def _check_coverage(tensors: dict[str, Entry], available: int) -> None:
    """Every byte belongs to one tensor: none is read twice, none is hidden, and none is missing."""
    ranges = sorted(entry.data_offsets for entry in tensors.values())
    bounds = [(0, 0), *ranges, (available, available)]
    if any(before[1] != after[0] for before, after in pairwise(bounds)):
        raise DamagedHeader("its header is wrong: the tensors do not fill the file one after the other")
