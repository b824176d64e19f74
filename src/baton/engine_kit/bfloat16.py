"""bfloat16 in numpy, which has no such type: bytes to 32-bit floats and back."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import numpy as np


def to_float32(data: bytes) -> "np.ndarray[Any, Any]":
    """Return bfloat16 numbers as 32-bit floats."""
    import numpy as np

    return (np.frombuffer(data, dtype="<u2").astype(np.uint32) << 16).view(np.float32)


def from_float32(values: "np.ndarray[Any, Any]") -> bytes:
    """Return 32-bit floats as bfloat16: the upper half of the bits, rounded to nearest, ties to even."""
    import numpy as np

    bits = np.ascontiguousarray(values, dtype=np.float32).view(np.uint32)
    odd = (bits >> 16) & 1
    return ((bits + 0x7FFF + odd) >> 16).astype("<u2").tobytes()
