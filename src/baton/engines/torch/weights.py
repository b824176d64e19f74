"""New weights for a running model, from any source. All of them are in this process before the first is replaced."""

import math
import time
from collections.abc import Callable, Mapping
from datetime import timedelta
from pathlib import Path
from typing import TypeVar

import msgspec
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import distributed_c10d

from baton.engine_kit.shared_memory import Segment, open_segment
from baton.engines.torch.arena import available_bytes
from baton.engines.torch.loader import load_weights, mismatch, tensor_names
from baton.engines.torch.models.config import LlamaConfig, inverse_frequencies, read_llama_config
from baton.engines.torch.models.experts import FusedPart, fused_parts
from baton.errors import ConfigError, EngineDead, EngineFailed, InvalidRequest, Unsupported
from baton.protocol.commands import (
    FromDisk,
    FromGroup,
    FromIpc,
    FromSharedMemory,
    FromTensors,
    InlineTensor,
    JoinGroup,
    SharedTensor,
    TensorSpec,
    WeightSource,
)

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}

_Named = TypeVar("_Named", bound=FromTensors | FromSharedMemory | FromGroup)

Parts = Mapping[str, Tensor]
ReplaceWeights = Callable[[], int]
"""Replaces weights between two steps; returns the number of tensors."""


class WeightGroup:
    """This process as a member of the process group through which weights are broadcast."""

    def __init__(self, command: JoinGroup, device: torch.device) -> None:
        self.name = command.group
        self.broken = False
        self.receiving = False
        self._device = device
        if command.rank >= command.size:
            raise InvalidRequest(f"rank: a group of {command.size} has no rank {command.rank}")
        if dist.is_initialized():
            raise InvalidRequest("group: this process is in a process group already")
        host = f"[{command.host}]" if ":" in command.host else command.host
        try:
            dist.init_process_group(
                "nccl" if device.type == "cuda" else "gloo",
                init_method=f"tcp://{host}:{command.port}",
                rank=command.rank,
                world_size=command.size,
                timeout=timedelta(seconds=command.timeout_s),
            )
        except (RuntimeError, ValueError, OSError) as error:
            # torch counts the groups of a process, and only connects groups of the same number.
            distributed_c10d._world.group_count = 0
            raise EngineFailed(f"the group {command.group} could not be joined: {_first_line(error)}") from error

    def receive(self, specs: tuple[TensorSpec, ...], timeout_s: float) -> dict[str, Tensor]:
        """Return the next tensors that rank 0 broadcasts. A group that has failed once is broken."""
        deadline = time.monotonic() + timeout_s
        tensors: dict[str, Tensor] = {}
        self.receiving = True
        for spec in specs:
            tensor = torch.empty(spec.shape, dtype=_DTYPES[spec.dtype], device=self._device)
            try:
                _broadcast(tensor, timedelta(seconds=max(0.001, deadline - time.monotonic())))
            except RuntimeError as error:
                self.broken, self.receiving = True, False
                raise EngineFailed(
                    f"{spec.name} was not received from the group {self.name}, which has been left; join it again:"
                    f" {_first_line(error)}"
                ) from error
            tensors[spec.name] = tensor
        self.receiving = False
        return tensors

    def close(self) -> None:
        """Leave the group."""
        dist.destroy_process_group()


def _broadcast(tensor: Tensor, timeout: timedelta) -> None:
    """Receive from rank 0. The timeout belongs to the operation: with a timeout of the wait only, the operation would
    keep running, and the group could not be left before its end."""
    group = dist.group.WORLD
    assert group is not None
    options = dist.BroadcastOptions()
    options.rootRank, options.rootTensor, options.timeout = 0, 0, timeout
    group.broadcast([tensor], options).wait(timeout)


def gather(source: WeightSource, parts: Parts, config: LlamaConfig, group: WeightGroup | None) -> ReplaceWeights:
    """Check the source and copy its tensors into this process, on any thread; return a function that replaces the
    weights. What happens to the source afterwards has no effect.

    Raises InvalidRequest for tensors that do not fit the model or cannot be read, and EngineFailed for those that did
    not arrive or find no memory; then no tensor has been replaced. The function raises EngineDead if it fails.
    """
    if isinstance(source, FromIpc):
        raise Unsupported("source: the torch engine shares no GPU memory with other processes")
    if isinstance(source, FromDisk):
        tensors = _from_disk(Path(source.path).expanduser(), parts, config)
    else:
        source = _with_own_names(source, config)
        _check(source.tensors, parts)
        tensors = _without_fused(_named(source, group))
    return lambda: _replace(tensors, parts)


def _with_own_names(source: _Named, config: LlamaConfig) -> _Named:
    """Return `source` with the names that its tensors have in a model of text alone."""
    rename = tensor_names(config)
    specs = tuple(msgspec.structs.replace(spec, name=rename(spec.name) or spec.name) for spec in source.tensors)
    return msgspec.structs.replace(source, tensors=specs)


def _parts_of(name: str, shape: tuple[int, ...]) -> list[FusedPart]:
    """Return the tensors of the model that a named tensor has: those of all experts, or itself."""
    return list(fused_parts(name, shape)) or [FusedPart(name, 0, shape)]


def _without_fused(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return `tensors` with those of all experts divided into those of single experts."""
    return {
        part.name: tensor.flatten()[part.start : part.start + math.prod(part.shape)].view(part.shape)
        for name, tensor in tensors.items()
        for part in _parts_of(name, tuple(tensor.shape))
    }


def _named(source: FromTensors | FromSharedMemory | FromGroup, group: WeightGroup | None) -> dict[str, Tensor]:
    match source:
        case FromTensors():
            return {spec.name: _inline(spec) for spec in source.tensors}
        case FromSharedMemory():
            return _from_segment(source)
        case FromGroup():
            if group is None or group.name != source.group:
                raise InvalidRequest(f"group: not in {source.group!r}; join it first")
            return group.receive(source.tensors, source.timeout_s)


def _from_segment(source: FromSharedMemory) -> dict[str, Tensor]:
    with open_segment(source.segment) as segment:
        for spec in source.tensors:
            _check_range(spec, segment)
        _refuse_without_memory(sum(_nbytes(spec) for spec in source.tensors))
        return {spec.name: _shared(spec, segment) for spec in source.tensors}


def _from_disk(directory: Path, parts: Parts, config: LlamaConfig) -> dict[str, Tensor]:
    if not directory.is_dir():
        raise InvalidRequest(f"path: {directory} is not a directory")
    _refuse_without_memory(sum(part.nbytes for part in parts.values()))
    staged = {name: torch.empty(part.shape, dtype=part.dtype) for name, part in parts.items()}
    try:
        if (directory / "config.json").is_file():
            _compare(read_llama_config(directory), config, directory)
        load_weights(directory, staged, lambda done, total: None, tensor_names(config))
    except ConfigError as error:
        raise InvalidRequest(f"path: {error.message}") from error
    return staged


def _refuse_without_memory(nbytes: int) -> None:
    """Raise EngineFailed if the machine cannot hold the new weights next to the old ones."""
    free = available_bytes(torch.device("cpu"))
    if nbytes > free:
        raise EngineFailed(
            f"new weights take {nbytes / 1e6:.0f} MB next to the old ones, and only {free / 1e6:.0f} MB are free;"
            " nothing has changed"
        )


def _compare(found: LlamaConfig, config: LlamaConfig, directory: Path) -> None:
    """Raise InvalidRequest if the configs differ: weights of equal shapes can belong to another model."""
    theirs, ours = (meaning(value) for value in (found, config))
    differing = sorted(field for field in ours.keys() | theirs.keys() if theirs.get(field) != ours.get(field))
    if differing:
        raise InvalidRequest(f"path: {directory} has another model: its config.json differs in {', '.join(differing)}")


def meaning(config: LlamaConfig) -> dict[str, object]:
    """Return the fields that define the meaning of weights, without context length and notation of positions."""
    fields = {**msgspec.structs.asdict(config), "positions": inverse_frequencies(config)}
    ignored = {"context", "theta", "rope", "layout", "diffusion"}
    ignored |= {field for field in ("spatial", "experts") if fields[field] is None}
    if config.diffusion is not None:
        fields |= {"block_length": config.diffusion.block_length, "mask_token": config.diffusion.mask_token}
    return {field: value for field, value in fields.items() if field not in ignored}


def _check(specs: tuple[TensorSpec, ...], parts: Parts) -> None:
    if not specs:
        raise InvalidRequest("tensors: the list is empty")
    found = [part for spec in specs for part in _parts_of(spec.name, spec.shape)]
    names = [part.name for part in found]
    if len(set(names)) < len(names):
        raise InvalidRequest("tensors: a name is given twice")
    _refuse_unknown(names, parts)
    if problem := mismatch(parts, {part.name: part.shape for part in found}, partial=True):
        raise InvalidRequest(f"tensors: {problem}")


def _refuse_unknown(names: list[str], parts: Parts) -> None:
    unknown = [name for name in names if name not in parts]
    if unknown:
        raise InvalidRequest(f"tensors: {unknown[0]} is not a tensor of this model")


def _replace(tensors: dict[str, Tensor], parts: Parts) -> int:
    try:
        for name, tensor in tensors.items():
            parts[name].copy_(tensor)
    except Exception as error:  # some weights are new and some old: only a restart can mend that
        raise EngineDead(f"the weights were replaced only in part: {_first_line(error)}") from error
    return len(tensors)


def _nbytes(spec: TensorSpec) -> int:
    return math.prod(spec.shape) * _DTYPES[spec.dtype].itemsize


def _inline(spec: InlineTensor) -> Tensor:
    if len(spec.data) != _nbytes(spec):
        raise InvalidRequest(f"tensors: {spec.name} has {len(spec.data)} bytes of data, not {_nbytes(spec)}")
    return torch.frombuffer(bytearray(spec.data), dtype=_DTYPES[spec.dtype]).view(spec.shape)


def _check_range(spec: SharedTensor, segment: Segment) -> None:
    if spec.offset + _nbytes(spec) > segment.nbytes:
        raise InvalidRequest(f"tensors: {spec.name} lies beyond the segment's {segment.nbytes} bytes")
    if spec.offset % _DTYPES[spec.dtype].itemsize:
        raise InvalidRequest(f"tensors: {spec.name} starts at {spec.offset}, which is not aligned to its dtype")


def _shared(spec: SharedTensor, segment: Segment) -> Tensor:
    return torch.frombuffer(segment.read(spec.offset, _nbytes(spec)), dtype=_DTYPES[spec.dtype]).view(spec.shape)


def _first_line(error: Exception) -> str:
    """Return the first line: torch adds its call stack to some messages."""
    return str(error).partition("\n")[0]
