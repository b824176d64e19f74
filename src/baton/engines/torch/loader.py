"""Loads weights from a model directory into existing tensors. Every name and shape is checked before any copy."""

import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Protocol

from safetensors import SafetensorError, safe_open
from torch import Tensor

from baton.errors import ConfigError

Report = Callable[[int, int], None]
"""Called with the bytes loaded so far and the total."""


class _File(Protocol):
    def keys(self) -> list[str]: ...
    def get_slice(self, name: str) -> "_Slice": ...
    def get_tensor(self, name: str) -> Tensor: ...


class _Slice(Protocol):
    def get_shape(self) -> list[int]: ...
    def get_dtype(self) -> str: ...


def load_weights(directory: Path, parts: Mapping[str, Tensor], report: Report) -> None:
    """Fill `parts` from the safetensors files in `directory`; all or nothing for wrong names and shapes.

    Raises ConfigError for missing, unknown, misshapen or unreadable tensors.
    """
    with ExitStack() as stack, _translated(directory):
        files: list[_File] = [stack.enter_context(safe_open(path, framework="pt")) for path in _weight_files(directory)]
        homes = {name: file for file in files for name in file.keys()}  # noqa: SIM118 - not a mapping
        shapes = {name: tuple(file.get_slice(name).get_shape()) for name, file in homes.items()}
        if problem := mismatch(parts, shapes):
            raise ConfigError(f"the weights in {directory} do not fit the model: {problem}")
        for name in parts:
            if (dtype := homes[name].get_slice(name).get_dtype()) not in _TYPES:
                raise ConfigError(f"{name} in {directory} is of type {dtype}; give the model in {', '.join(_TYPES)}")
        total = sum(part.nbytes for part in parts.values())
        done = 0
        for name, part in parts.items():
            part.copy_(homes[name].get_tensor(name))
            done += part.nbytes
            report(done, total)


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


_TYPES = ("F32", "BF16", "F16")

# Old checkpoints have rotary tables, and tied ones a second copy of the embedding.
_IGNORED = ("rotary_emb.inv_freq", "lm_head.weight")


def _weight_files(directory: Path) -> list[Path]:
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


@contextmanager
def _translated(directory: Path) -> Iterator[None]:
    try:
        yield
    except (OSError, SafetensorError, RuntimeError) as error:
        raise ConfigError(f"cannot read the weights in {directory}: {error}") from error
