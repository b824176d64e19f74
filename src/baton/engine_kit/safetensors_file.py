"""One safetensors file: its header, checked against the length of the file, and the bytes of its tensors.

The file is read and never mapped: a trainer may replace or shorten it while it is in use.
"""

import os
from pathlib import Path
from typing import Self

import msgspec

from baton.engine_kit.file_reading import read_fully
from baton.errors import ConfigError

MOST_HEADER = 100 * 2**20
_LENGTH_BYTES = 8


class StoredTensor(msgspec.Struct, frozen=True):
    """An entry of the header; `data_offsets` are the first byte and the one after the last, behind the header."""

    dtype: str
    shape: tuple[int, ...]
    data_offsets: tuple[int, int]

    @property
    def nbytes(self) -> int:
        """How many bytes the file has for it."""
        return self.data_offsets[1] - self.data_offsets[0]


class SafetensorsFile:
    """An open file. `tensors` is its header. Raises ConfigError if it is damaged or cut off."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._closed = False
        try:
            self._descriptor = os.open(path, os.O_RDONLY)
        except OSError as error:
            raise ConfigError(f"{path} cannot be read: {error}") from None
        try:
            self.tensors, self._start = self._read_header()
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *raised: object) -> None:
        self.close()

    def read_into(self, name: str, buffer: bytearray | memoryview) -> None:
        """Fill `buffer`, which has the length of the tensor `name`, with its bytes. Raises ConfigError."""
        self._fill(buffer, self._start + self.tensors[name].data_offsets[0])

    def close(self) -> None:
        """Close the file. Idempotent."""
        if not self._closed:
            self._closed = True
            os.close(self._descriptor)

    def _read_header(self) -> tuple[dict[str, StoredTensor], int]:
        """Return the tensors by name, and where their data begins."""
        length = bytearray(_LENGTH_BYTES)
        self._fill(length, 0)
        nbytes = int.from_bytes(length, "little")
        if nbytes > MOST_HEADER:
            raise ConfigError(f"{self._path} is not a safetensors file: its header would have {nbytes} bytes")
        header = bytearray(nbytes)
        self._fill(header, _LENGTH_BYTES)
        try:
            entries = msgspec.json.decode(header, type=dict[str, msgspec.Raw])
            tensors = {
                name: msgspec.json.decode(entry, type=StoredTensor)
                for name, entry in entries.items()
                if name != "__metadata__"
            }
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise ConfigError(f"{self._path} is not a safetensors file: its header cannot be read: {error}") from None
        start = _LENGTH_BYTES + nbytes
        self._check_ranges(tensors, os.fstat(self._descriptor).st_size - start)
        return tensors, start

    def _check_ranges(self, tensors: dict[str, StoredTensor], available: int) -> None:
        for name, tensor in tensors.items():
            first, end = tensor.data_offsets
            if not 0 <= first <= end:
                raise ConfigError(f"{self._path} is damaged: {name} has the offsets {first} and {end}")
            if end > available:
                raise ConfigError(f"{self._path} is cut off: {name} ends {end - available} bytes behind its end")

    def _fill(self, buffer: bytearray | memoryview, offset: int) -> None:
        try:
            read_fully(self._descriptor, buffer, offset)
        except (EOFError, OSError) as error:
            raise ConfigError(f"{self._path} cannot be read: {error}") from None
