"""Arguments after `--` on the command line: dotted flags over JSON over a YAML file, as one tree of plain values.

The tree becomes config objects of the library only when the engine is built, so a flag for one field of a config leaves
the other fields as they are.
"""

import json
from pathlib import Path
from typing import cast

import yaml

from baton.config.engines import TrtllmOptions
from baton.engines.trtllm.compat import Library, load
from baton.errors import ConfigError

Tree = dict[str, object]

GRAMMAR = """\
Arguments of TensorRT-LLM, after `--`. The later in this list wins:
  --config FILE      a YAML file of arguments
  --override JSON    an object of arguments
  --NAME VALUE       one argument, such as --max_batch_size 64; without a value it is true
  --NAME.FIELD VALUE one field of an argument, such as --kv_cache_config.free_gpu_memory_fraction 0.8
Each sets only the fields that it names."""


def read_arguments(args: tuple[str, ...]) -> Tree:
    """Return the tree of `args`. Raises ConfigError, naming the argument."""
    files: list[Tree] = []
    overrides: list[Tree] = []
    flags: list[Tree] = []
    rest = list(args)
    while rest:
        name, value = _pop_argument(rest)
        match name:
            case "config":
                files.append(_read_file(Path(value)))
            case "override":
                overrides.append(_read_json(value))
            case _:
                flags.append(_read_flag(name, value))
    tree: Tree = {}
    for layer in (*files, *overrides, *flags):
        tree = merged(tree, layer)
    return tree


def engine_help(options: TrtllmOptions, library: Library | None = None) -> str:
    """Return the text of `--help-engine`: the syntax, and the arguments of the installed library.

    Imports the library, which takes seconds. If that fails, the text has the reason instead of the arguments.
    """
    try:
        library = library or load()
    except ConfigError as error:
        return f"{GRAMMAR}\n\nThe arguments cannot be listed: {error.message}\n"
    model = library.arguments if options.backend == "pytorch" else library.autodeploy_arguments()
    names = sorted(name for name in model.model_fields if not name.startswith("_"))
    lines = [f"  --{name}  {_type_name(model.model_fields[name].annotation)}" for name in names]
    return "\n".join([GRAMMAR, "", f"Arguments of TensorRT-LLM {library.features.version}:", *lines, ""])


def merged(under: Tree, over: Tree) -> Tree:
    """Return a tree with the values of both; where both have one, that of `over`."""
    result = dict(under)
    for name, value in over.items():
        before = result.get(name)
        if isinstance(before, dict) and isinstance(value, dict):
            result[name] = merged(before, value)
        else:
            result[name] = value
    return result


def put(tree: Tree, path: tuple[str, ...], value: object) -> Tree:
    """Return `tree` with `value` at `path`."""
    for name in reversed(path):
        value = {name: value}
    return merged(tree, cast(Tree, value))


def find(tree: Tree, *path: str) -> object:
    """Return the value at `path`, or None."""
    value: object = tree
    for name in path:
        value = value.get(name) if isinstance(value, dict) else None
    return value


def _pop_argument(rest: list[str]) -> tuple[str, str]:
    """Remove one argument from the front of `rest`; return its name and value."""
    flag = rest.pop(0)
    if not flag.startswith("--") or flag == "--":
        raise ConfigError(f"{flag!r} is not an argument of TensorRT-LLM: write --NAME VALUE")
    name, equals, value = flag[2:].partition("=")
    if not equals:
        value = _pop_value(name, rest)
    if not all(field.replace("-", "_").isidentifier() for field in name.split(".")):
        raise ConfigError(f"--{name} is not the name of an argument")
    return name, value


def _pop_value(name: str, rest: list[str]) -> str:
    if rest and not rest[0].startswith("--"):
        return rest.pop(0)
    if name in ("config", "override"):
        raise ConfigError(f"--{name} needs a value")
    return "true"


def _read_flag(name: str, value: str) -> Tree:
    try:
        content = yaml.safe_load(value)
    except yaml.YAMLError as error:
        raise ConfigError(f"the value of --{name} is not valid YAML: {_one_line(error)}") from None
    return put({}, tuple(field.replace("-", "_") for field in name.split(".")), content)


def _read_json(text: str) -> Tree:
    try:
        content = json.loads(text)
    except ValueError as error:
        raise ConfigError(f"--override is not valid JSON: {error}") from None
    return _checked(content, "--override")


def _read_file(path: Path) -> Tree:
    try:
        content = yaml.safe_load(path.expanduser().read_text())
    except OSError as error:
        raise ConfigError(f"--config: cannot read {path}: {error.strerror}") from None
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ConfigError(f"--config: {path} is not valid YAML: {_one_line(error)}") from None
    return {} if content is None else _checked(content, f"--config {path}")


def _checked(content: object, source: str) -> Tree:
    if not isinstance(content, dict) or not all(isinstance(name, str) for name in content):
        raise ConfigError(f"{source} must hold an object of arguments, by name")
    return content


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())


def _type_name(annotation: object) -> str:
    text = annotation.__name__ if isinstance(annotation, type) else str(annotation)
    return text.replace("typing.", "")
