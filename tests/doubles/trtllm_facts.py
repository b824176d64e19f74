"""What a library has, version by version, for adapters whose library cannot be installed where tests run.

`facts/<engine>.json` holds names, parameters, fields and defaults. An adapter keeps every shape that it uses in one
module of Protocols and TypedDicts; `problems_of` holds that module to the facts, and mypy holds the adapter to the
module. A double is made of `fact_class`es and `Bound` objects, which refuse what the facts do not have.
"""

import ast
import json
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

FACTS_FILE = Path(__file__).with_suffix(".json")
SINCE = {"12": "1.2", "13": "1.3"}


class NotInFacts(AttributeError, TypeError):
    """Something was used that this version does not have."""


class VersionFacts:
    """What one version has."""

    def __init__(self, version: str, content: Mapping[str, Any], supplement: Mapping[str, Any]) -> None:
        self.version = version
        self.content = content
        self._supplement = supplement

    def knows(self, path: str) -> bool:
        """Whether there is a class or function of this name."""
        return path in self.content["classes"] or path in self.content["functions"]

    def members(self, path: str) -> set[str]:
        """Return every attribute, method and property of a class, inherited ones too."""
        found: set[str] = set()
        for name in self._line(path):
            facts = self.content["classes"][name]
            found |= {*facts.get("fields", ()), *facts.get("methods", ()), *facts.get("properties", ())}
            found |= {*self._supplement.get(name, ())}
            if not self.version.startswith("1.2"):
                found |= {*self._supplement.get(f"{name} since 1.3", ())}
        return found

    def fields(self, path: str) -> dict[str, list[str]]:
        """Return the fields of a class, with type and default, inherited ones too."""
        found: dict[str, list[str]] = {}
        for name in reversed(self._line(path)):
            found |= self.content["classes"][name].get("fields", {})
        return {name: told for name, told in found.items() if not name.startswith("_")}

    def keywords(self, path: str) -> set[str]:
        """Return what a function, a method (`path.to.Class.method`) or a constructor takes by name."""
        if path in self.content["functions"]:
            return _names(self.content["functions"][path])
        if path in self.content["classes"]:
            return set(self.fields(path)) or _names(self._method(path, "__init__"))
        owner, _, method = path.rpartition(".")
        return _names(self._method(owner, method))

    def _method(self, path: str, method: str) -> list[str]:
        for name in self._line(path):
            if method in self.content["classes"][name].get("methods", {}):
                params: list[str] = self.content["classes"][name]["methods"][method]
                return params
        raise NotInFacts(f"{self.version} has no {path}.{method}")

    def _line(self, path: str) -> list[str]:
        """A class and those that it inherits from, as far as they are known."""
        if path not in self.content["classes"]:
            raise NotInFacts(f"{self.version} has no {path}")
        line = [path]
        module = path.rpartition(".")[0]
        for base in self.content["classes"][path].get("bases", ()):
            known = [name for name in self.content["classes"] if name.rpartition(".")[2] == base and name != path]
            near = [name for name in known if name.startswith(module)] or known
            line += self._line(near[0]) if near else []
        return line


def load_facts() -> dict[str, VersionFacts]:
    """Return what is known of each version of TensorRT-LLM."""
    content = json.loads(FACTS_FILE.read_text())
    supplement = content["supplement"]
    return {version: VersionFacts(version, told, supplement) for version, told in content["versions"].items()}


def problems_of(source: str, paths: Mapping[str, tuple[str, ...]], facts: Mapping[str, VersionFacts]) -> list[str]:
    """Return what the shapes in `source` have and the facts do not.

    `paths` says which classes of the library a shape stands for. A shape whose name ends with 12 or 13 is one of that
    version only.
    """
    problems: list[str] = []
    for shape in (node for node in ast.parse(source).body if isinstance(node, ast.ClassDef)):
        since = SINCE.get(shape.name[-2:], "")
        stands_for = paths.get(shape.name) or paths.get(shape.name.removesuffix("12").removesuffix("13"))
        if stands_for is None:
            continue
        for version in (each for each in facts.values() if each.version.startswith(since)):
            problems += [
                f"{shape.name}: {version.version} has no {told}" for told in _missing(shape, stands_for, version)
            ]
    return problems


def keys_in(source: str) -> set[str]:
    """Return every string that `source` uses to look something up: x["key"], x.get("key"), f(x, "key")."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(source)):
        values: Iterable[ast.expr] = ()
        if isinstance(node, ast.Subscript):
            values = (node.slice,)
        elif isinstance(node, ast.Call):
            named = isinstance(node.func, ast.Attribute) and node.func.attr == "get"
            counts = isinstance(node.func, ast.Name) and node.func.id == "_count"
            values = node.args if named or counts else ()
        found |= {value.value for value in values if isinstance(value, ast.Constant) and isinstance(value.value, str)}
    return found


def type_escapes(source: str) -> list[str]:
    """Return what in `source` could reach an attribute that no shape declares."""
    return [
        f"line {node.lineno}: {node.func.id}"
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Name)
        and node.func.id in ("getattr", "hasattr", "setattr", "vars")
    ] + [f"line {at}: {word}" for at, line in enumerate(source.splitlines(), 1) for word in _ESCAPES if word in line]


_ESCAPES = ("type: " + "ignore", "import Any", "typing.Any", ".__dict__")


def fact_class(facts: VersionFacts, path: str) -> type:
    """Return a class like the library's: it takes the fields that the facts have, and has no other attribute."""
    fields = facts.fields(path)
    name = path.rpartition(".")[2]

    def make(self: Any, **given: object) -> None:
        for unknown in given.keys() - fields.keys():
            raise NotInFacts(f"{name} of {facts.version} has no field {unknown!r}")
        for field, told in fields.items():
            if field not in given and len(told) < 2:
                raise TypeError(f"{name} needs {field!r}")
            object.__setattr__(self, field, given[field] if field in given else default_of(told[1]))

    def refuse(self: Any, attribute: str, value: object = None) -> Any:
        if attribute not in facts.members(path):
            raise NotInFacts(f"{name} of {facts.version} has no {attribute!r}")
        object.__setattr__(self, attribute, value)

    def missing(self: Any, attribute: str) -> Any:
        raise NotInFacts(f"{name} of {facts.version} has no {attribute!r}")

    return type(name, (), {"__init__": make, "__setattr__": refuse, "__getattr__": missing})


def default_of(told: str) -> object:
    """Return a default from its text; one that cannot be read is None."""
    match told:
        case "<factory list>":
            return []
        case "<factory dict>":
            return {}
    try:
        return ast.literal_eval(told)
    except (ValueError, SyntaxError):
        return None


class Bound:
    """An object of a double, seen from outside: only what the facts have of its class can be reached.

    Iterating over it gives itself again and again, as the library's results do.
    """

    def __init__(self, inner: object, facts: VersionFacts, path: str) -> None:
        self._bound_inner = inner
        self._bound_facts = facts
        self._bound_path = path

    def __getattr__(self, name: str) -> Any:
        if name not in self._bound_facts.members(self._bound_path):
            raise NotInFacts(f"{self._bound_path} of {self._bound_facts.version} has no {name!r}")
        value = getattr(self._bound_inner, name)
        if not callable(value) or name not in self._methods():
            return value

        def call(*args: object, **given: object) -> object:
            for unknown in given.keys() - self._bound_facts.keywords(f"{self._bound_path}.{name}"):
                raise NotInFacts(f"{self._bound_path}.{name} of {self._bound_facts.version} has no {unknown!r}")
            return value(*args, **given)

        return call

    def __aiter__(self) -> "Bound":
        return self

    async def __anext__(self) -> "Bound":
        inner: Any = self._bound_inner
        await inner.step()
        return self

    def _methods(self) -> set[str]:
        lines = self._bound_facts._line(self._bound_path)
        return {name for line in lines for name in self._bound_facts.content["classes"][line].get("methods", ())}


def _missing(shape: ast.ClassDef, stands_for: tuple[str, ...], facts: VersionFacts) -> Iterator[str]:
    keyed = "Fields" in shape.name
    for node in shape.body:
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            known = facts.keywords(stands_for[0]) if keyed else _all_members(stands_for, facts)
            if node.target.id not in known:
                yield node.target.id
        elif isinstance(node, ast.FunctionDef):
            yield from _missing_call(node, stands_for, facts)


def _missing_call(method: ast.FunctionDef, stands_for: tuple[str, ...], facts: VersionFacts) -> Iterator[str]:
    asked = {each.arg for each in (*method.args.args, *method.args.kwonlyargs) if each.arg != "self"}
    if method.name == "__call__":
        yield from (f"{name} (keyword)" for name in asked - facts.keywords(stands_for[0]))
    elif method.name not in _all_members(stands_for, facts):
        yield f"{method.name}()"
    elif asked:
        known = next(facts.keywords(f"{path}.{method.name}") for path in stands_for if facts.knows(path))
        yield from (f"{method.name}({name}=)" for name in asked - known)


def _all_members(paths: tuple[str, ...], facts: VersionFacts) -> set[str]:
    return {name for path in paths for name in facts.members(path)}


def _names(params: list[str]) -> set[str]:
    return {param.partition("=")[0].lstrip("*") for param in params} - {""}
