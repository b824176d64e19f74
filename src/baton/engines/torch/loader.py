"""Loads weights from a model directory into existing tensors. Every name and shape is checked before any read."""

import math
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from baton.engine_kit.safetensors_file import SafetensorsFile, weight_files
from baton.engines.torch.models.config import LlamaConfig
from baton.engines.torch.models.diffusion import llada_tensor
from baton.engines.torch.models.experts import fused_parts
from baton.engines.torch.models.vision_language import language_tensor
from baton.errors import ConfigError

Report = Callable[[int, int], None]
"""Called with the bytes loaded so far and the total."""


Rename = Callable[[str], str | None]
"""Returns the name that a tensor of the files has in the model, None for one that the model does not read."""


def load_weights(
    directory: Path, parts: Mapping[str, Tensor], report: Report, rename: Rename = lambda name: name
) -> None:
    """Fill `parts` from the safetensors files in `directory`; all or nothing for wrong names and shapes.

    Raises ConfigError for missing, unknown, misshapen or unreadable tensors. A file that becomes unreadable meanwhile
    leaves some parts filled.
    """
    with ExitStack() as stack:
        files = [stack.enter_context(SafetensorsFile(path)) for path in weight_files(directory)]
        homes: dict[str, _Home] = {}
        for file in files:
            for stored in file.tensors:
                homes |= _homes(file, stored, rename(stored))
        if problem := mismatch(parts, {name: home.shape for name, home in homes.items()}):
            raise ConfigError(f"the weights in {directory} do not fit the model: {problem}")
        for name in parts:
            _check_type(homes[name].file, homes[name].stored, directory)
        total = sum(part.nbytes for part in parts.values())
        done = 0
        for part in _read_all(homes, parts):
            done += part.nbytes
            report(done, total)


class _Home(NamedTuple):
    """Where a tensor of the model is: in the tensor `stored` of a file, from element `start` on."""

    file: SafetensorsFile
    stored: str
    start: int
    shape: tuple[int, ...]


def _homes(file: SafetensorsFile, stored: str, name: str | None) -> dict[str, _Home]:
    """Return the tensors of the model that a stored tensor has: itself, those of all experts, or none."""
    if name is None:
        return {}
    shape = file.tensors[stored].shape
    fused = {part.name: _Home(file, stored, part.start, part.shape) for part in fused_parts(name, shape)}
    return fused or {name: _Home(file, stored, 0, shape)}


def tensor_names(config: LlamaConfig) -> Rename:
    """Return how the tensors of a model's files are called in the model."""
    if config.family == "llada":
        return llada_tensor
    return language_tensor if config.layout is not None else lambda name: name


def _check_type(file: SafetensorsFile, name: str, directory: Path) -> None:
    stored = file.tensors[name]
    if stored.dtype not in _TYPES:
        raise ConfigError(f"{name} in {directory} is of type {stored.dtype}; give the model in {', '.join(_TYPES)}")
    if stored.nbytes != math.prod(stored.shape) * _TYPES[stored.dtype].itemsize:
        raise ConfigError(f"{name} in {directory} has {stored.nbytes} bytes, which do not fit its shape")


def _read_all(homes: Mapping[str, _Home], parts: Mapping[str, Tensor]) -> Iterator[Tensor]:
    """Read the tensors and yield each: on their way to a GPU several at once, because each is copied twice."""

    def read(name: str) -> Tensor:
        return _read(homes[name], parts[name])

    if any(part.device.type == "cuda" for part in parts.values()):
        with ThreadPoolExecutor(_GPU_READERS) as readers:
            yield from readers.map(read, parts)
    else:
        yield from map(read, parts)


def _read(home: _Home, part: Tensor) -> Tensor:
    """Read a tensor into `part`, and return it."""
    dtype = _TYPES[home.file.tensors[home.stored].dtype]
    if part.device.type == "cuda" and part.is_contiguous():
        _read_to_gpu(home, part.flatten(), dtype)
        return part
    in_place = part.device.type == "cpu" and part.dtype == dtype and part.is_contiguous()
    target = part if in_place else torch.empty(home.shape, dtype=dtype)
    if target.numel():
        data = target.flatten().view(torch.uint8).numpy().data
        home.file.read_part(home.stored, home.start * dtype.itemsize, data)
    if not in_place:
        part.copy_(target)
    return part


def _read_to_gpu(home: _Home, part: Tensor, dtype: torch.dtype) -> None:
    """Read a tensor in pieces through pinned memory: one is read while the last one is copied."""
    with torch.cuda.stream(torch.cuda.Stream(part.device)):  # type: ignore[no-untyped-call]
        count = min(len(part), _PIECE_BYTES // dtype.itemsize)
        hosts = [torch.empty(count, dtype=dtype, pin_memory=True) for _ in range(2)]
        copied = [torch.cuda.Event(), torch.cuda.Event()]  # type: ignore[no-untyped-call]
        for number, start in enumerate(range(0, len(part), max(count, 1))):
            host, event = hosts[number % 2][: len(part) - start], copied[number % 2]
            event.synchronize()
            data = host.view(torch.uint8).numpy().data
            home.file.read_part(home.stored, (home.start + start) * dtype.itemsize, data)
            part[start : start + len(host)].copy_(host, non_blocking=True)
            event.record()
        for event in copied:
            event.synchronize()


def mismatch(parts: Mapping[str, Tensor], shapes: Mapping[str, tuple[int, ...]], partial: bool = False) -> str | None:
    """Return how `shapes` differ from the model, or None. With `partial` some names may be missing."""
    for name, shape in shapes.items():
        if name not in parts:
            if not name.endswith(_IGNORED):
                return f"{name} is not a tensor of this model"
        elif tuple(parts[name].shape) != shape:
            return f"{name} has shape {list(shape)}, not {list(parts[name].shape)}"
    missing = [] if partial else [name for name in parts if name not in shapes]
    return f"{missing[0]} is missing, with {len(missing) - 1} others" if missing else None


_GPU_READERS = 8
_PIECE_BYTES = 16 << 20

_TYPES = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}

# Old checkpoints have rotary tables, and tied ones a second copy of the embedding.
_IGNORED = ("rotary_emb.inv_freq", "lm_head.weight")
