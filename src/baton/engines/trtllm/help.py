"""What `--help-engine` prints: how arguments are written, and the ones that the installed library has."""

from baton.config.engines import TrtllmOptions
from baton.engines.trtllm.cli_args import GRAMMAR
from baton.engines.trtllm.compat import Library, load
from baton.errors import ConfigError


def engine_help(options: TrtllmOptions, library: Library | None = None) -> str:
    """Return the text. Imports the library, which takes seconds; without one the text says so."""
    try:
        library = library or load()
    except ConfigError as error:
        return f"{GRAMMAR}\n\nThe arguments themselves cannot be listed here: {error.message}\n"
    model = library.arguments if options.backend == "pytorch" else library.autodeploy_arguments()
    names = sorted(name for name in model.model_fields if not name.startswith("_"))
    lines = [f"  --{name}  {_shown(model.model_fields[name].annotation)}" for name in names]
    return "\n".join([GRAMMAR, "", f"Arguments of TensorRT-LLM {library.features.version}:", *lines, ""])


def _shown(annotation: object) -> str:
    text = annotation.__name__ if isinstance(annotation, type) else str(annotation)
    return text.replace("typing.", "")
