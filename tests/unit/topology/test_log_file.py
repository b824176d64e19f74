"""Logs of processes are private, bounded, kept for one more run, and read from their end."""

import os
import stat
from pathlib import Path

import pytest

from baton.topology.log_file import LogFile, log_name


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def test_a_log_is_readable_by_its_user_only(tmp_path: Path) -> None:
    path = tmp_path / "logs" / "a.log"
    log = LogFile(path, 10)
    log.begin()
    assert (mode(path.parent), mode(path)) == (0o700, 0o600)
    path.chmod(0o644)
    with log.open() as file:
        file.write(b"more than ten bytes")
    assert mode(path) == 0o600, "a file of an earlier version is closed to others"
    log.rotate()
    assert mode(log.previous) == 0o600


def test_a_log_that_is_a_link_is_refused(tmp_path: Path) -> None:
    target = tmp_path / "target"
    (tmp_path / "a.log").symlink_to(target)
    with pytest.raises(OSError):
        LogFile(tmp_path / "a.log", 10).open()
    assert not target.exists()


def test_a_log_that_is_too_long_is_moved_under_the_process_that_writes_it(tmp_path: Path) -> None:
    path = tmp_path / "a.log"
    log = LogFile(path, 10)
    with log.open() as process:
        for text in (b"0123456789", b"x", b"first", b"and more than ten"):
            process.write(text)
            process.flush()
            log.rotate()
        process.write(b"last")
        process.flush()
    assert log.previous.read_bytes() == b"firstand more than ten"
    assert path.read_bytes() == b"last"


def test_the_log_of_the_last_run_is_kept(tmp_path: Path) -> None:
    path = tmp_path / "a.log"
    path.write_text("last run")
    log = LogFile(path, 10)
    log.begin()
    assert (path.read_bytes(), log.previous.read_text()) == (b"", "last run")


@pytest.mark.parametrize(("content", "line"), [(b"", ""), (b"one\ntwo\n", "two"), (b"one\n\xff\n\n", "\ufffd")])
def test_the_last_line_is_found(content: bytes, line: str, tmp_path: Path) -> None:
    path = tmp_path / "a.log"
    path.write_bytes(content)
    assert LogFile(path, 10).last_line() == line


def test_the_last_line_of_a_log_larger_than_memory_is_found(tmp_path: Path) -> None:
    path = tmp_path / "a.log"
    with path.open("wb") as file:
        file.seek(1 << 40)
        file.write(b"\nthe end\n")
    assert LogFile(path, 10).last_line() == "the end"


def test_the_last_line_of_a_log_that_was_removed_is_empty(tmp_path: Path) -> None:
    assert LogFile(tmp_path / "a.log", 10).last_line() == ""
    assert not os.listdir(tmp_path)


def test_instances_on_one_port_and_different_hosts_have_logs_of_their_own() -> None:
    hosts = ("127.0.0.1", "127.0.0.2", "::1", "localhost")
    names = [log_name(host, 8000, "worker-0") for host in hosts]
    assert names[0] == "127.0.0.1-8000-worker-0.log"
    assert len(set(names)) == len(hosts)
    assert not any(character in name for name in names for character in "/:")
