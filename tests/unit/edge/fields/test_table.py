"""Every field of OpenAI's requests is in the table of its route, and every field of what they contain has a type.

The openai package says which fields there are: a new version of it that adds one fails these tests.
"""

import types
import typing
from collections.abc import Iterator

import msgspec
import pytest
from openai.types import completion_create_params, embedding_create_params, shared_params
from openai.types.chat import (
    ChatCompletionContentPartParam,
    ChatCompletionMessageParam,
    ChatCompletionStreamOptionsParam,
    ChatCompletionToolChoiceOptionParam,
    ChatCompletionToolUnionParam,
)
from openai.types.chat import completion_create_params as chat_create_params
from openai.types.responses import ResponseTextConfigParam, response_create_params

from baton.edge.errors import FieldError
from baton.edge.fields import responses
from baton.edge.fields.messages import Message, UserPart
from baton.edge.fields.prepare import TABLES, prepare
from baton.edge.fields.tools import ResponseFormat
from baton.edge.fields.types import StreamOptions

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
EMBEDDINGS, RESPONSES = "/v1/embeddings", "/v1/responses"
OPENAI = {
    CHAT: chat_create_params.CompletionCreateParamsStreaming,
    COMPLETIONS: completion_create_params.CompletionCreateParamsStreaming,
    EMBEDDINGS: embedding_create_params.EmbeddingCreateParams,
    RESPONSES: response_create_params.ResponseCreateParamsStreaming,
}
GOOD: dict[str, object] = {"model": "m", "messages": [{"role": "user", "content": "Hello"}]}


def members(union: object) -> Iterator[type]:
    """Yield the alternatives of a union that are classes."""
    if typing.get_origin(union) in (typing.Union, types.UnionType):
        for each in typing.get_args(union):
            yield from members(each)
    elif isinstance(union, type):
        yield union


def tags(union: object, key: str) -> dict[str, type]:
    """Return the typed dicts of a union of the openai package by their literal `key`."""
    return {typing.get_args(typing.get_type_hints(each)[key])[0]: each for each in members(union) if each is not str}


def structs(union: object) -> dict[str, set[str]]:
    """Return the fields of our structs by their tags."""
    return {
        str(each.__struct_config__.tag): {*each.__struct_fields__, str(each.__struct_config__.tag_field)}
        for each in members(union)
        if issubclass(each, msgspec.Struct)
    }


@pytest.mark.parametrize("path", OPENAI)
def test_every_field_of_openai_is_in_the_table(path: str) -> None:
    missing = typing.get_type_hints(OPENAI[path]).keys() - TABLES[path].fields.keys()
    assert not missing, "decide what happens to these fields: honoured, translated or refused by name"


def test_every_role_and_every_field_of_a_message_has_a_type() -> None:
    ours = structs(Message)
    for role, message in tags(ChatCompletionMessageParam, "role").items():
        assert typing.get_type_hints(message).keys() <= ours[role]


def test_every_type_of_a_part_has_a_type() -> None:
    assert tags(ChatCompletionContentPartParam, "type").keys() <= structs(UserPart).keys()


def test_every_response_format_has_a_type() -> None:
    assert tags(chat_create_params.ResponseFormat, "type").keys() == structs(ResponseFormat).keys()


def test_every_option_of_a_stream_has_a_type() -> None:
    assert typing.get_type_hints(ChatCompletionStreamOptionsParam).keys() <= set(StreamOptions.__struct_fields__)
    assert typing.get_type_hints(response_create_params.StreamOptions).keys() <= set(
        responses.ResponseStreamOptions.__struct_fields__
    )


@pytest.mark.parametrize(
    ("params", "ours"),
    [(shared_params.Reasoning, responses.Reasoning), (ResponseTextConfigParam, responses.TextConfig)],
    ids=lambda kind: kind.__name__,
)
def test_every_field_in_a_field_of_responses_has_a_type(params: type, ours: type[msgspec.Struct]) -> None:
    assert typing.get_type_hints(params).keys() <= set(ours.__struct_fields__)


def test_tools_that_are_not_functions_are_refused_by_name() -> None:
    assert tags(ChatCompletionToolUnionParam, "type").keys() == {"function", "custom"}
    for change in ({"tools": [{"type": "custom", "custom": {"name": "x"}}]},):
        with pytest.raises(FieldError) as caught:
            prepare(CHAT, {**GOOD, **change})
        assert caught.value.param == "tools[0].type"


def test_a_choice_of_a_tool_that_is_no_function_is_refused_by_name() -> None:
    assert tags(ChatCompletionToolChoiceOptionParam, "type").keys() == {"function", "allowed_tools", "custom"}
    with pytest.raises(FieldError) as caught:
        prepare(CHAT, {**GOOD, "tool_choice": {"type": "custom", "custom": {"name": "x"}}})
    assert caught.value.param == "tool_choice.type"


@pytest.mark.parametrize("path", TABLES)
def test_a_refused_field_may_be_null(path: str) -> None:
    refused = [name for name, field in TABLES[path].fields.items() if field.rule == "refused"]
    completion = {"model": "m", "prompt": "x", "max_tokens": 1}
    bodies = {CHAT: GOOD, COMPLETIONS: completion, "/v1/messages": {**GOOD, "max_tokens": 1}}
    body = bodies.get(path, {"model": "m", "input": "x"})
    assert prepare(path, {**body, **dict.fromkeys(refused)}) == body
