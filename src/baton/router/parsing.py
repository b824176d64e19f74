"""From a file to values of known types. Each problem is noted with its place, in words for whoever wrote the file."""

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

MOST_SHOWN = 4
NAME = r"^[a-z0-9_-]+\Z"
ENDPOINT = r"^[a-z0-9_-]+\.[a-z0-9_-]+\Z"
FORMS = {
    NAME: "must be made of small letters, digits, - and _",
    ENDPOINT: "must be two words with a dot between, made of small letters, digits, - and _",
}
_WORDS = {
    "`object`": "a mapping",
    "`array`": "a list",
    "`bool`": "true or false",
    "`int | str`": "a pool's name or number",
    "`int`": "a whole number",
    "`float`": "a number",
    "`str`": "text",
}


class Problems:
    """What is wrong with one file. Nothing is raised before all of it has been looked at."""

    def __init__(self, file: Path) -> None:
        self.file = file
        self._lines: list[str] = []

    def add(self, at: str, what: str) -> None:
        """Note that `what` is wrong at `at`, a path inside the file."""
        self._lines.append(f"{at}: {what}" if at else what)

    def raise_any(self) -> None:
        """Raise ConfigError, in one line, if anything is wrong."""
        if not self._lines:
            return
        more = len(self._lines) - MOST_SHOWN
        shown = "; ".join(self._lines[:MOST_SHOWN])
        raise ConfigError(f"{self.file}: {shown}" + (f"; and {more} more" if more > 0 else ""))


def read_content(file: Path) -> Tree:
    """Return the mapping that a YAML or JSON file holds. Raises ConfigError if there is none."""
    try:
        text = file.read_text()
        content: object = _json(text) if file.suffix == ".json" else yaml.load(text, _Loader)
    except OSError as error:
        raise ConfigError(f"cannot read {file}: {error.strerror}") from None
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        kind = "JSON" if file.suffix == ".json" else "YAML"
        raise ConfigError(f"{file} is not valid {kind}: {' '.join(str(error).split())}") from None
    if not isinstance(content, dict) or not all(isinstance(key, str) for key in content):
        raise ConfigError(f"{file} must hold a mapping, as docs/router.md describes it")
    return content


def shaped(value: object, kind: type[T], at: str, problems: Problems) -> T | None:
    """Return `value` as a `kind`, or None after noting why it is not one. A key with null is as good as none."""
    if isinstance(value, dict):
        value = {key: inner for key, inner in value.items() if inner is not None}
    try:
        return msgspec.convert(value, kind)
    except msgspec.ValidationError as error:
        what, _, place = str(error).partition(" - at `")
        if place.startswith("key`"):
            what, place = "keys must be text", place.removeprefix("key` in `")
        inside = place.strip("`").removeprefix("$")
        problems.add(*_explained(what, at + inside if at else inside.removeprefix("."), kind))
        return None


def entries(items: Sized) -> str:
    """Return how many there are."""
    return "1 entry" if len(items) == 1 else f"{len(items)} entries"


def _explained(what: str, at: str, kind: object) -> tuple[str, str]:
    """Return the place and what is wrong there, from what msgspec says."""
    if named := re.fullmatch(r"Object (contains unknown|missing required) field `(.*)`", what):
        at = f"{at}.{named[2]}" if at else named[2]
        return at, "unknown key" if named[1] == "contains unknown" else "missing"
    if what.startswith("Invalid enum value"):
        choices = get_args(get_type_hints(kind)[at.rpartition(".")[2]])
        return at, f"{what.removeprefix('Invalid enum value ')} is none of {', '.join(map(str, choices))}"
    what = what.replace(" | null", "").replace("got `null`", "got nothing")
    for pattern, form in FORMS.items():
        if what == f"Expected `str` matching regex {pattern!r}":
            return at, form
    for word, meaning in _WORDS.items():
        what = what.replace(word, meaning)
    return at, what[:1].lower() + what[1:]


def _json(text: str) -> object:
    return json.loads(text, object_pairs_hook=_once)


def _once(pairs: list[tuple[str, object]]) -> Tree:
    tree = dict(pairs)
    if len(tree) < len(pairs):
        keys = [key for key, _ in pairs]
        raise ValueError(f"{next(key for key in keys if keys.count(key) > 1)} is given twice")
    return tree


class _Loader(yaml.SafeLoader):
    """Refuses a key that a mapping has twice, of which YAML would keep the last."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, object]:
        keys = [key.value for key, _ in node.value if isinstance(key, yaml.ScalarNode)]
        for key in keys:
            if keys.count(key) > 1:
                raise yaml.constructor.ConstructorError(None, None, f"{key} is given twice", node.start_mark)
        return super().construct_mapping(node, deep)
