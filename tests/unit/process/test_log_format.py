"""Every line of a log has a time, a level and a logger, whoever wrote it."""

import json
from datetime import UTC, datetime

import pytest

from baton.process.log_format import convert, message_of

NOW = datetime(2026, 3, 1, 12, 0, 0, 250_000, tzinfo=UTC)
HERE = f"{NOW.astimezone():%Y-%m-%d %H:%M:%S},250"
OURS = b"2026-03-01 11:59:59,001 INFO baton.request r-1 completed\n"


def runtime_line(**fields: object) -> bytes:
    return (
        json.dumps({"time": "2026-03-01T12:00:00.250Z", "level": "WARN", "target": "x::y", **fields}).encode() + b"\n"
    )


def test_lines_of_python_processes_stay_as_they_are() -> None:
    assert convert(OURS * 3, NOW) == OURS * 3


def test_a_line_of_the_runtime_gets_the_same_format_with_its_fields() -> None:
    line = runtime_line(message="went wrong", file="a.rs", line=7, trace_id="0af7", x_request_id="mine", why='a "b" c')
    expected = f'{HERE} WARNING x::y went wrong trace_id=0af7 x_request_id=mine why="a \\"b\\" c"\n'
    assert convert(OURS + line, NOW) == OURS + expected.encode()


@pytest.mark.parametrize("text", ["Traceback (most recent call last):", "  at f()", "{not json", '{"a": 1}', "[1, 2]"])
def test_a_line_without_a_time_gets_one(text: str) -> None:
    assert convert(text.encode() + b"\n" + OURS, NOW) == f"{HERE} INFO output {text}\n".encode() + OURS


def test_the_error_of_a_request_is_one_of_the_runtime() -> None:
    line = b"dynamo._core.InvalidArgument: n: too many\n"
    assert convert(line, NOW) == f"{HERE} INFO dynamo._core InvalidArgument: n: too many\n".encode()


def test_bytes_that_are_no_text_and_empty_lines_do_no_harm() -> None:
    assert convert(b"\xff\xfe\n\n" + OURS, NOW) == f"{HERE} INFO output \ufffd\ufffd\n".encode() + OURS


def test_the_message_of_a_line_is_what_follows_its_logger() -> None:
    assert message_of(OURS) == "r-1 completed"
    assert message_of(convert(b"killed\n", NOW)) == "killed"


def test_lines_that_look_like_those_of_the_runtime_and_cannot_be_read_are_output() -> None:
    deep = b'{"a":' + b"[" * 100_000
    assert convert(deep + b"\n", NOW) == f"{HERE} INFO output ".encode() + deep + b"\n"
    line = b'{"time":"0001-01-01T00:00:00+14:00","level":"INFO","target":"t","message":"m"}\n'
    assert convert(line, NOW) == f"{HERE} INFO t m\n".encode()


def test_half_a_surrogate_pair_is_escaped() -> None:
    line = b'{"level":"INFO","target":"x","message":"m \\ud800"}\n'
    assert convert(line, NOW).endswith(b" INFO x m \\ud800\n")
