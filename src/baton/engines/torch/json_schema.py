"""JSON schemas as clients write them, for a grammar library that knows part of the standard."""

import re
from collections.abc import Callable, Iterator

from baton.engines.torch.schema_parts import SchemaParts

Schema = dict[str, object]

# Every other format is an annotation, as the standard has it: pydantic writes `password`, `path`, `binary`, ...
KNOWN_FORMATS = frozenset(
    {"date", "date-time", "duration", "email", "hostname", "ipv4", "ipv6", "time", "unknown", "uri", "uuid"}
)
_DATA = frozenset({"const", "default", "enum", "example", "examples"})
_NAMED_SCHEMAS = frozenset({"$defs", "definitions", "dependentSchemas", "patternProperties", "properties"})
_OTHER_PROPERTIES = frozenset({"additionalProperties", "unevaluatedProperties"})
_UNIMPLEMENTED = re.compile(r"Unimplemented keys: \[(.*)\]")


def without_unknown_formats(schema: object) -> object:
    """Return `schema` without the formats that the library refuses, at any depth."""
    return _changed(schema, _without_unknown_format)


def with_closed_objects(schema: object) -> object:
    """Return `schema` with objects that have only the properties it declares, at any depth.

    An object stays open if the schema says which others it may have, or declares none. It also stays open if several
    parts of the schema declare its properties (`allOf`, or a reference with siblings), because a closed part would
    forbid the properties of the other parts.
    """
    parts = SchemaParts(schema)
    for part in _schemas_in(schema):
        parts.add(part)

    def closed(part: Schema) -> Schema:
        is_open = not parts.declares_alone(part) or part.keys() & _OTHER_PROPERTIES
        return part if is_open else {**part, "additionalProperties": False}

    return _changed(schema, closed)


def explained(error: str) -> str:
    """Return an error of the library in words that a client understands."""
    if (found := _UNIMPLEMENTED.search(error)) is not None:
        return f"this engine does not support the keywords {found[1]} of JSON schema"
    return error


def _without_unknown_format(schema: Schema) -> Schema:
    format_ = schema.get("format")
    if not isinstance(format_, str) or format_ in KNOWN_FORMATS:
        return schema
    return {key: value for key, value in schema.items() if key != "format"}


def _changed(schema: object, change: Callable[[Schema], Schema]) -> object:
    """Return `schema` with `change` applied to itself and to every schema in it."""
    if isinstance(schema, list):
        return [_changed(part, change) for part in schema]
    if not isinstance(schema, dict):
        return schema
    return {key: _changed_at(key, value, change) for key, value in change(schema).items()}


def _changed_at(key: str, value: object, change: Callable[[Schema], Schema]) -> object:
    if key in _DATA:
        return value
    if key in _NAMED_SCHEMAS and isinstance(value, dict):
        return {name: _changed(part, change) for name, part in value.items()}
    return _changed(value, change)


def _schemas_in(schema: object) -> Iterator[Schema]:
    """Yield `schema` and every schema in it."""
    found: list[Schema] = []

    def note(part: Schema) -> Schema:
        found.append(part)
        return part

    _changed(schema, note)
    return iter(found)
