"""Lines of several logs, in the order of time, and those that are added."""

import json
import logging
from pathlib import Path

from baton.cli.log_lines import Follower, last_lines
from baton.process.json_lines import JsonFormatter


def line(second: int, text: str) -> str:
    return f"2026-01-31 10:00:{second:02d},000 INFO x {text}\n"


def test_lines_of_several_logs_are_merged_by_time(tmp_path: Path) -> None:
    first, second = tmp_path / "a.log", tmp_path / "b.log"
    first.write_text(line(1, "one") + line(4, "four") + "  a traceback\n")
    second.write_text(line(2, "two") + line(3, "three") + line(5, "five"))
    logs = {"a": first, "b": second}
    texts = [each.text.split()[-1] for each in last_lines(logs, 10)]
    assert texts == ["one", "two", "three", "four", "traceback", "five"]
    assert [each.source for each in last_lines(logs, 2)] == ["a", "b"]
    assert last_lines(logs, 0) == []


def test_lines_from_before_a_rotation_come_first(tmp_path: Path) -> None:
    log = tmp_path / "a.log"
    log.with_name("a.log.1").write_text(line(1, "one") + line(2, "two"))
    log.write_text("  a traceback\n" + line(3, "three"))
    other = tmp_path / "b.log"
    other.write_text(line(1, "other"))
    logs = {"a": log, "b": other}
    texts = [each.text.split()[-1] for each in last_lines(logs, 10)]
    assert texts == ["one", "other", "two", "traceback", "three"]
    assert [each.text.split()[-1] for each in last_lines({"a": log}, 3)] == ["two", "traceback", "three"]
    log.unlink()
    assert [each.text.split()[-1] for each in last_lines({"a": log}, 10)] == ["one", "two"]


def test_added_lines_are_followed_through_a_rotation(tmp_path: Path) -> None:
    log = tmp_path / "a.log"
    log.write_text(line(1, "old"))
    follower = Follower({"a": log})
    assert follower.poll() == []
    with log.open("a") as file:
        file.write(line(2, "new") + "2026-01-31 10:00:03,000 INFO x half a l")
        file.flush()
        assert [each.text.split()[-1] for each in follower.poll()] == ["new"]
        file.write("ine\n" + line(4, "last"))
    log.rename(tmp_path / "a.log.1")
    log.write_text(line(5, "rotated"))
    assert [each.text.split()[-1] for each in follower.poll()] == ["line", "last", "rotated"]


def test_a_log_that_appears_is_followed_from_its_beginning(tmp_path: Path) -> None:
    follower = Follower({"a": tmp_path / "a.log"})
    follower.update({"a": tmp_path / "a.log", "b": tmp_path / "b.log"})
    assert follower.poll() == []
    (tmp_path / "b.log").write_text(line(1, "first"))
    assert [(each.source, each.text.split()[-1]) for each in follower.poll()] == [("b", "first")]


def test_lines_of_json_are_merged_by_time_too(tmp_path: Path) -> None:
    first, second = tmp_path / "a.log", tmp_path / "b.log"
    first.write_text(json_line(1, "one") + json_line(4, "four"))
    second.write_text(json_line(2, "two") + json_line(3, "three"))
    lines = last_lines({"a": first, "b": second}, 3)
    assert [json.loads(each.text)["message"] for each in lines] == ["two", "three", "four"]


def json_line(second: int, text: str) -> str:
    record = logging.makeLogRecord({"msg": text, "created": 1_700_000_000.0 + second})
    return f"{JsonFormatter('worker-0').format(record)}\n"
