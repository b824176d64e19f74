"""The parts of a JSON schema that describe the same value: a schema, its `allOf`, what it refers to, and so on."""

from collections.abc import Iterator
from urllib.parse import unquote

Schema = dict[str, object]

_DECLARING = frozenset({"patternProperties", "properties"})


class SchemaParts:
    """Finds the schemas of a document that share an object's properties with other schemas.

    Schemas are compared by identity, so `document` must stay unchanged.
    """

    def __init__(self, document: object) -> None:
        self._document = document
        self._declares: dict[int, bool] = {}
        self._shared: set[int] = set()

    def add(self, schema: Schema) -> None:
        """Mark the parts of `schema` if several of them declare properties of one object."""
        declaring = [any(map(self._declares_any, group)) for group in self._groups(schema)]
        if _declares_own(schema) + sum(declaring) > 1:
            self._share(schema)

    def declares_alone(self, schema: Schema) -> bool:
        """Whether `schema` declares properties, and no schema of the same object that was added does."""
        return _declares_own(schema) and id(schema) not in self._shared

    def _declares_any(self, schema: Schema) -> bool:
        """Whether `schema` or one of its parts declares properties."""
        known = self._declares.get(id(schema))
        if known is None:
            self._declares[id(schema)] = False  # for a reference to itself
            known = _declares_own(schema) or any(self._declares_any(part) for part in self._parts(schema))
            self._declares[id(schema)] = known
        return known

    def _share(self, schema: Schema) -> None:
        if id(schema) not in self._shared:
            self._shared.add(id(schema))
            for part in self._parts(schema):
                self._share(part)

    def _parts(self, schema: Schema) -> Iterator[Schema]:
        for group in self._groups(schema):
            yield from group

    def _groups(self, schema: Schema) -> Iterator[list[Schema]]:
        """Yield groups of schemas that apply to the value of `schema`: all groups do, of a group one schema or more."""
        yield from ([part] for part in _schemas(schema.get("allOf")))
        yield _schemas(schema.get("anyOf"))
        yield _schemas(schema.get("oneOf"))
        yield _schemas([schema.get("then"), schema.get("else")])
        dependent = schema.get("dependentSchemas")
        yield from ([part] for part in _schemas(list(dependent.values()) if isinstance(dependent, dict) else None))
        yield _schemas([self._target(schema.get("$ref"))])

    def _target(self, reference: object) -> object:
        """Return the schema that `reference` names, None if it is not in the document."""
        if not isinstance(reference, str) or not reference.startswith("#"):
            return None
        target = self._document
        for step in reference.split("/")[1:]:
            if not isinstance(target, dict):
                return None
            target = target.get(unquote(step).replace("~1", "/").replace("~0", "~"))
        return target


def _declares_own(schema: Schema) -> bool:
    return not _DECLARING.isdisjoint(schema)


def _schemas(candidates: object) -> list[Schema]:
    return [each for each in candidates if isinstance(each, dict)] if isinstance(candidates, list) else []
