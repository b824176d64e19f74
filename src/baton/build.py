"""From settings to an engine: its model is found first, then the engine is built. No engine is imported before that."""

import importlib
import importlib.util
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import msgspec

from baton.config import Settings, cache_directory
from baton.engines.echo.engine import MODEL_DIR, EchoEngine
from baton.errors import ConfigError
from baton.models.directory import resolve_model, served_name
from baton.models.sentence import is_sentence_model
from baton.ports.engine import Engine


def _echo(settings: Settings) -> Engine:
    return EchoEngine(settings.echo, Path(settings.model), settings.name)


def _torch(settings: Settings) -> Engine:
    if embeds(settings):
        from baton.engines.torch.embedder import TorchEmbedder

        return TorchEmbedder(settings.torch, Path(settings.model), settings.name)
    from baton.engines.torch.engine import TorchEngine

    return TorchEngine(settings.torch, Path(settings.model), settings.name, lends=settings.role == "prefill")


class Kind(NamedTuple):
    """One engine: how it is built, what it serves when no model is named, and what must be installed for it."""

    build: Callable[[Settings], Engine]
    own_model: str
    own_name: str
    needs: tuple[str, ...] = ()


ENGINES = {
    "echo": Kind(_echo, str(MODEL_DIR), "echo"),
    "torch": Kind(_torch, "smollm2", "smollm2", needs=("torch", "transformers", "safetensors")),
}


def prepare_model(settings: Settings) -> Settings:
    """Return the settings with `model` a directory of this machine and `name` what it is served under.

    Fetches a model that is not here, which may take minutes, and blocks meanwhile. Raises ConfigError.
    """
    kind = _kind(settings)
    model = settings.model or kind.own_model
    directory = resolve_model(model, cache_directory(settings) / "models")
    name = settings.name or (served_name(model) if settings.model else kind.own_name)
    return msgspec.structs.replace(settings, model=str(directory), name=name)


def embeds(settings: Settings) -> bool:
    """Whether prepared settings name a model that embeds instead of generating."""
    return settings.engine == "torch" and is_sentence_model(Path(settings.model))


def import_engine(settings: Settings) -> None:
    """Import what `build_engine` will need: it takes seconds, so do it off the event loop."""
    for module in _kind(settings).needs:
        importlib.import_module(module)


def build_engine(settings: Settings) -> Engine:
    """Return the engine that prepared `settings` name, not yet started. Raises ConfigError."""
    return _kind(settings).build(settings)


def _kind(settings: Settings) -> Kind:
    if settings.engine not in ENGINES:
        raise ConfigError(f"unknown engine {settings.engine!r}; choose one of: {', '.join(sorted(ENGINES))}")
    kind = ENGINES[settings.engine]
    missing = [module for module in kind.needs if importlib.util.find_spec(module) is None]
    if missing:
        raise ConfigError(
            f"the engine {settings.engine} needs {' and '.join(missing)}, not installed here: "
            f"pip install 'baton-serve[{settings.engine}]', or try Baton without a model: --engine echo"
        )
    return kind
