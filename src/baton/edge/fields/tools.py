"""Tools, the choice between them, and the format of an answer."""

from typing import Literal

import msgspec

from baton.edge.fields.types import Text


class Function(msgspec.Struct):
    """A function that the model may call; `parameters` is a JSON schema."""

    name: Text
    description: str | None = None
    parameters: dict[str, object] | None = None
    strict: bool | None = None


class Tool(msgspec.Struct):
    """A tool that the model may call."""

    function: Function
    type: Literal["function"] = "function"


class FunctionName(msgspec.Struct):
    """The name of a function."""

    name: str


class NamedTool(msgspec.Struct, tag_field="type", tag="function"):
    """The function that the model has to call."""

    function: FunctionName


class AllowedTools(msgspec.Struct):
    """The tools that the model may call, or has to call one of."""

    mode: Literal["auto", "required"]
    tools: list[NamedTool]


class AllowedToolsChoice(msgspec.Struct, tag_field="type", tag="allowed_tools"):
    """A choice between some of the tools."""

    allowed_tools: AllowedTools


ToolChoice = Literal["none", "auto", "required"] | NamedTool | AllowedToolsChoice


class TextFormat(msgspec.Struct, tag_field="type", tag="text", forbid_unknown_fields=True):
    """No constraint."""


class JsonObjectFormat(msgspec.Struct, tag_field="type", tag="json_object", forbid_unknown_fields=True):
    """Any JSON object."""


class JsonSchema(msgspec.Struct, forbid_unknown_fields=True):
    """A JSON schema with a name."""

    name: Text
    schema: dict[str, object] | bool
    description: str | None = None
    strict: bool | None = None


class JsonSchemaFormat(msgspec.Struct, tag_field="type", tag="json_schema", forbid_unknown_fields=True):
    """JSON of a schema."""

    json_schema: JsonSchema


ResponseFormat = TextFormat | JsonObjectFormat | JsonSchemaFormat
