"""Timelines over HTTP: what a process reports about its requests and itself."""

import json
from typing import Any

import pytest

from tests.e2e.harness import Serve, eventually

pytestmark = pytest.mark.e2e

SERVE = ("--echo-pace-ms", "2")
CHAT = "/v1/chat/completions"
TRACE_ID = "2af7651916cd43dd8448eb211c80319c"


def of_worker(serve: Serve, query: str = "", worker: int = 0) -> dict[str, Any]:
    status, text = serve.system(f"/control/timelines{query}", worker)
    assert status == 200, text
    return json.loads(text)


def of_frontend(serve: Serve, query: str = "") -> dict[str, Any]:
    status, text = serve.get(f"/control/timelines{query}")
    assert status == 200, text
    return json.loads(text)


def finished(page: dict[str, Any], trace_id: str) -> list[dict[str, Any]]:
    return [each for each in page["timelines"] if each["trace_id"] == trace_id and each["state"] is not None]


def chat(serve: Serve, trace_id: str, content: str, **fields: object) -> tuple[int, str]:
    body = {"model": "echo", "messages": [{"role": "user", "content": content}], **fields}
    return serve.post(CHAT, body, {"traceparent": f"00-{trace_id}-b7ad6b7169203331-01"})


def test_a_request_is_recorded_by_frontend_and_worker(serve: Serve) -> None:
    assert chat(serve, TRACE_ID, "a secret prompt", stream=True, max_tokens=10)[0] == 200
    [worker] = eventually(lambda: finished(of_worker(serve), TRACE_ID), what="the worker's timeline")
    [edge] = eventually(lambda: finished(of_frontend(serve), TRACE_ID), what="the frontend's timeline")
    assert (worker["role"], worker["model"], worker["state"], worker["error"]) == (
        "aggregated",
        "echo",
        "completed",
        None,
    )
    assert (worker["prompt_tokens"], worker["cached_tokens"], worker["completion_tokens"]) == (15, 0, 10)
    phases = [phase for _, phase, _ in worker["events"]]
    assert phases[:2] == ["received", "admitted"]
    assert {"submitted", "queued"} <= set(phases[2:5])
    assert phases[-2:] == ["first_token", "finished"]
    assert worker["gaps_us"]
    assert (edge["role"], edge["model"], edge["state"]) == ("frontend", "echo", "completed")
    assert [phase for _, phase, _ in edge["events"]] == [
        "received",
        "admitted",
        "forwarded",
        "first_token",
        "finished",
    ]
    assert edge["client_id"] == worker["client_id"]
    assert "secret" not in json.dumps([worker, edge])


def test_a_page_begins_after_the_last_one(serve: Serve) -> None:
    chat(serve, TRACE_ID, "one more", max_tokens=2)
    page = eventually(lambda: (found := of_worker(serve))["timelines"] and found, what="a finished request")
    assert page["process"]["role"] == "aggregated"
    assert page["process"]["engine"] == "echo"
    after = of_worker(serve, f"?after={page['next']}")
    assert [each for each in after["timelines"] if each["sequence"] and each["sequence"] <= page["next"]] == []
    assert len(of_worker(serve, "?limit=1")["timelines"]) == 1
    assert serve.system("/control/timelines?after=x")[0] == 400


def test_a_refused_request_has_its_error(serve: Serve) -> None:
    trace_id = "3af7651916cd43dd8448eb211c80319c"
    assert chat(serve, trace_id, "Hello", max_tokens=2_000_000)[0] == 400
    [edge] = eventually(lambda: finished(of_frontend(serve), trace_id), what="the frontend's timeline")
    assert edge["state"] == "refused"
    assert edge["error"]["message"]


def test_reports_need_the_token(serve: Serve) -> None:
    for path in ("/control/timelines", "/control/about"):
        assert serve.get(path, {"Authorization": "Bearer wrong"})[0] == 401
        assert serve.system(path, headers={"Authorization": "Bearer wrong"})[0] == 401


def test_about_says_what_a_process_is(serve: Serve) -> None:
    about = json.loads(serve.system("/control/about")[1])
    assert about["process"]["pid"] == serve.worker().pid
    assert about["process"]["model"] == "echo"
    assert about["health"] == "serving"
    assert about["settings"]["echo.pace_ms"] == 2
    assert about["capabilities"]["generate"] is True
    assert [rank["rank"] for rank in about["load"]] == [0]
    assert about["commands"] == ["weights/version"]
    frontend = json.loads(serve.get("/control/about")[1])
    assert (frontend["process"]["role"], frontend["process"]["pid"]) == ("frontend", serve.frontend().pid)
