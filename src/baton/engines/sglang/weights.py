"""New weights, checked before SGLang sees them: it begins to replace before it has looked, and cannot go back.

Its own way back reads the new files again, fails the same way, and takes the scheduler with it.
"""

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from baton.engine_kit.safetensors_file import SafetensorsFile
from baton.engine_kit.shared_memory import Segment, open_segment
from baton.errors import ConfigError, InvalidRequest
from baton.protocol.commands import FromSharedMemory, FromTensors, InlineTensor, SharedTensor, TensorSpec

if TYPE_CHECKING:
    import torch

BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}

Shapes = Mapping[str, tuple[int, ...]]
Named = "list[tuple[str, torch.Tensor]]"


def shapes_in(directory: Path) -> Shapes:
    """Return the tensors of the safetensors files in `directory`, by name. Raises ConfigError; reads headers only."""
    shapes: dict[str, tuple[int, ...]] = {}
    for path in sorted(directory.glob("*.safetensors")):
        with SafetensorsFile(path) as file:
            shapes |= {name: tensor.shape for name, tensor in file.tensors.items()}
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
        return [(spec.name, _inline(spec)) for spec in source.tensors]
    with open_segment(source.segment) as segment:
        return [(spec.name, _shared(spec, segment)) for spec in source.tensors]


def _compare(theirs: Shapes, ours: Shapes, field: str) -> None:
    if not ours:
        return  # weights in another format than safetensors: SGLang has to find out
    for name, shape in theirs.items():
        if name not in ours:
            raise InvalidRequest(f"{field}: {name} is not a tensor of this model")
        if tuple(shape) != tuple(ours[name]):
            raise InvalidRequest(f"{field}: {name} has the shape {list(shape)}, not {list(ours[name])}")


def _inline(spec: InlineTensor) -> "torch.Tensor":
    if len(spec.data) != _nbytes(spec):
        raise InvalidRequest(f"tensors: {spec.name} needs {_nbytes(spec)} bytes; there are {len(spec.data)}")
    return _tensor(spec, bytearray(spec.data))


def _shared(spec: SharedTensor, segment: Segment) -> "torch.Tensor":
    if spec.offset + _nbytes(spec) > segment.nbytes:
        raise InvalidRequest(
            f"tensors: {spec.name} needs {_nbytes(spec)} bytes from {spec.offset} on; there are {segment.nbytes}"
        )
    if spec.offset % BYTES[spec.dtype]:
        raise InvalidRequest(f"tensors: {spec.name} starts at {spec.offset}, which its type cannot")
    return _tensor(spec, segment.read(spec.offset, _nbytes(spec)))


def _nbytes(spec: TensorSpec) -> int:
    return math.prod(spec.shape) * BYTES[spec.dtype]


def _tensor(spec: TensorSpec, content: bytearray) -> "torch.Tensor":
    import torch

    dtype = getattr(torch, spec.dtype)
    if not content:
        return torch.empty(spec.shape, dtype=dtype)
    return torch.frombuffer(content, dtype=dtype).view(spec.shape)
