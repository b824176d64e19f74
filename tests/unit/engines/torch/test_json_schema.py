"""JSON schemas as clients write them: objects have only the properties that a schema declares."""

from typing import Any

import pytest

from baton.engines.torch.json_schema import with_closed_objects

CLOSED = {"additionalProperties": False}
NAME = {"properties": {"name": {"type": "string"}}}
AGE = {"properties": {"age": {"type": "integer"}}}


def test_an_object_with_declared_properties_is_closed_at_any_depth() -> None:
    inner = {"type": "object", **NAME}
    schema = {
        "type": "object",
        "properties": {"person": inner, "all": {"type": "array", "items": inner}, "one": {"anyOf": [inner, AGE]}},
        "$defs": {"person": inner},
    }
    closed = {**inner, **CLOSED}
    assert with_closed_objects(schema) == {
        "type": "object",
        "properties": {
            "person": closed,
            "all": {"type": "array", "items": closed},
            "one": {"anyOf": [closed, {**AGE, **CLOSED}]},
        },
        "$defs": {"person": closed},
        **CLOSED,
    }


@pytest.mark.parametrize("others", [True, {"type": "integer"}, {}], ids=str)
def test_an_object_that_says_what_else_it_may_have_keeps_that(others: object) -> None:
    schema = {**NAME, "additionalProperties": others}
    assert with_closed_objects(schema) == schema


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "object"},
        {"type": "object", "required": ["name"]},
        {"type": "object", "unevaluatedProperties": False, **NAME},
        {"const": NAME},
        {"enum": [NAME, AGE]},
        True,
    ],
    ids=str,
)
def test_what_declares_no_properties_is_unchanged(schema: Any) -> None:
    assert with_closed_objects(schema) == schema


def test_an_object_without_properties_is_empty_if_it_declares_none() -> None:
    assert with_closed_objects({"type": "object", "properties": {}}) == {"type": "object", "properties": {}, **CLOSED}


def test_a_property_may_have_the_name_of_a_keyword() -> None:
    schema = {"properties": {"properties": {"type": "string"}, "allOf": {"type": "string"}}}
    assert with_closed_objects(schema) == {**schema, **CLOSED}


@pytest.mark.parametrize(
    "schema",
    [
        {"allOf": [NAME, AGE]},
        {"allOf": [NAME], **AGE},
        {"anyOf": [NAME, {"required": ["age"]}], **AGE},
        {"$ref": "#/$defs/named", **AGE, "$defs": {"named": NAME}},
        {"allOf": [{"$ref": "#/$defs/a~1b%20c"}, AGE], "$defs": {"a/b c": NAME}},
        {"allOf": [{"allOf": [{"anyOf": [NAME]}]}, {"oneOf": [AGE]}]},
        {"if": {"required": ["name"]}, "then": NAME, **AGE},
        {"dependentSchemas": {"x": NAME}, **AGE},
    ],
    ids=str,
)
def test_properties_that_several_parts_declare_leave_all_of_these_open(schema: Any) -> None:
    assert with_closed_objects(schema) == schema


def test_parts_of_which_one_declares_properties_are_closed() -> None:
    schema = {"properties": {"a": {"allOf": [{"$ref": "#/$defs/named"}], "default": {}}}, "$defs": {"named": NAME}}
    assert with_closed_objects(schema) == {**schema, "$defs": {"named": {**NAME, **CLOSED}}, **CLOSED}
    choice = {**NAME, "anyOf": [{"required": ["name"]}, {"required": []}]}
    assert with_closed_objects(choice) == {**choice, **CLOSED}


def test_references_that_lead_nowhere_or_in_circles_are_left_to_the_library() -> None:
    for reference in ("#", "#/$defs/gone", "#/$defs/named/type/x", "http://127.0.0.1:1/schema", 7):
        schema = {**NAME, "properties": {"next": {"$ref": reference}}, "$defs": {"named": {"type": "object"}}}
        assert with_closed_objects(schema) == {**schema, **CLOSED}
    circle = {"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}}
    assert with_closed_objects(circle) == circle
