"""Processes are found by name as long as they run."""

import subprocess
import sys
from pathlib import Path

import msgspec
import pytest

from baton.control.process_entries import ProcessEntry, published_entry, read_entries, remove_ended


def test_a_process_is_in_the_directory_as_long_as_it_runs(tmp_path: Path) -> None:
    directory = tmp_path / "processes"
    assert read_entries(directory) == []
    with published_entry(directory, "8000/worker-0", "http://127.0.0.1:9090"):
        [entry] = read_entries(directory)
        assert (entry.name, entry.short_name, entry.url) == ("8000/worker-0", "worker-0", "http://127.0.0.1:9090")
    assert read_entries(directory) == []
    assert not list(directory.iterdir())


@pytest.mark.process
def test_what_a_killed_process_has_left_stays_until_one_of_its_name_starts(tmp_path: Path) -> None:
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait(10)
    with published_entry(tmp_path, "mine", "http://127.0.0.1:1"):
        [entry] = read_entries(tmp_path)
        left = tmp_path / f"{ended.pid}.json"
        left.write_bytes(msgspec.json.encode(msgspec.structs.replace(entry, pid=ended.pid, name="left")))
        other = tmp_path / "other.json"
        other.write_bytes(msgspec.json.encode(msgspec.structs.replace(entry, host="elsewhere", pid=ended.pid)))
        (tmp_path / "broken.json").write_text("{")
        assert [found.name for found in read_entries(tmp_path)] == ["mine"]
        assert left.exists(), "monitoring reads it"
    with published_entry(tmp_path, "left", "http://127.0.0.1:1"):
        assert not left.exists()
    left.write_bytes(msgspec.json.encode(msgspec.structs.replace(entry, pid=ended.pid)))
    remove_ended(tmp_path)
    assert not left.exists()
    assert other.exists(), "it is of another machine with the same home directory"


def test_a_directory_that_others_can_write_to_is_not_trusted(tmp_path: Path) -> None:
    tmp_path.chmod(0o777)
    entry = ProcessEntry(name="evil", url="http://127.0.0.1:1", pid=1, host="x")
    (tmp_path / "1.json").write_bytes(msgspec.json.encode(entry))
    assert read_entries(tmp_path) == []
