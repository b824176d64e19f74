"""Facts of TensorRT-LLM, version by version, for tests on machines where it cannot be installed.

`trtllm_facts.json` has names, parameters, fields and defaults. The adapter declares every type that it uses in one
module of Protocols and TypedDicts; `problems_of` checks that module against the facts, and mypy checks the adapter
against the module. The double is built of `fact_class`es and `Bound` objects, which raise for what the facts lack.
"""

import ast
import copy
import functools
import json
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

FACTS_FILE = Path(__file__).with_suffix(".json")
SINCE = {"12": "1.2", "13": "1.3"}


class NotInFacts(AttributeError, TypeError):
    """The code used something that this version lacks."""


class VersionFacts:
    """The facts of one version."""

    def __init__(self, version: str, content: Mapping[str, Any], supplement: Mapping[str, Any]) -> None:
        self.version = version
        self.content = content
        self._supplement = supplement

    def has(self, path: str) -> bool:
        """Whether there is a class or function of this name."""
        return path in self.content["classes"] or path in self.content["functions"]

    def members(self, path: str) -> set[str]:
        """Return every attribute, method and property of a class, inherited ones too."""
        found: set[str] = set()
        for name in self._bases(path):
            facts = self.content["classes"][name]
            found |= {*facts.get("fields", ()), *facts.get("methods", ()), *facts.get("properties", ())}
            found |= {*self._supplement.get(name, ())}
            if not self.version.startswith("1.2"):
                found |= {*self._supplement.get(f"{name} since 1.3", ())}
        return found

    def fields(self, path: str) -> dict[str, list[str]]:
        """Return the fields of a class, with type and default, inherited ones too."""
        found: dict[str, list[str]] = {}
        for name in reversed(self._bases(path)):
            found |= self.content["classes"][name].get("fields", {})
        return {name: field for name, field in found.items() if not name.startswith("_")}

    def keywords(self, path: str) -> set[str]:
        """Return the keywords of a function, a method (`path.to.Class.method`) or a constructor."""
        if path in self.content["functions"]:
            return _names(self.content["functions"][path])
        if path in self.content["classes"]:
            known = set(self.fields(path)) | {*self._supplement.get(path, ())}
            return known or _names(self._method(path, "__init__"))
        owner, _, method = path.rpartition(".")
        return _names(self._method(owner, method))

    def _method(self, path: str, method: str) -> list[str]:
        for name in self._bases(path):
            if method in self.content["classes"][name].get("methods", {}):
                params: list[str] = self.content["classes"][name]["methods"][method]
                return params
        raise NotInFacts(f"{self.version} has no {path}.{method}")

    def _bases(self, path: str) -> list[str]:
        """A class and its bases, as far as the facts have them."""
        if path not in self.content["classes"]:
            raise NotInFacts(f"{self.version} has no {path}")
        line = [path]
        module = path.rpartition(".")[0]
        for base in self.content["classes"][path].get("bases", ()):
            known = [name for name in self.content["classes"] if name.rpartition(".")[2] == base and name != path]
            near = [name for name in known if name.startswith(module)] or known
            line += self._bases(near[0]) if near else []
        return line


def load_facts() -> dict[str, VersionFacts]:
    """Return the facts of each version of TensorRT-LLM."""
    content = json.loads(FACTS_FILE.read_text())
    supplement = content["supplement"]
    return {version: VersionFacts(version, facts, supplement) for version, facts in content["versions"].items()}


def problems_of(source: str, paths: Mapping[str, tuple[str, ...]], facts: Mapping[str, VersionFacts]) -> list[str]:
    """Return the members of the types in `source` that the facts lack.

    `paths` maps each type to classes of the library. A type whose name ends with 12 or 13 is of that version only.
    """
    problems: list[str] = []
    for declared in (node for node in ast.parse(source).body if isinstance(node, ast.ClassDef)):
        since = SINCE.get(declared.name[-2:], "")
        classes = paths.get(declared.name) or paths.get(declared.name.removesuffix("12").removesuffix("13"))
        if classes is None:
            continue
        for version in (each for each in facts.values() if each.version.startswith(since)):
            problems += [
                f"{declared.name}: {version.version} has no {name}" for name in _missing(declared, classes, version)
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
    """Return the places in `source` that can access an attribute that no type declares."""
    return [
        f"line {node.lineno}: {node.func.id}"
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Name)
        and node.func.id in ("getattr", "hasattr", "setattr", "vars")
    ] + [f"line {at}: {word}" for at, line in enumerate(source.splitlines(), 1) for word in _ESCAPES if word in line]


_ESCAPES = ("type: " + "ignore", "import Any", "typing.Any", ".__dict__")


def fact_class(facts: VersionFacts, path: str) -> type:
    """Return a class with the fields of the library's class in the facts, and no other attribute."""
    fields = facts.fields(path)
    name = path.rpartition(".")[2]
    for _, *default in fields.values():
        default_of(*default[:1] or [""])  # parsed here, before threads make objects

    def make(self: Any, **given: object) -> None:
        for unknown in given.keys() - fields.keys():
            raise NotInFacts(f"{name} of {facts.version} has no field {unknown!r}")
        for field, fact in fields.items():
            if field not in given and len(fact) < 2:
                raise TypeError(f"{name} needs {field!r}")
            object.__setattr__(self, field, given[field] if field in given else default_of(fact[1]))

    def refuse(self: Any, attribute: str, value: object = None) -> Any:
        if attribute not in facts.members(path):
            raise NotInFacts(f"{name} of {facts.version} has no {attribute!r}")
        object.__setattr__(self, attribute, value)

    def missing(self: Any, attribute: str) -> Any:
        raise NotInFacts(f"{name} of {facts.version} has no {attribute!r}")

    return type(name, (), {"__init__": make, "__setattr__": refuse, "__getattr__": missing})


def default_of(text: str) -> object:
    """Return the value of a default; None if it is not a literal."""
    match text:
        case "<factory list>":
            return []
        case "<factory dict>":
            return {}
    return copy.deepcopy(_literal(text))


@functools.cache
def _literal(text: str) -> object:
    """Parse a text once: Python 3.11 can fail with a SystemError when several threads parse."""
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError):
        return None


class Bound:
    """Wraps an object of the double: only the members of its class in the facts can be accessed.

    Iterating yields the object itself after every step, as the library's results do.
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
        lines = self._bound_facts._bases(self._bound_path)
        return {name for line in lines for name in self._bound_facts.content["classes"][line].get("methods", ())}


def _missing(declared: ast.ClassDef, classes: tuple[str, ...], facts: VersionFacts) -> Iterator[str]:
    keyed = "Fields" in declared.name
    for node in declared.body:
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            known = facts.keywords(classes[0]) if keyed else _all_members(classes, facts)
            if node.target.id not in known:
                yield node.target.id
        elif isinstance(node, ast.FunctionDef):
            yield from _missing_call(node, classes, facts)


def _missing_call(method: ast.FunctionDef, classes: tuple[str, ...], facts: VersionFacts) -> Iterator[str]:
    keywords = {each.arg for each in (*method.args.args, *method.args.kwonlyargs) if each.arg != "self"}
    if method.name == "__call__":
        yield from (f"{name} (keyword)" for name in keywords - facts.keywords(classes[0]))
    elif method.name not in _all_members(classes, facts):
        yield f"{method.name}()"
    elif keywords:
        known = next(facts.keywords(f"{path}.{method.name}") for path in classes if facts.has(path))
        yield from (f"{method.name}({name}=)" for name in keywords - known)


def _all_members(paths: tuple[str, ...], facts: VersionFacts) -> set[str]:
    return {name for path in paths for name in facts.members(path)}


def _names(params: list[str]) -> set[str]:
    return {param.partition("=")[0].lstrip("*") for param in params} - {""}
