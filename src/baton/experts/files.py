"""Files of the planner: counts in, a layout out, in the forms that SGLang writes and reads."""

import io
import os
from pathlib import Path

import msgspec

from baton.errors import ConfigError
from baton.experts.formats import LAYOUT_KEY, SUFFIXES, counts_in, read_content
from baton.experts.placement import Layout


def read_counts(path: Path) -> list[list[float]]:
    """Return how often each expert of each layer was used, from a recorder's dump. Raises ConfigError."""
    counts = counts_in(read_content(path), path)
    if not any(map(any, counts)):
        raise ConfigError(f"every count in {path} is zero: record while the worker serves requests, then dump")
    return counts


def write_layout(path: Path, layout: Layout) -> None:
    """Write what `--experts-layout` takes; the file is there whole or not at all. Raises ConfigError."""
    check_target(path)
    content = msgspec.json.encode({LAYOUT_KEY: layout}) if path.suffix == ".json" else _as_pt(layout, path)
    fresh = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with fresh.open("xb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        fresh.replace(path)
    except OSError as error:
        fresh.unlink(missing_ok=True)
        raise ConfigError(f"cannot write {path}: {error.strerror}") from None


def check_target(path: Path) -> None:
    """Raise ConfigError for a name that SGLang would not know how to read."""
    if path.suffix not in SUFFIXES:
        raise ConfigError(f"{path} must end in .json or .pt, for SGLang goes by the suffix")


def _as_pt(layout: Layout, path: Path) -> bytes:
    try:
        import torch
    except ImportError:
        raise ConfigError(
            f"{path} needs torch to be written: install baton-serve[torch], or name a .json file"
        ) from None
    buffer = io.BytesIO()
    torch.save({LAYOUT_KEY: torch.tensor(layout, dtype=torch.int64)}, buffer)
    return buffer.getvalue()
