"""Whatever is sent, nothing answers with a 5xx and the worker does not notice; what is valid is answered."""

import json
from collections.abc import Callable
from typing import Any

import hypothesis
import msgspec
import openai.types.chat
import pytest
import schemathesis
from schemathesis.specs.openapi.checks import response_schema_conformance

from baton.edge.openapi import Completion, document
from tests.e2e.harness import Serve, error_in, events
from tests.e2e.valid_requests import VALID

pytestmark = [pytest.mark.e2e, pytest.mark.fuzz]

SERVE = ("--echo-context", "256")

schema = schemathesis.openapi.from_dict(document())
ANSWERS: dict[str, Any] = {
    "/v1/chat/completions": openai.types.chat.ChatCompletion,
    "/v1/completions": openai.types.Completion,
}
CHUNKS: dict[str, Callable[[object], object]] = {
    "/v1/chat/completions": lambda chunk: openai.types.chat.ChatCompletionChunk.model_validate(chunk, strict=True),
    "/v1/completions": lambda chunk: msgspec.convert(chunk, Completion),  # the client's type has no null as a reason
}


@pytest.fixture(scope="module")
def pid(serve: Serve) -> int:
    """The worker, before anything was sent to it."""
    return serve.worker().pid


def is_stream(response: schemathesis.Response) -> bool:
    return response.headers.get("content-type", [""])[0].startswith("text/event-stream")


@schema.parametrize()
@hypothesis.settings(
    max_examples=50, deadline=None, derandomize=True, suppress_health_check=list(hypothesis.HealthCheck)
)
def test_no_request_makes_a_server_error(case: schemathesis.Case, serve: Serve, pid: int) -> None:
    if isinstance(case.body, dict) and "model" in case.body:
        case.body["model"] = "echo"
    response = case.call(base_url=serve.url, timeout=30)
    if is_stream(response) and "/v1/messages" not in case.path and not response.text.rstrip().endswith("[DONE]"):
        response = case.call(base_url=serve.url, timeout=30)  # see "A stream can end early" in docs/known-issues.md
    assert response.status_code in {200, 400, 404, 405, 415}, response.text
    if response.status_code != 200:
        error = json.loads(response.text)["error"] if "/v1/messages" in case.path else error_in(response.text)
        assert error["type"] in ("invalid_request_error", "not_found_error")
    if is_stream(response) and "/v1/messages" not in case.path:
        *chunks, last = (json.loads(data) if data != "[DONE]" else data for _, data in events(response.text))
        assert last == "[DONE]"
        assert all(chunk["error"]["type"] == "invalid_request_error" for chunk in chunks if "error" in chunk), (
            response.text
        )


@pytest.mark.parametrize("path", VALID)
@hypothesis.settings(
    max_examples=40, deadline=None, derandomize=True, suppress_health_check=list(hypothesis.HealthCheck)
)
@hypothesis.given(data=hypothesis.strategies.data())
def test_a_valid_request_is_answered_as_the_schema_says(
    path: str, serve: Serve, pid: int, data: hypothesis.strategies.DataObject
) -> None:
    body = data.draw(VALID[path])
    case = schema[path]["POST"].Case(body=body, media_type="application/json")
    response = case.call(base_url=serve.url, timeout=30)
    if is_stream(response) and "/v1/messages" not in path and not is_complete(response.text):
        response = case.call(base_url=serve.url, timeout=30)  # see "A stream can end early" in docs/known-issues.md
    assert response.status_code == 200, response.text
    assert is_stream(response) == bool(body.get("stream"))
    if not is_stream(response):
        case.validate_response(response, checks=[response_schema_conformance])
    check_answer(path, body, response.text)


def is_complete(text: str) -> bool:
    """Whether a stream has its last event."""
    return text.rstrip().endswith("[DONE]") or "event: response.completed" in text or "response.incomplete" in text


def check_answer(path: str, body: dict[str, object], text: str) -> None:
    """Read an answer with the types of OpenAI's own client, which refuse what does not fit."""
    if body.get("stream"):
        chunks = [json.loads(data) for _, data in events(text) if data != "[DONE]"]
        assert chunks
        if (read := CHUNKS.get(path)) is not None:
            for chunk in chunks:
                read(chunk)
            ends = [choice["finish_reason"] for chunk in chunks for choice in chunk["choices"]]
            assert len([end for end in ends if end]) == choices_of(body)
    elif kind := ANSWERS.get(path):
        answer = kind.model_validate_json(text, strict=True)
        if path in CHUNKS:
            assert [choice.index for choice in answer.choices] == list(range(choices_of(body)))
            assert answer.usage.completion_tokens <= choices_of(body) * (body.get("max_tokens") or 256)


def choices_of(body: dict[str, object]) -> int:
    """How many choices a request has: `n` for each prompt."""
    prompt = body.get("prompt")
    prompts = len(prompt) if isinstance(prompt, list) and isinstance(prompt[0], str) else 1
    n = body.get("n", 1)
    assert isinstance(n, int)
    return prompts * n


def test_afterwards_the_worker_is_untouched(serve: Serve, pid: int) -> None:
    serve.assert_quiet()
    assert serve.worker().pid == pid
    assert serve.health() == 200
    assert [serve.ended(state) for state in ("failed", "expired")] == [0, 0]
    assert "Traceback" not in serve.log_of("worker-0")
    answer = serve.client().chat.completions.create(model="echo", messages=[{"role": "user", "content": "Hello"}])
    assert answer.choices[0].message.content == "Hello"
