"""One safetensors file: its header, checked against the length of the file, and the bytes of its tensors.

The file is read and never mapped: a trainer may replace or shorten it while it is in use.
"""

import json
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

    def read_part(self, name: str, start: int, buffer: bytearray | memoryview) -> None:
        """Fill `buffer` with bytes of the tensor `name`, from its byte `start` on. Raises ConfigError."""
        first, end = self.tensors[name].data_offsets
        if not 0 <= start <= end - first - len(buffer):
            raise ValueError(f"{name} has no bytes {start} to {start + len(buffer)}")
        self._fill(buffer, self._start + first + start)

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


def weight_files(directory: Path) -> list[Path]:
    """Return the safetensors files of the model in `directory`. Raises ConfigError."""
    index = directory / "model.safetensors.index.json"
    if index.is_file():
        try:
            names = sorted(set(json.loads(index.read_text())["weight_map"].values()))
        except (ValueError, KeyError, AttributeError, TypeError) as error:
            raise ConfigError(f"cannot read {index}: {error!r}") from None
        if any(Path(name).name != name for name in names):
            raise ConfigError(f"{index} names files outside its directory")
        return [directory / name for name in names]
    single = directory / "model.safetensors"
    if not single.is_file():
        raise ConfigError(f"{directory} has neither model.safetensors nor model.safetensors.index.json")
    return [single]
