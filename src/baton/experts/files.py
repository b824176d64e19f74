"""Expert files in SGLang's formats: recorder dumps and layouts are read and validated, layouts are written.

SGLang chooses the format by suffix, loads `.pt` with `weights_only`, prefers `physical_to_logical_map` to
`logical_count`, and passes every other key as an argument. It checks neither shapes nor that each expert has a slot.
"""

import io
import math
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, BinaryIO

import msgspec
from msgspec import Meta

from baton.errors import ConfigError
from baton.experts.placement import Layout

if TYPE_CHECKING:
    import torch

LAYOUT_KEY = "physical_to_logical_map"
COUNTS_KEY = "logical_count"
RECORDS_KEY = "records"
SUFFIXES = (".json", ".pt")

Content = dict[str, object]
_Count = Annotated[float, Meta(ge=0, le=2.0**62)]
_Expert = Annotated[int, Meta(ge=0)]


def read_counts(path: Path) -> list[list[float]]:
    """Return the use count of each expert in each layer, from a recorder dump. Raises ConfigError."""
    counts = counts_in(read_content(path), path)
    if not any(map(any, counts)):
        raise ConfigError(f"every count in {path} is zero: record while the worker serves requests")
    return counts


def write_layout(path: Path, layout: Layout) -> None:
    """Write a file for `--experts-layout`, atomically. Raises ConfigError."""
    check_suffix(path)
    content = msgspec.json.encode({LAYOUT_KEY: layout}) if path.suffix == ".json" else _as_pt(layout, path)
    try:
        write_atomically(path, lambda file: file.write(content))
    except OSError as error:
        raise ConfigError(f"cannot write {path}: {error.strerror}") from None


def write_atomically(path: Path, write: Callable[[BinaryIO], object]) -> None:
    """Write a file with `write`; under its name there is the whole file or what was there before. Raises OSError."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with temporary.open("xb") as file:
            write(file)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def check_suffix(path: Path) -> None:
    """Raise ConfigError for a suffix that SGLang does not read."""
    if path.suffix not in SUFFIXES:
        raise ConfigError(f"{path} must end in .json or .pt: SGLang chooses the format by suffix")


def read_content(path: Path) -> Content:
    """Return the content of the file by key. Raises ConfigError with the path."""
    check_suffix(path)
    try:
        content = _load_json(path) if path.suffix == ".json" else _load_pt(path)
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror or error}") from None
    if not isinstance(content, dict):
        raise ConfigError(f"{path} must contain an object with {LAYOUT_KEY} or {COUNTS_KEY}")
    return content


def counts_in(content: Content, path: Path) -> list[list[float]]:
    """Return the use count of each expert in each layer, summed over passes. Raises ConfigError."""
    if COUNTS_KEY not in content:
        raise ConfigError(f"{path} has no {COUNTS_KEY}{_missing_counts_hint(content)}")
    value = content[COUNTS_KEY]
    passes = [value] if _depth(value) == 2 else value
    try:
        tables = msgspec.convert(passes, list[list[list[_Count]]])
    except msgspec.ValidationError as error:
        raise ConfigError(
            f"{COUNTS_KEY} in {path} must be layers x experts, or passes x layers x experts, of counts: {error}"
        ) from None
    return _summed(tables, path)


def layout_in(content: Content, path: Path) -> list[list[int]]:
    """Return the logical expert in each slot of each layer. Raises ConfigError unless SGLang can start with it."""
    unknown = sorted(str(key) for key in content if key != LAYOUT_KEY)
    if unknown:
        raise ConfigError(f"{path} must contain only {LAYOUT_KEY}: SGLang fails on {', '.join(unknown)}")
    try:
        layout = msgspec.convert(content[LAYOUT_KEY], list[list[_Expert]])
    except msgspec.ValidationError as error:
        raise ConfigError(f"{LAYOUT_KEY} in {path} must be layers x slots of expert numbers: {error}") from None
    _check_rows(layout, LAYOUT_KEY, path)
    experts = max(map(max, layout)) + 1
    for layer, row in enumerate(layout):
        placed = set(row)
        if len(placed) != experts:
            missing = next(expert for expert in range(experts) if expert not in placed)
            raise ConfigError(f"{LAYOUT_KEY} in {path} has no slot for expert {missing} in layer {layer}")
    return layout


def _as_pt(layout: Layout, path: Path) -> bytes:
    try:
        import torch
    except ImportError:
        raise ConfigError(f"writing {path} needs torch: install baton-serve[torch], or use a .json file") from None
    buffer = io.BytesIO()
    torch.save({LAYOUT_KEY: torch.tensor(layout, dtype=torch.int64)}, buffer)
    return buffer.getvalue()


def _load_json(path: Path) -> object:
    try:
        return msgspec.json.decode(path.read_bytes())
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} is not valid JSON: {error}") from None


def _load_pt(path: Path) -> object:
    try:
        import torch
    except ImportError:
        raise ConfigError(
            f"reading {path} needs torch: install baton-serve[torch] or baton-serve[sglang], or use a .json file"
        ) from None
    try:
        content: object = torch.load(path, weights_only=True, map_location="cpu")
    except OSError:
        raise
    except Exception as error:  # torch raises many types for a file that it did not write
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise ConfigError(f"{path} is not a torch file: {reason}") from error
    if not isinstance(content, dict):
        return content
    return {key: _numbers(value, key, path) if torch.is_tensor(value) else value for key, value in content.items()}


def _numbers(tensor: "torch.Tensor", key: object, path: Path) -> object:
    """Return a tensor as lists. Counts are summed over passes first, because lists of all passes would be too large."""
    if key == COUNTS_KEY and tensor.ndim == 3:
        if bool((tensor < 0).any()):
            raise ConfigError(f"{COUNTS_KEY} in {path} has negative counts")
        tensor = tensor.sum(0)
    return tensor.tolist() if key in (COUNTS_KEY, LAYOUT_KEY) else tensor


def _summed(tables: list[list[list[float]]], path: Path) -> list[list[float]]:
    if not tables:
        raise ConfigError(f"{COUNTS_KEY} in {path} is empty: nothing was recorded")
    for table in tables:
        _check_rows(table, COUNTS_KEY, path)
    if len({(len(table), len(table[0])) for table in tables}) > 1:
        raise ConfigError(f"{COUNTS_KEY} in {path} has passes of different shapes")
    counts = [[sum(cell) for cell in zip(*rows, strict=True)] for rows in zip(*tables, strict=True)]
    if not all(math.isfinite(count) for row in counts for count in row):
        raise ConfigError(f"{COUNTS_KEY} in {path} has counts that are not numbers")
    return counts


def _check_rows(rows: Sequence[Sequence[float]], key: str, path: Path) -> None:
    if not rows or not rows[0]:
        raise ConfigError(f"{key} in {path} is empty")
    for layer, row in enumerate(rows):
        if len(row) != len(rows[0]):
            raise ConfigError(f"{key} in {path} has {len(rows[0])} columns in layer 0 and {len(row)} in layer {layer}")


def _missing_counts_hint(content: Content) -> str:
    if LAYOUT_KEY in content:
        return ": it is a layout, not a recorder dump"
    if RECORDS_KEY in content:
        return ": it is a per_pass or per_token dump; record again with `--experts-recorder stat`"
    return ": record with `--experts-recorder stat`"


def _depth(value: object) -> int:
    depth = 0
    while isinstance(value, list):
        depth += 1
        value = value[0] if value else None
    return depth
