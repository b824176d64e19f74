"""From settings to an engine: its model is found first, then the engine is built. No engine is imported before that."""

import importlib
import importlib.util
from collections.abc import Callable
from pathlib import Path
from typing import Literal, NamedTuple

import msgspec

from baton.config.directories import cache_directory
from baton.config.engines import ExpertOptions
from baton.config.settings import Settings
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

    return TorchEngine(settings.torch, Path(settings.model), settings.name, exports_kv=settings.role == "prefill")


def _sglang(settings: Settings) -> Engine:
    from baton.engines.sglang.adapter import SglangEmbedder, SglangEngine
    from baton.engines.sglang.launch_mode import LaunchMode

    options, args, model = settings.sglang, settings.engine_args, Path(settings.model)
    if embeds(settings):
        return SglangEmbedder(options, args, model, settings.name)
    mode = LaunchMode(settings.role) if settings.role in ("prefill", "decode") else LaunchMode()
    return SglangEngine(options, args, model, settings.name, mode, settings.experts)


def _load_sglang(settings: Settings) -> None:
    from baton.engines.sglang.compat import choose_device, import_sglang

    choose_device(settings.engine_args)
    import_sglang()


def _sglang_help(settings: Settings) -> str:
    from baton.engines.sglang.server_args import help_text

    return help_text()


def _trtllm(settings: Settings) -> Engine:
    if settings.role == "encode":
        from baton.engines.trtllm.encoder import TrtllmEncoder

        return TrtllmEncoder(settings.trtllm, settings.engine_args, Path(settings.model), settings.name)
    from baton.engines.trtllm.adapter import TrtllmEngine

    request_type = _trtllm_request_type(settings)
    return TrtllmEngine(settings.trtllm, settings.engine_args, Path(settings.model), settings.name, request_type)


def _trtllm_request_type(settings: Settings) -> Literal["context_only", "generation_only"] | None:
    """Return the library's name for what the engine of this role computes; None for whole requests."""
    if embeds(settings):
        raise ConfigError("the engine trtllm has no embeddings: use --engine torch or sglang")
    match settings.role:
        case "prefill":
            return "context_only"
        case "decode":
            return "generation_only"
        case _:
            return None


def _trtllm_help(settings: Settings) -> str:
    from baton.engines.trtllm.cli_args import engine_help

    return engine_help(settings.trtllm)


def _part(settings: Settings) -> Literal["whole", "prefill", "decode", "embed"]:
    """Return what an engine that has parts of its own is to be."""
    if settings.role == "prefill" or settings.role == "decode":
        return settings.role
    return "embed" if embeds(settings) else "whole"


class Kind(NamedTuple):
    """One engine: how it is built, what it serves when no model is named, what must be installed, what it can be told.

    One without `help` takes no words of its own; `load` is for one that is not simply imported.
    """

    build: Callable[[Settings], Engine]
    own_model: str
    own_name: str
    needs: tuple[str, ...] = ()
    help: Callable[[Settings], str] | None = None
    load: Callable[[Settings], None] | None = None


ENGINES = {
    "echo": Kind(_echo, str(MODEL_DIR), "echo"),
    "torch": Kind(_torch, "smollm2", "smollm2", needs=("torch", "transformers", "safetensors")),
    "sglang": Kind(
        _sglang, "smollm2", "smollm2", needs=("sglang", "torch", "zmq", "psutil"), help=_sglang_help, load=_load_sglang
    ),
    "trtllm": Kind(_trtllm, "smollm2", "smollm2", needs=("tensorrt_llm",), help=_trtllm_help),
}


def prepare_model(settings: Settings) -> Settings:
    """Return the settings with `model` a directory of this machine and `name` what it is served under.

    Fetches a model that is not here, which may take minutes, and blocks meanwhile. Raises ConfigError.
    """
    kind = _kind(settings)
    if settings.engine_args and kind.help is None:
        raise ConfigError(f"the engine {settings.engine} takes nothing after --: drop {settings.engine_args[0]}")
    if settings.experts != ExpertOptions() and settings.engine != "sglang":
        raise ConfigError(f"the engine {settings.engine} does not spread experts: drop --experts-...")
    model = settings.model or kind.own_model
    directory = resolve_model(model, cache_directory(settings) / "models")
    name = settings.name or (served_name(model) if settings.model else kind.own_name)
    return msgspec.structs.replace(settings, model=str(directory), name=name)


def prepare_tokenizer(settings: Settings) -> Settings:
    """Return the settings with `model` a directory that has at least tokenizer and configuration. See above.

    For processes that have no engine, so none need be installed.
    """
    model = settings.model or "smollm2"
    directory = resolve_model(model, cache_directory(settings) / "models", weights=False)
    return msgspec.structs.replace(settings, model=str(directory), name=settings.name or served_name(model))


def embeds(settings: Settings) -> bool:
    """Whether prepared settings name a model that embeds instead of generating."""
    if settings.engine == "sglang" and settings.role == "embed":
        return True  # SGLang embeds with models that can also generate
    return settings.engine != "echo" and is_sentence_model(Path(settings.model))


def words_help(settings: Settings) -> str:
    """Return what can follow `--` on the command line. Raises ConfigError if the engine takes nothing."""
    kind = _kind(settings)
    if kind.help is None:
        raise ConfigError(f"the engine {settings.engine} has no options beside its --{settings.engine}-... ones")
    return kind.help(settings)


def import_engine(settings: Settings) -> None:
    """Import what `build_engine` will need: it takes seconds, so do it off the event loop."""
    kind = _kind(settings)
    if kind.load is not None:
        kind.load(settings)
    else:
        for module in kind.needs:
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
