"""Embedding files for tests, written byte by byte."""

import json
import struct

Tensor = tuple[str, list[int], bytes]


def floats(shape: list[int], *numbers: float) -> Tensor:
    return "F32", shape, struct.pack(f"<{len(numbers)}f", *numbers)


def ints(shape: list[int], *numbers: int) -> Tensor:
    return "I64", shape, struct.pack(f"<{len(numbers)}q", *numbers)


def safetensors(**tensors: Tensor) -> bytes:
    """Return a file with these tensors."""
    entries, body = {}, b""
    for name, (dtype, shape, data) in tensors.items():
        entries[name] = {"dtype": dtype, "shape": shape, "data_offsets": [len(body), len(body) + len(data)]}
        body += data
    header = json.dumps(entries).encode()
    return len(header).to_bytes(8, "little") + header + body
