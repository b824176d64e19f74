"""From settings to an engine: the model is resolved first, then the engine is imported and built."""

import importlib
import importlib.util
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Literal, NamedTuple

import msgspec

from baton.config.directories import cache_directory
from baton.config.engines import ExpertOptions
from baton.config.settings import Settings
from baton.engine_kit.cpp_build import BuildError, find_compiler
from baton.engines.echo.engine import MODEL_DIR, VISION_MODEL_DIR, EchoEngine
from baton.errors import ConfigError
from baton.models.chat_template import read_all_templates, read_template_file
from baton.models.directory import read_config, resolve_model, served_name
from baton.models.families import REASONING, TOOL_CALLS, find_parser
from baton.models.sentence import is_sentence_model
from baton.ports.engine import Engine

if TYPE_CHECKING:
    from baton.engines.torch.engine import TorchEngine

GPU_DEVICE = Path("/dev/nvidiactl")


def _echo(settings: Settings) -> Engine:
    options = settings.echo
    if settings.context_length:
        options = msgspec.structs.replace(options, context=settings.context_length)
    keeps_kv = settings.role in ("prefill", "decode")
    return EchoEngine(options, Path(settings.model), settings.first_name, keeps_kv)


def _torch(settings: Settings) -> Engine:
    directory, name = Path(settings.model), settings.first_name
    if embeds(settings):
        from baton.engines.torch.embedder import TorchEmbedder

        if settings.context_length:
            raise ConfigError("the files of an embedding model set its context length: drop --context-length")
        return TorchEmbedder(settings.torch, directory, name)
    if settings.role == "encode":
        from baton.engines.torch.vision_engine import TorchVisionEngine

        return TorchVisionEngine(settings.torch, directory, name)
    options = msgspec.structs.replace(settings.torch, context=settings.context_length)
    exports_kv = settings.role == "prefill"
    return _torch_generate(settings)(options, directory, name, exports_kv=exports_kv, experts=settings.experts)


def _torch_warning(settings: Settings) -> str | None:
    """Return what a missing compiler costs, where a CPU computes."""
    on_gpu = settings.torch.device.startswith("cuda") or (settings.torch.device == "auto" and GPU_DEVICE.exists())
    if on_gpu or not settings.torch.native or embeds(settings):
        return None
    try:
        find_compiler()
    except BuildError as error:
        return f"{error}. Until then answers take three to five times as long"
    return None


def _torch_generate(settings: Settings) -> "type[TorchEngine]":
    """Return the engine class: with the vision tower of a model that has one, unless others encode for this worker."""
    from baton.engines.torch.engine import TorchEngine
    from baton.engines.torch.models.vision_language import has_media

    if settings.role == "decode" or settings.media.local_encoding == "never" or not has_media(Path(settings.model)):
        return TorchEngine
    from baton.engines.torch.vision_language_engine import TorchVisionLanguageEngine

    return TorchVisionLanguageEngine


def _sglang(settings: Settings) -> Engine:
    from baton.engines.sglang.adapter import SglangEmbedder, SglangEngine
    from baton.engines.sglang.launch_mode import LaunchMode

    options, args = settings.sglang, _with_context_length(settings, "--context-length")
    model, name = Path(settings.model), settings.first_name
    if embeds(settings):
        return SglangEmbedder(options, args, model, name)
    if settings.role == "encode":
        from baton.engines.sglang.encoder import SglangEncoder

        return SglangEncoder(options, args, model, name)
    mode = LaunchMode(settings.role) if settings.role in ("prefill", "decode") else LaunchMode()
    return SglangEngine(options, args, model, name, mode, settings.experts, settings.media.encoders)


def _with_context_length(settings: Settings, flag: str) -> tuple[str, ...]:
    """Return the engine's arguments with the context length. Raises ConfigError if they have another."""
    args = settings.engine_args
    if not settings.context_length:
        return args
    if any(arg.split("=")[0] == flag for arg in args):
        raise ConfigError(f"the context length is given twice: drop --context-length, or {flag} after --")
    return (*args, flag, str(settings.context_length))


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

        return TrtllmEncoder(settings.trtllm, settings.engine_args, Path(settings.model), settings.first_name)
    from baton.engines.trtllm.adapter import TrtllmEngine

    request_type = _trtllm_request_type(settings)
    args = _with_context_length(settings, "--max_seq_len")
    return TrtllmEngine(settings.trtllm, args, Path(settings.model), settings.first_name, request_type)


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


class Kind(NamedTuple):
    """One engine: how it is built, its default model and name, and the modules that must be installed.

    `weights` is the pattern of the files without which it does not start. `help` returns the help text of its own
    arguments; an engine without it takes none. `load` imports an engine that needs more than an import of `needs`.
    `warning` returns what makes it slow on this machine.
    """

    build: Callable[[Settings], Engine]
    own_model: str
    own_name: str
    needs: tuple[str, ...] = ()
    weights: str = ""
    help: Callable[[Settings], str] | None = None
    load: Callable[[Settings], None] | None = None
    warning: Callable[[Settings], str | None] = lambda settings: None


ENGINES = {
    "echo": Kind(_echo, str(MODEL_DIR), "echo"),
    "torch": Kind(
        _torch,
        "smollm2",
        "smollm2",
        needs=("torch", "transformers", "safetensors"),
        weights="*.safetensors",
        warning=_torch_warning,
    ),
    "sglang": Kind(
        _sglang, "smollm2", "smollm2", needs=("sglang", "torch", "zmq", "psutil"), help=_sglang_help, load=_load_sglang
    ),
    "trtllm": Kind(_trtllm, "smollm2", "smollm2", needs=("tensorrt_llm",), help=_trtllm_help),
}


def prepare_model(settings: Settings) -> Settings:
    """Return the settings with `model` as a local directory and `name` as the served names.

    Blocks while it downloads a model, which may take minutes. Raises ConfigError.
    """
    kind = _kind(settings)
    if settings.engine_args and kind.help is None:
        raise ConfigError(f"the engine {settings.engine} takes no arguments after --: drop {settings.engine_args[0]}")
    model = settings.model or _own_model(settings, kind)
    directory = resolve_model(model, cache_directory(settings) / "models")
    if kind.weights and not any(directory.glob(kind.weights)):
        raise ConfigError(f"model directory {str(directory)!r} has no weights: no file {kind.weights}")
    if settings.experts != ExpertOptions():
        _check_experts(settings, directory)
    name = ",".join(settings.served_names) or (served_name(model) if settings.model else kind.own_name)
    return _prepare_chat(msgspec.structs.replace(settings, model=str(directory), name=name))


def _check_experts(settings: Settings, directory: Path) -> None:
    """Raise ConfigError for expert settings that the engine refuses. SGLang's are checked with its arguments."""
    if settings.engine == "sglang":
        return
    if settings.engine != "torch":
        raise ConfigError(f"the engine {settings.engine} has no expert parallelism: drop the --experts-* settings")
    from baton.engines.torch.experts.settings import refuse_without_experts, resolve_experts
    from baton.engines.torch.models.config import read_llama_config

    if is_sentence_model(directory):
        refuse_without_experts(settings.experts)
    else:
        config = read_llama_config(directory)
        resolve_experts(settings.experts, config.experts, config.layers)


def _own_model(settings: Settings, kind: Kind) -> str:
    return str(VISION_MODEL_DIR) if settings.engine == "echo" and settings.echo.media else kind.own_model


def prepare_tokenizer(settings: Settings) -> Settings:
    """Return the settings with `model` as a local directory with at least tokenizer and configuration.

    For processes without an engine: none needs to be installed.
    """
    kind = ENGINES.get(settings.engine, ENGINES["torch"])
    directory = resolve_model(settings.model or kind.own_model, cache_directory(settings) / "models", weights=False)
    name = ",".join(settings.served_names) or (served_name(settings.model) if settings.model else kind.own_name)
    return _prepare_chat(msgspec.structs.replace(settings, model=str(directory), name=name))


def _prepare_chat(settings: Settings) -> Settings:
    """Return the settings with the parsers of the model's family and a checked chat template. Raises ConfigError."""
    if embeds(settings):
        _refuse_chat_settings(settings)
        return settings
    if settings.chat_template:
        file = Path(settings.chat_template).expanduser().resolve()
        settings = msgspec.structs.replace(settings, chat_template=str(file))
        template = read_template_file(file)
    else:
        template = read_all_templates(Path(settings.model))
    if settings.model_input == "text":
        return settings
    model_type = read_config(Path(settings.model)).model_type
    found = {
        "tool_call_parser": find_parser(TOOL_CALLS, model_type, template),
        "reasoning_parser": find_parser(REASONING, model_type, template),
    }
    chosen = {name: parser for name, parser in found.items() if getattr(settings, name) == "auto"}
    return msgspec.structs.replace(settings, **chosen)


def _refuse_chat_settings(settings: Settings) -> None:
    for name in ("tool_call_parser", "reasoning_parser", "chat_template"):
        if getattr(settings, name) not in ("auto", "none", ""):
            raise ConfigError(f"an embedding model does not chat: drop --{name.replace('_', '-')}")


def embeds(settings: Settings) -> bool:
    """Whether prepared settings name a model that embeds instead of generating."""
    if settings.engine == "sglang" and settings.role == "embed":
        return True  # SGLang embeds with models that can also generate
    return settings.engine != "echo" and is_sentence_model(Path(settings.model))


def engine_args_help(settings: Settings) -> str | None:
    """Return the help text of the arguments after `--`, None if the engine takes none."""
    kind = _kind(settings)
    return kind.help(settings) if kind.help is not None else None


def start_warning(settings: Settings) -> str | None:
    """Return what makes the engine of prepared `settings` slow on this machine, None if nothing does."""
    return ENGINES[settings.engine].warning(settings)


def import_engine(settings: Settings) -> None:
    """Import the modules of the engine. Takes seconds: call it off the event loop."""
    kind = _kind(settings)
    if kind.load is not None:
        kind.load(settings)
    else:
        for module in kind.needs:
            importlib.import_module(module)


def build_engine(settings: Settings) -> Engine:
    """Return the engine of prepared `settings`, not started. Raises ConfigError."""
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
