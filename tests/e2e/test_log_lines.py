"""The logs of every process in every layout: JSON with the ids of requests, and no text of prompts or answers."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.harness import Cluster, Serve, eventually
from tests.e2e.pooled import Pooled
from tests.e2e.test_router import ECHO

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.timeout(400)]

CHAT = "/v1/chat/completions"
MARKER = "Quetzalcoatlus"
JSON = ("--log-format", "json")
REQUIRED = {"time", "level", "logger", "message", "process"}
TRACE = "0af7651916cd43dd8448eb211c80319c"
HEADERS = {"x-request-id": "mine-1", "traceparent": f"00-{TRACE}-b7ad6b7169203331-01"}

LAYOUTS: dict[str, Callable[[Callable[..., Any]], Serve | Cluster]] = {
    "aggregated": lambda start: start(Serve, "--echo-faults", *JSON),
    "text": lambda start: start(Serve, "--echo-faults", "--model-input", "text", *JSON),
    "disaggregated": lambda start: start(Serve, "--echo-faults", *JSON, prefill=1, decode=1),
    "process workers": lambda start: start(Serve, "--echo-faults", "--process", "1", *JSON, processors=1),
    "pools": lambda start: start(Pooled, ECHO, workers=2, arguments=JSON),
    "without a supervisor": lambda start: start(Cluster, settings={"BATON_LOG_FORMAT": "json"}),
}


def chat(prompt: str, **more: Any) -> dict[str, Any]:
    return {"model": "echo", "messages": [{"role": "user", "content": prompt}], "max_tokens": 64, **more}


def lines(directory: Path) -> dict[str, list[dict[str, Any]]]:
    """Return the decoded lines of every log of a process."""
    return {
        file.name: [json.loads(line) for line in file.read_text().splitlines()]
        for file in directory.rglob("*.log")
        if file.name != "serve.log"
    }


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_line_is_json_with_the_ids_of_its_request_and_without_its_text(
    layout: str, start: Callable[..., Any]
) -> None:
    system = LAYOUTS[layout](start)
    status, answer = system.post(CHAT, chat(f"{MARKER} flies"), HEADERS)
    assert (status, MARKER in answer) == (200, True)
    assert system.post(CHAT, chat(f"{MARKER} streams", stream=True))[0] == 200
    assert system.post(CHAT, chat(MARKER, max_tokens=-1))[0] == 400
    assert system.post(CHAT, chat(MARKER, stop=[MARKER] * 1000))[0] == 400
    assert system.post(CHAT, chat(MARKER, unknown=MARKER))[0] == 400
    assert system.post(CHAT, chat(f"[[fail]] {MARKER}"))[0] in (200, 500)
    assert system.post(CHAT, f'{{"messages": "{MARKER}')[0] == 400

    def finished() -> list[dict[str, Any]]:
        return [
            line
            for logged in lines(system.directory).values()
            for line in logged
            if line["logger"] == "baton.request" and "client=mine-1" in line["message"]
        ]

    eventually(finished, what="the line of the request")
    for line in finished():
        assert line["message"].startswith(line["request_id"])
        assert line["trace_id"] == TRACE
    system.stop()
    for name, logged in lines(system.directory).items():
        assert logged, name
        for line in logged:
            assert set(line) >= REQUIRED, line
            assert line["process"] in name or layout == "without a supervisor", line
    for file in system.directory.rglob("*.log*"):
        assert MARKER not in file.read_text(), file.name
