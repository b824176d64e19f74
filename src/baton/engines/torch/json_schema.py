"""JSON schemas as clients write them, for a grammar library that knows part of the standard."""

import re

# Every other format is an annotation, as the standard has it: pydantic writes `password`, `path`, `binary`, ...
KNOWN_FORMATS = frozenset(
    {"date", "date-time", "duration", "email", "hostname", "ipv4", "ipv6", "time", "unknown", "uri", "uuid"}
)
_DATA = frozenset({"const", "default", "enum", "example", "examples"})
_NAMED_SCHEMAS = frozenset({"$defs", "definitions", "dependentSchemas", "patternProperties", "properties"})
_UNIMPLEMENTED = re.compile(r"Unimplemented keys: \[(.*)\]")


def without_unknown_formats(schema: object) -> object:
    """Return `schema` without the formats that the library refuses, at any depth."""
    if isinstance(schema, list):
        return [without_unknown_formats(part) for part in schema]
    if not isinstance(schema, dict):
        return schema
    format_ = schema.get("format")
    is_annotation = isinstance(format_, str) and format_ not in KNOWN_FORMATS
    kept = {key: value for key, value in schema.items() if not (key == "format" and is_annotation)}
    return {key: _without_unknown_formats_at(key, value) for key, value in kept.items()}


def _without_unknown_formats_at(key: str, value: object) -> object:
    if key in _DATA:
        return value
    if key in _NAMED_SCHEMAS and isinstance(value, dict):
        return {name: without_unknown_formats(part) for name, part in value.items()}
    return without_unknown_formats(value)


def explained(error: str) -> str:
    """Return an error of the library in words that a client understands."""
    if (found := _UNIMPLEMENTED.search(error)) is not None:
        return f"this engine does not support the keywords {found[1]} of JSON schema"
    return error
