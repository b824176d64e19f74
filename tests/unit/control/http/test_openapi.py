"""The OpenAPI document: it has every command, and every reference resolves."""

from typing import Any, get_args

import pytest

from baton import __version__
from baton.control.http.command_table import COMMAND_PATHS, PREFIX, CommandPath
from baton.control.http.openapi import document
from baton.protocol.commands import Command
from baton.testing import run_bounded
from tests.unit.control.worker_harness import running_worker

DOCUMENT: dict[str, Any] = document("1")


def test_every_command_has_a_path() -> None:
    assert {entry.command for entry in COMMAND_PATHS if entry.command is not None} == set(get_args(Command))
    assert len({(entry.path, entry.method) for entry in COMMAND_PATHS}) == len(COMMAND_PATHS)


@pytest.mark.parametrize("entry", COMMAND_PATHS, ids=lambda entry: f"{entry.method} {entry.path}")
def test_every_command_is_in_the_document(entry: CommandPath) -> None:
    operation = DOCUMENT["paths"][f"{PREFIX}{entry.path}"][entry.method.lower()]
    assert operation["summary"] == entry.summary
    assert {"200", "401", "422", "501", "503"} <= set(operation["responses"])
    assert ("requestBody" in operation) is (entry.method == "POST")
    if entry.method == "POST" and entry.command is not None:
        reference = operation["requestBody"]["content"]["application/json"]["schema"]["$ref"]
        schema = DOCUMENT["components"]["schemas"][reference.split("/")[-1]]
        assert schema["additionalProperties"] is False
        assert "type" not in schema.get("required", [])


def test_operation_ids_are_unique() -> None:
    names = [operation["operationId"] for path in DOCUMENT["paths"].values() for operation in path.values()]
    assert len(set(names)) == len(names) == len(COMMAND_PATHS)


def test_every_reference_resolves() -> None:
    def references(value: object) -> list[str]:
        if isinstance(value, dict):
            own = [value["$ref"]] if "$ref" in value else []
            return own + [reference for inner in value.values() for reference in references(inner)]
        return [r for inner in value for r in references(inner)] if isinstance(value, list) else []

    found = references(DOCUMENT)
    assert len(found) > 40
    for reference in found:
        assert reference.split("/")[-1] in DOCUMENT["components"]["schemas"]


def test_the_server_serves_the_document() -> None:
    async def body() -> None:
        async with running_worker() as harness:
            reply = await harness.http("GET", "/openapi.json")
            assert reply.status == 200
            assert (reply.body["openapi"], reply.body["info"]["version"]) == ("3.1.0", __version__)
            assert set(reply.body["paths"]) == {f"{PREFIX}{entry.path}" for entry in COMMAND_PATHS}

    run_bounded(body())
