"""The OpenAPI document: every route and verb is there, references lead somewhere, and bodies fit their schemas."""

from typing import Any, get_args

import pytest

from baton import __version__
from baton.control.http.command_table import PREFIX, ROUTES, Route
from baton.control.http.openapi import document
from baton.protocol.commands import Command
from baton.testing import run_bounded
from tests.unit.control.operated import living

DOCUMENT: dict[str, Any] = document("1")


def test_every_verb_has_a_route() -> None:
    assert {route.command for route in ROUTES if route.command is not None} == set(get_args(Command))
    assert len({(route.path, route.method) for route in ROUTES}) == len(ROUTES)


@pytest.mark.parametrize("route", ROUTES, ids=lambda route: f"{route.method} {route.path}")
def test_every_route_is_in_the_document(route: Route) -> None:
    operation = DOCUMENT["paths"][f"{PREFIX}{route.path}"][route.method.lower()]
    assert operation["summary"] == route.summary
    assert {"200", "401", "422", "501", "503"} <= set(operation["responses"])
    assert ("requestBody" in operation) is (route.method == "POST")
    if route.method == "POST" and route.command is not None:
        reference = operation["requestBody"]["content"]["application/json"]["schema"]["$ref"]
        schema = DOCUMENT["components"]["schemas"][reference.split("/")[-1]]
        assert schema["additionalProperties"] is False
        assert "type" not in schema.get("required", [])


def test_operations_have_names_of_their_own() -> None:
    names = [operation["operationId"] for path in DOCUMENT["paths"].values() for operation in path.values()]
    assert len(set(names)) == len(names) == len(ROUTES)


def test_references_lead_somewhere() -> None:
    def references(value: object) -> list[str]:
        if isinstance(value, dict):
            own = [value["$ref"]] if "$ref" in value else []
            return own + [reference for inner in value.values() for reference in references(inner)]
        return [r for inner in value for r in references(inner)] if isinstance(value, list) else []

    found = references(DOCUMENT)
    assert len(found) > 40
    for reference in found:
        assert reference.split("/")[-1] in DOCUMENT["components"]["schemas"]


def test_the_server_serves_it() -> None:
    async def body() -> None:
        async with living() as house:
            reply = await house.http("GET", "/openapi.json")
            assert reply.status == 200
            assert (reply.body["openapi"], reply.body["info"]["version"]) == ("3.1.0", __version__)
            assert set(reply.body["paths"]) == {f"{PREFIX}{route.path}" for route in ROUTES}

    run_bounded(body())
