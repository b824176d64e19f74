"""What the TensorRT-LLM adapter uses of torch, beside the double: workers start without the seconds of the real one."""

import types
from typing import Any

from tests.doubles.trtllm.processor import Rows

float16, bfloat16, float32 = "float16", "bfloat16", "float32"
tensor = list
cuda = types.SimpleNamespace(device_count=lambda: 1)


class _Flat:
    def __init__(self, content: bytes, dtype: str) -> None:
        self._content = content
        self._dtype = dtype

    def reshape(self, rows: int, size: int) -> Rows:
        assert rows == -1
        return Rows(self._content, self._dtype, size)


def frombuffer(data: bytearray, dtype: Any) -> _Flat:
    """Return the numbers in `data`."""
    return _Flat(bytes(data), dtype)
