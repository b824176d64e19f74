"""The operator's routes as an OpenAPI document, from the table and the structs."""

import inspect
from typing import cast, get_args

import msgspec

from baton.control.http.command_table import PREFIX, ROUTES, Route
from baton.control.http.schemas import ProblemReply
from baton.protocol.commands import Command

Json = dict[str, object]

_REFUSALS = {
    "400": "The body is not JSON, or the engine cannot do it as asked; nothing has changed",
    "401": "The token is missing or wrong",
    "403": "The call comes from a page in a browser",
    "409": "It contradicts what holds now, and can be right later; nothing has changed",
    "413": "The body is too large",
    "422": "The body does not fit: `field` says where",
    "500": "It was tried and failed; the worker is as it was",
    "501": "This engine has no such verb, tag, mode or source",
    "503": "The worker starts or shuts down, or its engine is stuck or dead",
}


def document(version: str) -> Json:
    """Return the OpenAPI 3.1 document of `/control/`, for a Baton of `version`."""
    types = [kind for route in ROUTES for kind in (route.command, route.reply) if kind is not None]
    _, schemas = msgspec.json.schema_components([*types, ProblemReply], ref_template="#/components/schemas/{name}")
    for name, schema in schemas.items():
        _tidy(name, schema)
    paths: dict[str, Json] = {}
    for route in ROUTES:
        paths.setdefault(f"{PREFIX}{route.path}", {})[route.method.lower()] = _operation(route)
    return {
        "openapi": "3.1.0",
        "info": {"title": "Baton worker control", "version": version},
        "security": [{}, {"token": []}],
        "paths": paths,
        "components": {
            "schemas": schemas,
            "securitySchemes": {"token": {"type": "http", "scheme": "bearer"}},
        },
    }


def _operation(route: Route) -> Json:
    operation: Json = {
        "operationId": f"{route.method.lower()}_{route.path.replace('/', '_')}",
        "summary": route.summary,
        "responses": {
            "200": {"description": "Done", "content": _json(route.reply)},
            **{status: {"description": text, "content": _json(ProblemReply)} for status, text in _REFUSALS.items()},
        },
    }
    if route.method == "POST" and route.command is not None:
        needed = any(field.required for field in msgspec.structs.fields(route.command))
        operation["requestBody"] = {"required": needed, "content": _json(route.command)}
    return operation


def _json(kind: type[msgspec.Struct]) -> Json:
    return {"application/json": {"schema": {"$ref": f"#/components/schemas/{kind.__name__}"}}}


_VERBS = {kind.__name__ for kind in get_args(Command)}


def _tidy(name: str, schema: Json) -> None:
    """Mend what msgspec cannot know: the path says which verb it is, and docstrings are indented."""
    if name in _VERBS:
        required = [field for field in cast(list[str], schema["required"]) if field != "type"]
        schema["required"] = required
        if not required:
            del schema["required"]
    if "description" in schema:
        schema["description"] = inspect.cleandoc(str(schema["description"]))
