"""The runtime's log as a source of reasons. What it writes goes to file descriptor 2, in a process of its own here."""

import json
import os
import subprocess
import sys

import pytest

from baton.runtimes.dynamo.frontend_log import reason_filter

pytestmark = pytest.mark.process

SCRIPT = """
import asyncio, json, os, sys
from baton.runtimes.dynamo.frontend_log import FrontendLog

async def main():
    log = FrontendLog(os.environ["FILTER"])
    log.open()
    for line in sys.stdin.buffer.read().splitlines(keepends=True):
        os.write(2, line)
    print("python says", file=sys.stderr)
    print(json.dumps([log.take_reason(name) for name in sys.argv[1:]]))
    os.write(2, b"the last words")
    log.close()
    os.write(2, b"\\nafterwards\\n")

asyncio.run(main())
"""
TARGET = "dynamo_llm::http::service::openai"


def failure(request_id: str, diagnostic: str) -> str:
    entry = {"level": "DEBUG", "target": TARGET, "message": "Semantic request failure", "diagnostic": diagnostic}
    return json.dumps({**entry, "x_request_id": request_id}, separators=(",", ":"))


def run(lines: list[str], *names: str, log: str = "error") -> tuple[list[str | None], str]:
    text = "\n".join(lines) + "\n"
    command = [sys.executable, "-c", SCRIPT, *names]
    environment = {**os.environ, "FILTER": log}
    done = subprocess.run(command, input=text, capture_output=True, text=True, check=True, env=environment)
    return json.loads(done.stdout), done.stderr


def test_reasons_are_found_by_the_id_of_the_request_and_not_shown() -> None:
    asserted = {
        "level": "ERROR",
        "target": TARGET,
        "message": "Internal server error: backend asserted status 500: engine_failed: no\nmemory",
        "x_request_id": "b",
    }
    lost = {**asserted, "message": "Internal server error: deadline_exceeded: too long", "x_request_id": "e"}
    lines = [
        json.dumps(lost, separators=(",", ":")),
        failure("a", 'Some("token \\"258\\" is out\\nof range \\u{1f}")'),
        json.dumps(asserted, separators=(",", ":")),
        failure("c", 'Some("{\\"message\\":\\"deadline_exceeded: too long\\",\\"code\\":503}")'),
        "plain text",
    ]
    reasons, shown = run(lines, "a", "b", "c", "a", "d", "e")
    expected = ['token "258" is out\nof range \x1f', "engine_failed: no\nmemory", "deadline_exceeded: too long"]
    assert reasons == [*expected, None, None, "deadline_exceeded: too long"]
    assert "diagnostic" not in shown
    assert "backend asserted" in shown
    assert [text for text in ("plain text", "python says", "the last words", "afterwards") if text not in shown] == []


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        ('Unavailable: {\\"message\\":\\"deadline_exceeded: late\\",\\"code\\":503}', "deadline_exceeded: late"),
        ("Disconnected: peer_lost: the decode worker is gone", "peer_lost: the decode worker is gone"),
    ],
)
def test_the_error_of_a_prefill_worker_is_the_reason(error: str, reason: str) -> None:
    text = f"Prefill execution failed: Prefill router returned error in output stream: {error}"
    assert run([failure("a", f'Some("{text}")')], "a")[0] == [reason]


@pytest.mark.parametrize(
    ("log", "shown"), [("error", False), ("x=debug", False), ("debug", True), ("x=off,trace", True)]
)
def test_lines_with_reasons_are_shown_if_the_filter_asks_for_them(log: str, shown: bool) -> None:
    reasons, text = run([failure("a", 'Some("why")')], "a", log=log)
    assert (reasons, "diagnostic" in text) == (["why"], shown)


def test_other_lines_are_passed_on_in_order() -> None:
    lines = [f"line {number} {'x' * 1000}" for number in range(50)]
    _, shown = run(lines)
    assert [line for line in shown.splitlines() if line.startswith("line ")] == lines


def test_the_filter_keeps_what_the_user_asked_for() -> None:
    assert reason_filter("warn,x=off").startswith("warn,x=off,dynamo_llm::http::service::openai=debug")
