"""Whatever is sent, well-formed or not, nothing answers with a 5xx and the worker does not notice."""

import json

import hypothesis
import pytest
import schemathesis

from baton.edge.openapi import document
from tests.e2e.harness import Serve, error_in, events

pytestmark = [pytest.mark.e2e, pytest.mark.fuzz]

SERVE = ("--echo-context", "256")

schema = schemathesis.openapi.from_dict(document())


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


def test_afterwards_the_worker_is_untouched(serve: Serve, pid: int) -> None:
    serve.assert_quiet()
    assert serve.worker().pid == pid
    assert serve.health() == 200
    assert [serve.ended(state) for state in ("failed", "expired")] == [0, 0]
    assert "Traceback" not in serve.log_of("worker-0")
    answer = serve.client().chat.completions.create(model="echo", messages=[{"role": "user", "content": "Hello"}])
    assert answer.choices[0].message.content == "Hello"
