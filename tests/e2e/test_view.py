"""The web view of a real deployment, over HTTP: as `baton serve` prints it, and with `baton view`."""

import json
import re
import time
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.harness import STOP_S, Process, Serve, environment, eventually, fetch

pytestmark = pytest.mark.e2e

NAMES = ("frontend", "prefill-0", "decode-0")

Json = dict[str, Any]


@pytest.fixture(scope="module")
def serve(start_shared: Callable[..., Serve]) -> Iterator[Serve]:
    serve = start_shared(Serve, "--echo-pace-ms", "20", prefill=1, decode=1)
    yield serve
    serve.stop()


def view_url(output: Path) -> str:
    """Return the address of the view that a command has printed."""
    return eventually(
        lambda: re.search(r"http://127\.0\.0\.1:\d+/$", output.read_text(), re.MULTILINE), 30, "the view"
    )[0]


def events(url: str) -> Iterator[Json]:
    """Yield what a browser gets, with a limit on the time between two events."""
    with urllib.request.urlopen(f"{url}api/events", timeout=30) as stream:
        for line in stream:
            if line.startswith(b"data: "):
                yield json.loads(line[6:])


def watch(url: str, until: Any, within_s: float = 30.0) -> dict[str, Json]:
    """Read events until `until` of all processes and requests seen is true; return the requests."""
    processes: dict[str, Json] = {}
    requests: dict[str, Json] = {}
    end = time.monotonic() + within_s
    for event in events(url):
        processes |= {each["short"]: each for each in event["processes"]}
        requests |= {each["id"]: each for each in event["requests"]}
        if until(processes, requests):
            return requests
        assert time.monotonic() < end, (processes, requests)
    raise AssertionError("the view ended its events")


def named(requests: dict[str, Json], client_id: str) -> Json:
    """Return the request that its client has given this id, or one without processes and state."""
    found = (each for each in requests.values() if each["client_id"] == client_id)
    return next(found, {"processes": [], "state": None})


def post(url: str, body: Json) -> Any:
    request = urllib.request.Request(url, json.dumps(body).encode(), {"Content-Type": "application/json"})
    return urllib.request.urlopen(request, timeout=60)


def test_the_view_shows_every_process_and_a_chat_across_them(serve: Serve) -> None:
    url = view_url(serve.process.output)
    body = {"model": "echo", "messages": [{"role": "user", "content": "Hello view"}], "max_tokens": 8, "stream": True}
    with post(f"{url}api/chat", body) as answer:
        client_id = answer.headers["x-request-id"]
        assert b"[DONE]" in answer.read()

    def complete(processes: dict[str, Json], requests: dict[str, Json]) -> bool:
        healthy = all(processes.get(name, {}).get("health") == "serving" for name in NAMES)
        found = named(requests, client_id)
        return healthy and len(found["processes"]) == len(NAMES) and found["state"] == "completed"

    found = named(watch(url, complete), client_id)

    def ended() -> str | None:
        """The request as JSON, when every process has reported how it ended: they report one by one."""
        _, text = fetch(f"{url}api/requests/{found['id']}")
        return text if all(hop["state"] for hop in json.loads(text)["hops"]) else None

    text = eventually(ended, what="the timelines of all processes")
    hops = {hop["process"].rpartition("/")[2]: hop for hop in json.loads(text)["hops"]}
    assert set(hops) == set(NAMES)
    assert {"kv_claimed", "kv_moved", "first_token"} <= {event[1] for event in hops["decode-0"]["events"]}
    assert "Hello view" not in text


def test_a_chat_that_is_stopped_is_cancelled_in_the_engine(serve: Serve) -> None:
    url = view_url(serve.process.output)
    body = {"model": "echo", "messages": [{"role": "user", "content": "Stop"}], "max_tokens": 4000, "stream": True}
    with post(f"{url}api/chat", body) as answer:
        client_id = answer.headers["x-request-id"]
        answer.readline()
    requests = watch(url, lambda _, requests: named(requests, client_id)["state"] == "cancelled")
    request_id = named(requests, client_id)["id"]

    def decode_states() -> list[str]:
        """How the decode worker's part ended: it reports this after the frontend."""
        hops = json.loads(fetch(f"{url}api/requests/{request_id}")[1])["hops"]
        return [hop["state"] for hop in hops if hop["role"] == "decode" and hop["state"]]

    assert eventually(decode_states, what="the decode worker's timeline") == ["cancelled"]


def test_baton_view_serves_another_deployment_with_a_token(serve: Serve, tmp_path: Path) -> None:
    output = tmp_path / "view.log"
    command = ["view", "--deployment", str(serve.port), "--view-token", "secret"]
    process = Process(command, output, environment())
    try:
        found = eventually(lambda: re.search(r"http://\S+", output.read_text()), 30, "the address")[0]
        assert found.endswith("/?token=secret")
        assert fetch(found.partition("?")[0])[0] == 401
    finally:
        process.signal(15)
        assert process.wait(STOP_S) == 0
