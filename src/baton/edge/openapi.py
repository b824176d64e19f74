"""The OpenAPI description of the public endpoint, generated from the tables of fields and the types of its answers."""

import inspect
from typing import Literal

import msgspec

from baton import __version__
from baton.edge.anthropic_chat import CountTokensRequest
from baton.edge.fields.prepare import TABLES
from baton.edge.served_models import Model, ModelList
from baton.edge.tokenize import DetokenizeAnswer, DetokenizeRequest, TokenCount, TokenizeAnswer, TokenizeRequest

Json = dict[str, object]


class ErrorDetail(msgspec.Struct, kw_only=True):
    """What went wrong: `param` is the path of the field, `code` is for programs."""

    message: str
    type: str
    param: str | None
    code: str | None


class Error(msgspec.Struct, kw_only=True):
    """The body of every answer that is not a success; of streams, the data of an error event."""

    error: ErrorDetail


class Usage(msgspec.Struct, kw_only=True):
    """Token counts of a request."""

    prompt_tokens: int
    total_tokens: int
    completion_tokens: int | None = None


class ChatMessage(msgspec.Struct, kw_only=True):
    """The message of the model."""

    role: Literal["assistant"]
    content: str | None
    refusal: str | None
    reasoning_content: str | None = None
    tool_calls: list[dict[str, object]] | None = None


class ChatChoice(msgspec.Struct, kw_only=True):
    """One answer."""

    index: int
    message: ChatMessage
    finish_reason: Literal["stop", "length", "tool_calls", "content_filter"]
    logprobs: dict[str, object] | None


class ChatCompletion(msgspec.Struct, kw_only=True):
    """A chat answer. With `stream`, server-sent events of `chat.completion.chunk` objects, then `[DONE]`."""

    id: str
    object: Literal["chat.completion"]
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage | None = None


class CompletionChoice(msgspec.Struct, kw_only=True):
    """One answer."""

    index: int
    text: str
    finish_reason: Literal["stop", "length", "content_filter"] | None
    logprobs: dict[str, object] | None


class Completion(msgspec.Struct, kw_only=True):
    """A completion. With `stream`, server-sent events of the same type, then `[DONE]`."""

    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: Usage | None = None


class Embedding(msgspec.Struct, kw_only=True):
    """One vector: numbers, or little-endian float32 in base64."""

    object: Literal["embedding"]
    index: int
    embedding: list[float] | str


class EmbeddingList(msgspec.Struct, kw_only=True):
    """The vectors of the inputs, in their order."""

    object: Literal["list"]
    model: str
    data: list[Embedding]
    usage: Usage


class Version(msgspec.Struct, kw_only=True):
    """The version of Baton."""

    version: str


_POST: tuple[tuple[str, type[msgspec.Struct], type[msgspec.Struct] | None, str], ...] = (
    ("/v1/chat/completions", TABLES["/v1/chat/completions"].type, ChatCompletion, "Answer a chat"),
    ("/v1/completions", TABLES["/v1/completions"].type, Completion, "Continue a text"),
    ("/v1/embeddings", TABLES["/v1/embeddings"].type, EmbeddingList, "Embed texts"),
    ("/v1/responses", TABLES["/v1/responses"].type, None, "Answer a chat, in the format of OpenAI's Responses API"),
    ("/v1/messages", TABLES["/v1/messages"].type, None, "Answer a chat, in the format of Anthropic's Messages API"),
    ("/v1/messages/count_tokens", CountTokensRequest, TokenCount, "Count the tokens of a message"),
    ("/tokenize", TokenizeRequest, TokenizeAnswer, "Tokenize a prompt or a chat"),
    ("/detokenize", DetokenizeRequest, DetokenizeAnswer, "Return the text of tokens"),
)
_GET: tuple[tuple[str, type[msgspec.Struct] | None, str], ...] = (
    ("/v1/models", ModelList, "List the models"),
    ("/v1/models/{model}", Model, "Describe a model"),
    ("/version", Version, "Return the version"),
    ("/health", None, "Return the workers of the deployment"),
    ("/metrics", None, "Return metrics as Prometheus text"),
    ("/metrics/targets", None, "List the processes of the deployment for Prometheus' HTTP service discovery"),
)


def document() -> Json:
    """Return the description."""
    kinds = {kind for _, request, answer, _ in _POST for kind in (request, answer) if kind is not None}
    kinds |= {answer for _, answer, _ in _GET if answer is not None} | {Error}
    ordered = sorted(kinds, key=lambda kind: kind.__name__)
    _, schemas = msgspec.json.schema_components(
        ordered, ref_template="#/components/schemas/{name}", schema_hook=_any_value
    )
    for name, schema in schemas.items():
        _describe(name, schema)
    return {
        "openapi": "3.1.0",
        "info": {"title": "Baton", "version": __version__},
        "security": [{"key": []}, {}],
        "paths": {
            **{path: {"post": _operation(path, text, answer, request)} for path, request, answer, text in _POST},
            **{path: {"get": _operation(path, text, answer)} for path, answer, text in _GET},
        },
        "components": {"schemas": schemas, "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}}},
    }


def _operation(
    path: str, summary: str, answer: type[msgspec.Struct] | None, request: type[msgspec.Struct] | None = None
) -> Json:
    success: Json = {"description": "Success"}
    if answer is not None:
        success["content"] = _json(answer)
    operation: Json = {
        "operationId": path.strip("/").replace("/", "_").replace("{", "").replace("}", ""),
        "summary": summary,
        "responses": {"200": success, "default": {"description": "An error", "content": _json(Error)}},
    }
    if request is not None:
        operation["requestBody"] = {"required": True, "content": _json(request)}
    if "{model}" in path:
        operation["parameters"] = [{"name": "model", "in": "path", "required": True, "schema": {"type": "string"}}]
    return operation


def _json(kind: type[msgspec.Struct]) -> Json:
    return {"application/json": {"schema": {"$ref": f"#/components/schemas/{kind.__name__}"}}}


def _any_value(kind: type) -> Json:
    """Return the schema of `object`."""
    if kind is not object:
        raise NotImplementedError
    return {"description": "Any value"}


def _describe(name: str, schema: Json) -> None:
    """Add the notes of the tables, and leave out the indentation of docstrings."""
    if "description" in schema:
        schema["description"] = inspect.cleandoc(str(schema["description"]))
    for table in TABLES.values():
        properties = schema.get("properties")
        if table.name == name and isinstance(properties, dict):
            for field in table.fields.values():
                properties[field.name]["description"] = f"{field.rule.capitalize()}. {field.note}".strip()
