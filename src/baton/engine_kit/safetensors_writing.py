"""Writes a safetensors file of bfloat16 tensors, one after the other, so that only one is in memory."""

import json
from collections.abc import Iterable, Mapping, Sequence
from math import prod
from pathlib import Path

_ALIGNMENT = 8


def write_bfloat16_tensors(path: Path, shapes: Mapping[str, Sequence[int]], tensors: Iterable[bytes]) -> None:
    """Write `tensors`, whose names and shapes are in `shapes`, in the same order."""
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for name, shape in shapes.items():
        end = offset + 2 * prod(shape)
        header[name] = {"dtype": "BF16", "shape": list(shape), "data_offsets": [offset, end]}
        offset = end
    encoded = json.dumps(header).encode()
    encoded += b" " * (-len(encoded) % _ALIGNMENT)
    with path.open("wb") as file:
        file.write(len(encoded).to_bytes(8, "little") + encoded)
        for tensor in tensors:
            file.write(tensor)
