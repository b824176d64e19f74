"""The OpenAPI document of the control API, from the table of commands and their structs."""

import inspect
from typing import cast, get_args

import msgspec

from baton.control.http.command_table import COMMAND_PATHS, PREFIX, CommandPath
from baton.control.http.schemas import ProblemReply
from baton.protocol.commands import Command

Json = dict[str, object]

_REFUSALS = {
    "400": "The body is not JSON, or the engine refuses the command; nothing has changed",
    "401": "The token is missing or wrong",
    "403": "The request was sent by a web page",
    "408": "The body did not arrive in time; nothing has changed",
    "409": "The command conflicts with the current state, and may be valid later; nothing has changed",
    "413": "The body is too large",
    "422": "The body does not fit the command; `field` is the field at fault",
    "500": "The command failed; the worker is in its previous state",
    "501": "The engine does not support this command, memory tag, pause mode or weight source",
    "503": "The worker is starting or shutting down, or its engine is stalled or dead",
}


def document(version: str) -> Json:
    """Return the OpenAPI 3.1 document of `/control/`, for a Baton of `version`."""
    types = [kind for entry in COMMAND_PATHS for kind in (entry.command, entry.reply) if kind is not None]
    _, schemas = msgspec.json.schema_components(
        [*types, ProblemReply], ref_template="#/components/schemas/{name}", schema_hook=_any_value
    )
    for name, schema in schemas.items():
        _tidy(name, schema)
    paths: dict[str, Json] = {}
    for entry in COMMAND_PATHS:
        paths.setdefault(f"{PREFIX}{entry.path}", {})[entry.method.lower()] = _operation(entry)
    return {
        "openapi": "3.1.0",
        "info": {"title": "Baton control API", "version": version},
        "security": [{"token": []}],
        "paths": paths,
        "components": {
            "schemas": schemas,
            "securitySchemes": {"token": {"type": "http", "scheme": "bearer"}},
        },
    }


def _operation(entry: CommandPath) -> Json:
    operation: Json = {
        "operationId": f"{entry.method.lower()}_{entry.path.replace('/', '_')}",
        "summary": entry.summary,
        "responses": {
            "200": {"description": "Done", "content": _json(entry.reply)},
            **{status: {"description": text, "content": _json(ProblemReply)} for status, text in _REFUSALS.items()},
        },
    }
    if entry.parameters:
        operation["parameters"] = [
            {"name": name, "in": "query", "schema": {"type": "integer", "minimum": 0}} for name in entry.parameters
        ]
    if entry.method == "POST" and entry.command is not None:
        needed = any(field.required for field in msgspec.structs.fields(entry.command))
        operation["requestBody"] = {"required": needed, "content": _json(entry.command)}
    return operation


def _json(kind: type[msgspec.Struct]) -> Json:
    return {"application/json": {"schema": {"$ref": f"#/components/schemas/{kind.__name__}"}}}


def _any_value(kind: type) -> Json:
    """Return the schema of `object`."""
    if kind is not object:
        raise NotImplementedError
    return {"description": "Any value"}


_COMMANDS = {kind.__name__ for kind in get_args(Command)}


def _tidy(name: str, schema: Json) -> None:
    """Correct what msgspec cannot know: the path replaces `type`, and docstrings are indented."""
    if name in _COMMANDS:
        required = [field for field in cast(list[str], schema["required"]) if field != "type"]
        schema["required"] = required
        if not required:
            del schema["required"]
    if "description" in schema:
        schema["description"] = inspect.cleandoc(str(schema["description"]))
