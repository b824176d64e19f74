"""Logs as JSON: one object per line, whoever wrote the line."""

import asyncio
import json
import logging
import subprocess
import sys
from datetime import UTC, datetime
from pathlib import Path

import pytest

from baton.process.json_lines import JsonFormatter, convert_to_json, message_in
from baton.request.log_ids import CURRENT, LogIds
from baton.topology.log_file import LogFile, ProcessOutput

NOW = datetime(2026, 3, 1, 12, 0, 0, 250_000, tzinfo=UTC)
TRACE = "0af7651916cd43dd8448eb211c80319c"
OURS = (
    b'{"time":"2026-03-01T12:00:00.250Z","level":"INFO","logger":"baton.request","message":"m","process":"decode-0"}\n'
)
HEADERS = {"traceparent": f"00-{TRACE}-b7ad6b7169203331-01"}


def formatted(**more: object) -> dict[str, object]:
    record = logging.makeLogRecord({"name": "one", "levelname": "INFO", "msg": "%s said", "args": ("it",), **more})
    line = JsonFormatter("decode-0").format(record)
    assert "\n" not in line
    fields: dict[str, object] = json.loads(line)
    return fields


def converted(line: bytes) -> dict[str, object]:
    text = convert_to_json(line, NOW, "decode-0")
    assert text.endswith(b"\n")
    assert text.count(b"\n") == 1
    fields: dict[str, object] = json.loads(text)
    return fields


def test_a_line_has_time_level_logger_message_and_process() -> None:
    fields = formatted()
    assert datetime.fromisoformat(str(fields.pop("time"))).tzinfo is not None
    assert fields == {"level": "INFO", "logger": "one", "message": "it said", "process": "decode-0"}


def test_a_line_of_a_task_has_the_ids_of_its_request_until_that_ends() -> None:
    async def body() -> None:
        ids = LogIds("r-1", HEADERS)
        CURRENT.set(ids)
        fields = formatted()
        assert (fields["request_id"], fields["trace_id"]) == ("r-1", TRACE)
        ids.end()
        assert "request_id" not in formatted()

    asyncio.run(body())


def test_ids_that_a_line_was_given_come_first() -> None:
    fields = formatted(request_id="r-2", trace_id=None)
    assert fields["request_id"] == "r-2"
    assert "trace_id" not in fields


def test_an_error_is_one_line_with_its_traceback() -> None:
    try:
        raise ValueError("broken\nin two")
    except ValueError:
        fields = formatted(exc_info=sys.exc_info())
    assert "ValueError: broken\nin two" in str(fields["exception"])


def test_lines_of_python_processes_stay_as_they_are() -> None:
    assert convert_to_json(OURS * 3, NOW, "decode-0") == OURS * 3


def test_a_line_of_the_runtime_gets_the_same_names() -> None:
    fields = {"level": "WARN", "target": "x::y", "message": "went wrong", "file": "a.rs", "line": 7, "trace_id": TRACE}
    line = json.dumps({"time": "2026-03-01T11:59:59.5Z", **fields, "x_request_id": "mine", "why": "a"}).encode()
    assert converted(line + b"\n") == {
        "time": "2026-03-01T11:59:59.500Z",
        "level": "WARNING",
        "logger": "x::y",
        "message": "went wrong",
        "process": "decode-0",
        "request_id": "mine",
        "trace_id": TRACE,
        "why": "a",
    }


@pytest.mark.parametrize("text", ["Traceback (most recent call last):", "{not json", '{"a": 1}', '{"time":"x"}'])
def test_any_other_line_is_the_message_of_one(text: str) -> None:
    fields = converted(text.encode() + b"\n")
    assert (fields["message"], fields["logger"], fields["process"]) == (text, "output", "decode-0")


def test_bytes_that_are_no_text_and_empty_lines_do_no_harm() -> None:
    text = convert_to_json(b"\xff\n\n" + OURS, NOW, "p")
    assert [json.loads(line)["message"] for line in text.splitlines()] == ["\ufffd", "m"]


def test_the_message_of_a_line_is_found() -> None:
    assert message_in(OURS) == "m"
    assert message_in(b"no json\n") == ""


@pytest.mark.process
@pytest.mark.parametrize("log_format", ["text", "json"])
def test_logs_take_at_most_twice_their_size_under_load(tmp_path: Path, log_format: str) -> None:
    limit = 200_000
    log_file = LogFile(tmp_path / "decode-0.log", limit)
    output = ProcessOutput("decode-0", log_file, log_format)
    writing = output.open()
    program = (
        f"import os\nfor n in range(20000): os.write({writing}, b'a line of the runtime or of a library %d\\n' % n)"
    )
    subprocess.run([sys.executable, "-c", program], pass_fds=[writing], timeout=60, check=True)
    with open(writing, "wb"):
        pass
    output.join(30)
    log_file.close()
    sizes = {file.name: file.stat().st_size for file in tmp_path.iterdir()}
    assert set(sizes) == {"decode-0.log", "decode-0.log.1"}
    assert max(sizes.values()) <= limit
    lines = (tmp_path / "decode-0.log").read_text().splitlines()
    assert lines[-1].endswith("19999" if log_format == "text" else '19999","process":"decode-0"}')


PROGRAM = """
import logging, os, subprocess, sys
from baton.process.logs import start_logging

start_logging("info", "json", "worker")
logging.getLogger("one").info("first")
os.write(2, b"from a library\\n")
subprocess.run([sys.executable, "-c", "import sys; sys.stderr.write('from a child\\\\n')"])
logging.getLogger("one").warning("second")
"""


@pytest.mark.process
def test_a_process_that_runs_by_itself_writes_nothing_but_json() -> None:
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, timeout=60, check=True)
    messages = {json.loads(line)["message"] for line in done.stderr.splitlines()}
    assert messages == {"first", "second", "from a library", "from a child"}
    assert {json.loads(line)["process"] for line in done.stderr.splitlines()} == {"worker"}


def test_half_a_surrogate_pair_is_escaped() -> None:
    """As in the name of a file that is not UTF-8."""
    assert formatted(msg="no file %s", args=("\udcff",))["message"] == "no file \\udcff"
    line = b'{"level":"INFO","target":"x","message":"m","file_name":"\\ud800"}\n'
    assert json.loads(convert_to_json(line, NOW, "decode-0"))["file_name"] == "\\ud800"
