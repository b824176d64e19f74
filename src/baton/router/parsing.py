"""Parses topology files into typed values. Each problem is recorded with its path inside the file."""

import json
import re
from collections.abc import Hashable, Sized
from pathlib import Path
from typing import TypeVar, get_args, get_type_hints

import msgspec
import yaml

from baton.errors import ConfigError

Tree = dict[str, object]
T = TypeVar("T")

MAX_SHOWN = 4
NAME = r"^[a-z0-9_-]+\Z"
ENDPOINT = r"^[a-z0-9_-]+\.[a-z0-9_-]+\Z"
PATTERN_MESSAGES = {
    NAME: "may only contain lowercase letters, digits, - and _",
    ENDPOINT: "must be COMPONENT.ENDPOINT, each of lowercase letters, digits, - and _",
}
_TYPE_NAMES = {
    "`object`": "a mapping",
    "`array`": "a list",
    "`bool`": "a boolean",
    "`int | str`": "a pool name or number",
    "`int`": "an integer",
    "`float`": "a number",
    "`str`": "a string",
    "`null`": "null",
}


class Problems:
    """The problems of one file, collected so that one error reports all of them."""

    def __init__(self, file: Path) -> None:
        self.file = file
        self._lines: list[str] = []

    def add(self, at: str, problem: str) -> None:
        """Record a problem at `at`, a path inside the file."""
        self._lines.append(f"{at}: {problem}" if at else problem)

    def raise_if_any(self) -> None:
        """Raise ConfigError, with a message of one line, if a problem was recorded."""
        if not self._lines:
            return
        more = len(self._lines) - MAX_SHOWN
        shown = "; ".join(self._lines[:MAX_SHOWN])
        raise ConfigError(f"{self.file}: {shown}" + (f"; and {more} more" if more > 0 else ""))


def load_tree(file: Path) -> Tree:
    """Return the mapping in a YAML or JSON file. Raises ConfigError if the file does not contain one."""
    try:
        text = file.read_text()
        content: object = _load_json(text) if file.suffix == ".json" else yaml.load(text, _Loader)
    except OSError as error:
        raise ConfigError(f"cannot read {file}: {error.strerror}") from None
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        kind = "JSON" if file.suffix == ".json" else "YAML"
        raise ConfigError(f"{file} is not valid {kind}: {' '.join(str(error).split())}") from None
    if not isinstance(content, dict) or not all(isinstance(key, str) for key in content):
        raise ConfigError(f"{file} must contain a mapping with string keys (see docs/router.md)")
    return content


def convert(value: object, kind: type[T], at: str, problems: Problems) -> T | None:
    """Return `value` as a `kind`, or None after recording the problem. A key with null counts as absent."""
    if isinstance(value, dict):
        value = {key: inner for key, inner in value.items() if inner is not None}
    try:
        return msgspec.convert(value, kind)
    except msgspec.ValidationError as error:
        problem, _, path = str(error).partition(" - at `")
        if path.startswith("key`"):
            problem, path = "keys must be strings", path.removeprefix("key` in `")
        inside = path.strip("`").removeprefix("$")
        problems.add(*_translate(problem, at + inside if at else inside.removeprefix("."), kind))
        return None


def count_entries(items: Sized) -> str:
    """Return the number of items with its noun."""
    return "1 entry" if len(items) == 1 else f"{len(items)} entries"


def _translate(problem: str, at: str, kind: object) -> tuple[str, str]:
    """Return the path and the message of a problem that msgspec reported."""
    if named := re.fullmatch(r"Object (contains unknown|missing required) field `(.*)`", problem):
        at = f"{at}.{named[2]}" if at else named[2]
        return at, "unknown key" if named[1] == "contains unknown" else "missing"
    if problem.startswith("Invalid enum value"):
        choices = get_args(get_type_hints(kind)[at.rpartition(".")[2]])
        return at, f"{problem.removeprefix('Invalid enum value ')} is not one of {', '.join(map(str, choices))}"
    for pattern, message in PATTERN_MESSAGES.items():
        if problem.replace(" | null", "") == f"Expected `str` matching regex {pattern!r}":
            return at, message
    problem = problem.replace(" | null", "")
    for name, meaning in _TYPE_NAMES.items():
        problem = problem.replace(name, meaning)
    return at, problem[:1].lower() + problem[1:]


def _load_json(text: str) -> object:
    return json.loads(text, object_pairs_hook=_unique_keys)


def _unique_keys(pairs: list[tuple[str, object]]) -> Tree:
    tree = dict(pairs)
    if len(tree) < len(pairs):
        keys = [key for key, _ in pairs]
        raise ValueError(f"duplicate key {next(key for key in keys if keys.count(key) > 1)}")
    return tree


class _Loader(yaml.SafeLoader):
    """Refuses duplicate keys, of which YAML keeps the last."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, object]:
        keys = [key.value for key, _ in node.value if isinstance(key, yaml.ScalarNode)]
        for key in keys:
            if keys.count(key) > 1:
                raise yaml.constructor.ConstructorError(None, None, f"duplicate key {key}", node.start_mark)
        return super().construct_mapping(node, deep)
