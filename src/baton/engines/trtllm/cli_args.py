"""What the user wrote after `--`: dotted flags over JSON over a YAML file, as one tree of plain values.

Nothing is a config object of the library before the very end, so that whoever names one field changes that field.
"""

import json
from pathlib import Path
from typing import cast

import yaml

from baton.errors import ConfigError

Tree = dict[str, object]

GRAMMAR = """\
Arguments of TensorRT-LLM, after `--`; the last of these wins:
  --config FILE      a YAML file of arguments
  --override JSON    an object of arguments
  --NAME VALUE       one argument, as --max_batch_size 64; without a value it is true
  --NAME.FIELD VALUE one field of one, as --kv_cache_config.free_gpu_memory_fraction 0.8
Each changes the fields that it names and leaves the others."""


def read_arguments(args: tuple[str, ...]) -> Tree:
    """Return what `args` ask for. Raises ConfigError, naming the argument."""
    files: list[Tree] = []
    overrides: list[Tree] = []
    flags: list[Tree] = []
    words = list(args)
    while words:
        name, value = _take(words)
        match name:
            case "config":
                files.append(_read_file(Path(value)))
            case "override":
                overrides.append(_read_json(value))
            case _:
                flags.append(_read_flag(name, value))
    tree: Tree = {}
    for part in (*files, *overrides, *flags):
        tree = merged(tree, part)
    return tree


def merged(under: Tree, over: Tree) -> Tree:
    """Return a tree with everything of both; where both have a value, the one of `over`."""
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
    """Return what is at `path`, or None."""
    value: object = tree
    for name in path:
        value = value.get(name) if isinstance(value, dict) else None
    return value


def _take(words: list[str]) -> tuple[str, str]:
    word = words.pop(0)
    if not word.startswith("--") or word == "--":
        raise ConfigError(f"{word!r} is not an argument of TensorRT-LLM: write --NAME VALUE")
    name, equals, value = word[2:].partition("=")
    if not equals and words and not words[0].startswith("--"):
        value = words.pop(0)
    elif not equals and name in ("config", "override"):
        raise ConfigError(f"--{name} needs a value")
    elif not equals:
        value = "true"
    if not all(part.replace("-", "_").isidentifier() for part in name.split(".")):
        raise ConfigError(f"--{name} is not the name of an argument")
    return name, value


def _read_flag(name: str, value: str) -> Tree:
    try:
        content = yaml.safe_load(value)
    except yaml.YAMLError as error:
        raise ConfigError(f"the value of --{name} is not valid YAML: {_one_line(error)}") from None
    return put({}, tuple(part.replace("-", "_") for part in name.split(".")), content)


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
