"""Whatever is sent, well-formed or not, nothing answers with a 5xx and the worker does not notice."""

import json
from pathlib import Path

import hypothesis
import pytest
import schemathesis

from tests.e2e.harness import Serve, error_in, events

pytestmark = [pytest.mark.e2e, pytest.mark.fuzz]

SERVE = ("--echo-context", "256")

schema = schemathesis.openapi.from_path(Path(__file__).with_name("openapi.yaml"))


@pytest.fixture(scope="module")
def pid(serve: Serve) -> int:
    """The worker, before anything was sent to it."""
    return serve.worker().pid


def is_stream(response: schemathesis.Response) -> bool:
    return response.headers.get("content-type", [""])[0].startswith("text/event-stream")


@schema.parametrize()
@hypothesis.settings(
    max_examples=150, deadline=None, derandomize=True, suppress_health_check=list(hypothesis.HealthCheck)
)
def test_no_request_makes_a_server_error(case: schemathesis.Case, serve: Serve, pid: int) -> None:
    response = case.call(base_url=serve.url, timeout=30)
    if is_stream(response) and not response.text.rstrip().endswith("[DONE]"):
        response = case.call(base_url=serve.url, timeout=30)  # see "A stream can end early" in docs/known-issues.md
    assert response.status_code in {200, 400, 404, 405, 415}, response.text
    if response.status_code != 200:
        assert error_in(response.text)["type"] in ("invalid_request_error", "not_found_error")
    if is_stream(response):
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
