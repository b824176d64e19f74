"""Every answer, whole or streamed, and every error, against the schemas that OpenAI and Anthropic publish.

OpenAI's OpenAPI document is in no package index. The schemas are made from the types of the providers' Node packages,
which are generated from those documents (node/schemas.mjs).
"""

import copy
import json
from collections.abc import Callable, Iterator
from typing import Any

import jsonschema_rs
import pytest

from tests.clients.endpoint import ENVIRONMENT, GREETING, KEY, MODEL, UNKNOWN_MODEL
from tests.e2e.harness import Serve, events

pytestmark = [pytest.mark.e2e, pytest.mark.clients, pytest.mark.timeout(120)]

CHAT, COMPLETIONS, RESPONSES, MESSAGES = "/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages"
AUTHORIZED = {"Authorization": f"Bearer {KEY}"}
TOOL = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}
CLAUDE_TOOL = {"name": "get_weather", "input_schema": TOOL["function"]["parameters"]}
PARIS = [{"role": "user", "content": "What is the weather in Paris?"}]
GOOD: dict[str, dict[str, Any]] = {
    CHAT: {"model": MODEL, "messages": [{"role": "user", "content": GREETING}]},
    COMPLETIONS: {"model": MODEL, "prompt": GREETING},
    RESPONSES: {"model": MODEL, "input": GREETING},
    MESSAGES: {"model": MODEL, "messages": [{"role": "user", "content": GREETING}], "max_tokens": 64},
}
WHOLE = {
    CHAT: "openai.ChatCompletion",
    COMPLETIONS: "openai.Completion",
    RESPONSES: "openai.Response",
    MESSAGES: "anthropic.Message",
}
COMPLETION_CHUNK = "openai.Completion in a stream"
STREAMED = {
    CHAT: "openai.ChatCompletionChunk",
    COMPLETIONS: COMPLETION_CHUNK,
    RESPONSES: "openai.ResponseStreamEvent",
    MESSAGES: "anthropic.RawMessageStreamEvent",
}
# Fields about the providers' own service, which their latest types require: billing, caches, citations, programs. And
# `output_text`, which the client adds itself.
PROVIDERS_OWN = {
    *("access_programs", "output_text", "cache_write_tokens", "container", "diagnostics", "stop_details", "speed"),
    *("cache_creation", "cache_read_input_tokens", "inference_geo", "output_tokens_details", "server_tool_use"),
    *("service_tier", "citations", "caller"),
}
# Changes to a good request: answers of every kind.
ANSWERED = {
    "plain": (CHAT, {}),
    "cut by length": (CHAT, {"max_tokens": 3}),
    "stopped": (CHAT, {"stop": "How"}),
    "empty": (CHAT, {"stop": "Hello"}),
    "two choices": (CHAT, {"n": 2, "temperature": 1.0}),
    "with logprobs": (CHAT, {"logprobs": True, "top_logprobs": 2, "max_tokens": 3}),
    "a tool call": (CHAT, {"messages": PARIS, "tools": [TOOL]}),
    "plain completion": (COMPLETIONS, {}),
    "completion cut by length": (COMPLETIONS, {"max_tokens": 3}),
    "completion stopped": (COMPLETIONS, {"stop": "How"}),
    "empty completion": (COMPLETIONS, {"stop": "Hello"}),
    "completion with logprobs": (COMPLETIONS, {"logprobs": 2, "max_tokens": 3}),
    "completions of two prompts": (COMPLETIONS, {"prompt": [GREETING, GREETING]}),
    "response": (RESPONSES, {}),
    "message": (MESSAGES, {}),
    "message cut by length": (MESSAGES, {"max_tokens": 3}),
    "message with a tool call": (MESSAGES, {"messages": PARIS, "tools": [CLAUDE_TOOL]}),
}
# Changes to a good request, and the status and type of the error.
REFUSED = {
    "an unknown model": ({"model": UNKNOWN_MODEL}, 404, ("invalid_request_error", "not_found_error")),
    "a value out of range": ({"temperature": 2.5}, 400, ("invalid_request_error",)),
    "a value of another type": ({"temperature": "hot"}, 400, ("invalid_request_error",)),
    "an unknown field": ({"frobnicate": 1}, 400, ("invalid_request_error",)),
    "more than the context": (
        {"max_tokens": 2**30, "max_output_tokens": 2**30},
        400,
        ("invalid_request_error",),
    ),
}


@pytest.fixture(scope="module")
def schemas() -> dict[str, jsonschema_rs.Validator]:
    documents = json.loads((ENVIRONMENT / "schemas.json").read_text())
    documents[COMPLETION_CHUNK] = chunk_of(documents["openai.Completion"])
    allow_null(documents["openai.ResponseStreamEvent"]["definitions"]["Response"], "usage")
    return {name: jsonschema_rs.validator_for(requiring_less(schema)) for name, schema in documents.items()}


def chunk_of(completion: dict[str, Any]) -> dict[str, Any]:
    """The package has one type for completions and their chunks, where OpenAI sends null for what is not known yet."""
    chunk: dict[str, Any] = copy.deepcopy(completion)
    allow_null(chunk["definitions"]["CompletionChoice"], "finish_reason")
    allow_null(chunk, "usage")
    return chunk


def allow_null(schema: dict[str, Any], field: str) -> None:
    schema["properties"][field] = {"anyOf": [schema["properties"][field], {"type": "null"}]}


def requiring_less(schema: Any) -> Any:
    """Return the schema without the requirement of `PROVIDERS_OWN`."""
    if isinstance(schema, list):
        return [requiring_less(part) for part in schema]
    if not isinstance(schema, dict):
        return schema
    return {
        name: [field for field in part if field not in PROVIDERS_OWN] if name == "required" else requiring_less(part)
        for name, part in schema.items()
    }


@pytest.fixture(scope="module")
def impatient(start_shared: Callable[..., Serve]) -> Iterator[Serve]:
    """A server that ends streams in their middle: with an error, for their time is up."""
    settings = {"BATON_ECHO_PACE_MS": "50", "BATON_REQUEST_TIMEOUT_S": "1"}
    serve = start_shared(Serve, settings=settings)
    yield serve
    serve.stop()


@pytest.fixture(scope="module")
def minilm(start_shared: Callable[..., Serve]) -> Iterator[Serve]:
    """A server of embeddings."""
    serve = start_shared(Serve, "--model", "minilm", engine="torch")
    yield serve
    serve.stop()


def assert_valid(validator: jsonschema_rs.Validator, value: Any) -> None:
    problems = [f"{'/'.join(map(str, error.instance_path))}: {error.message}" for error in validator.iter_errors(value)]
    assert not problems, "; ".join(problems)


def assert_error(schemas: dict[str, Any], path: str, value: Any) -> dict[str, Any]:
    """Check the envelope of the API that `path` belongs to; return what is in it."""
    if path == MESSAGES:
        assert (value["type"], set(value["error"])) == ("error", {"type", "message"}), value
    else:
        assert set(value) == {"error"}, value
        assert set(value["error"]) == {"message", "type", "param", "code"}, value
        assert_valid(schemas["openai.ErrorObject"], {**value["error"], "code": text_or_none(value["error"]["code"])})
    assert value["error"]["message"]
    error: dict[str, Any] = value["error"]
    return error


def text_or_none(code: object) -> object:
    """OpenAI's codes are texts; ours may also be the status, as vLLM's are."""
    return str(code) if isinstance(code, int) else code


def streamed(text: str) -> list[Any]:
    """Return the data of every event; the last one of the OpenAI API is "[DONE]"."""
    return [data if data == "[DONE]" else json.loads(data) for _, data in events(text)]


@pytest.mark.parametrize("kind", ANSWERED)
def test_a_whole_answer_is_valid(endpoint: Serve, schemas: dict[str, Any], kind: str) -> None:
    path, change = ANSWERED[kind]
    status, text = endpoint.post(path, {**GOOD[path], **change}, AUTHORIZED)
    assert status == 200, text
    assert_valid(schemas[WHOLE[path]], json.loads(text))


@pytest.mark.parametrize("usage", [False, True], ids=["", "usage"])
@pytest.mark.parametrize("kind", ANSWERED)
def test_every_event_of_a_stream_is_valid(endpoint: Serve, schemas: dict[str, Any], kind: str, usage: bool) -> None:
    path, change = ANSWERED[kind]
    options = {"stream_options": {"include_usage": True}} if usage and path in {CHAT, COMPLETIONS} else {}
    status, text = endpoint.post(path, {**GOOD[path], **change, "stream": True, **options}, AUTHORIZED)
    assert status == 200, text
    chunks = streamed(text)
    if path in {CHAT, COMPLETIONS}:
        assert chunks.pop() == "[DONE]"
    assert chunks
    for chunk in chunks:
        if chunk != "[DONE]":
            assert_valid(schemas[STREAMED[path]], chunk)


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
@pytest.mark.parametrize("path", GOOD)
@pytest.mark.parametrize("kind", REFUSED)
def test_an_error_is_valid(endpoint: Serve, schemas: dict[str, Any], kind: str, path: str, stream: bool) -> None:
    change, expected, types = REFUSED[kind]
    status, text = endpoint.post(path, {**GOOD[path], **change, "stream": stream}, AUTHORIZED)
    assert status == expected, text
    assert assert_error(schemas, path, json.loads(text))["type"] in types


@pytest.mark.parametrize("path", GOOD)
@pytest.mark.parametrize("body", ["", "{", "[]", "null", '{"model": 1}', b"\xff\xfe"], ids=repr)
def test_a_body_that_is_no_request_is_a_valid_error(
    endpoint: Serve, schemas: dict[str, Any], body: str | bytes, path: str
) -> None:
    status, text = endpoint.post(path, body, AUTHORIZED)
    assert status == 400, text
    assert assert_error(schemas, path, json.loads(text))["type"] == "invalid_request_error"


@pytest.mark.parametrize("path", [*GOOD, "/v1/embeddings", "/v1/models"])
def test_a_missing_key_is_a_valid_error(endpoint: Serve, schemas: dict[str, Any], path: str) -> None:
    status, text = endpoint.get(path) if path == "/v1/models" else endpoint.post(path, GOOD.get(path, {}))
    assert status == 401, text
    assert "API key" in assert_error(schemas, path, json.loads(text))["message"]


@pytest.mark.parametrize("path", GOOD)
def test_a_wrong_method_is_a_valid_error(endpoint: Serve, schemas: dict[str, Any], path: str) -> None:
    status, text = endpoint.get(path, AUTHORIZED)
    assert status == 405, text
    assert_error(schemas, path, json.loads(text))


@pytest.mark.parametrize("path", ["/v1/frobnicate", "/frobnicate", "/v1/models/no-such-model"])
def test_a_route_that_does_not_exist_is_a_valid_error(endpoint: Serve, schemas: dict[str, Any], path: str) -> None:
    status, text = endpoint.get(path, AUTHORIZED)
    assert status == 404, text
    assert_error(schemas, path, json.loads(text))


def test_a_missing_control_token_is_a_valid_error(endpoint: Serve, schemas: dict[str, Any]) -> None:
    status, text = endpoint.get("/busy_threshold", AUTHORIZED)
    assert status == 401, text
    assert_error(schemas, "/busy_threshold", json.loads(text))


def test_models_are_valid(endpoint: Serve, schemas: dict[str, Any]) -> None:
    listed = json.loads(endpoint.get("/v1/models", AUTHORIZED)[1])
    assert (listed["object"], len(listed["data"])) == ("list", 1)
    assert_valid(schemas["openai.Model"], listed["data"][0])
    assert_valid(schemas["openai.Model"], json.loads(endpoint.get(f"/v1/models/{MODEL}", AUTHORIZED)[1]))


@pytest.mark.parametrize("texts", ["Hello", ["Hello", "world"]], ids=["one", "two"])
def test_embeddings_are_valid(minilm: Serve, schemas: dict[str, Any], texts: str | list[str]) -> None:
    status, text = minilm.post("/v1/embeddings", {"model": "minilm", "input": texts})
    assert status == 200, text
    assert_valid(schemas["openai.CreateEmbeddingResponse"], json.loads(text))


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS, MESSAGES])
def test_an_error_in_a_stream_is_valid(impatient: Serve, schemas: dict[str, Any], path: str) -> None:
    body = {**GOOD[path], "model": "echo", "max_tokens": 1000, "stream": True}
    status, text = impatient.post(path, body)
    assert status == 200, text
    chunks = [chunk for chunk in streamed(text) if chunk != "[DONE]"]
    assert_error(schemas, path, chunks[-1])
    for chunk in chunks[:-1]:
        assert_valid(schemas[STREAMED[path]], chunk)


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS, MESSAGES])
def test_a_deadline_before_the_answer_is_a_valid_error(impatient: Serve, schemas: dict[str, Any], path: str) -> None:
    status, text = impatient.post(path, {**GOOD[path], "model": "echo", "max_tokens": 1000})
    assert status == 504, text
    assert_error(schemas, path, json.loads(text))
