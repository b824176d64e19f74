"""New weights, checked before SGLang sees them: it begins to replace before it has looked, and cannot go back.

Its own way back reads the new files again, fails the same way, and takes the scheduler with it.
"""

import json
import math
import mmap
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from baton.engine_kit.shared_memory import map_segment
from baton.errors import ConfigError, InvalidRequest
from baton.protocol.commands import FromSharedMemory, FromTensors, TensorSpec

if TYPE_CHECKING:
    import torch

BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
MOST_HEADER = 100 * 2**20

Shapes = Mapping[str, tuple[int, ...]]
Named = "list[tuple[str, torch.Tensor]]"


def shapes_in(directory: Path) -> Shapes:
    """Return the tensors of the safetensors files in `directory`, by name. Raises ConfigError; reads headers only."""
    shapes: dict[str, tuple[int, ...]] = {}
    for path in sorted(directory.glob("*.safetensors")):
        shapes |= _header(path)
    return shapes


def check_directory(directory: Path, ours: Shapes) -> None:
    """Raise InvalidRequest unless the files in `directory` are those of the model that is running."""
    if not directory.is_dir():
        raise InvalidRequest(f"path: {directory} is not a directory")
    try:
        theirs = shapes_in(directory)
    except ConfigError as error:
        raise InvalidRequest(f"path: {error.message}") from error
    if not theirs:
        raise InvalidRequest(f"path: {directory} has no .safetensors files")
    missing = sorted(ours.keys() - theirs.keys())
    if missing:
        raise InvalidRequest(f"path: {directory} lacks {missing[0]}")
    _compare(theirs, ours, "path")


def check_specs(specs: Sequence[TensorSpec], ours: Shapes) -> None:
    """Raise InvalidRequest unless every tensor is one of the model's, in its shape, and named once."""
    names = [spec.name for spec in specs]
    if not names:
        raise InvalidRequest("tensors: the list is empty")
    if len(set(names)) < len(names):
        raise InvalidRequest("tensors: a name is given twice")
    _compare({spec.name: spec.shape for spec in specs}, ours, "tensors")


def tensors_of(source: FromTensors | FromSharedMemory) -> "list[tuple[str, torch.Tensor]]":
    """Return the tensors themselves. Raises InvalidRequest for bytes that do not fit."""
    if isinstance(source, FromTensors):
        return [(spec.name, _tensor(spec, bytearray(spec.data), 0, exact=True)) for spec in source.tensors]
    memory = map_segment(source.segment)
    return [(spec.name, _tensor(spec, memory, spec.offset).clone()) for spec in source.tensors]


def _compare(theirs: Shapes, ours: Shapes, field: str) -> None:
    if not ours:
        return  # weights in another format than safetensors: SGLang has to find out
    for name, shape in theirs.items():
        if name not in ours:
            raise InvalidRequest(f"{field}: {name} is not a tensor of this model")
        if tuple(shape) != tuple(ours[name]):
            raise InvalidRequest(f"{field}: {name} has the shape {list(shape)}, not {list(ours[name])}")


def _header(path: Path) -> Shapes:
    try:
        with path.open("rb") as file:
            size = int.from_bytes(file.read(8), "little")
            if size > MOST_HEADER:
                raise ConfigError(f"{path} is not a safetensors file")
            header = json.loads(file.read(size))
        return {name: tuple(entry["shape"]) for name, entry in header.items() if name != "__metadata__"}
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ConfigError(f"{path} cannot be read: {error}") from None


def _tensor(spec: TensorSpec, memory: "bytearray | mmap.mmap", offset: int, exact: bool = False) -> "torch.Tensor":
    import torch

    nbytes = math.prod(spec.shape) * BYTES[spec.dtype]
    if offset + nbytes > len(memory) or (exact and nbytes != len(memory)):
        raise InvalidRequest(f"tensors: {spec.name} needs {nbytes} bytes from {offset} on; there are {len(memory)}")
    if offset % BYTES[spec.dtype]:
        raise InvalidRequest(f"tensors: {spec.name} starts at {offset}, which its type cannot")
    dtype = getattr(torch, spec.dtype)
    if nbytes == 0:
        return torch.empty(spec.shape, dtype=dtype)
    return torch.frombuffer(memory, dtype=dtype, count=math.prod(spec.shape), offset=offset).view(spec.shape)
