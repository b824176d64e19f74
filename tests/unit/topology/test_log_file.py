"""Logs of processes are private, bounded, kept for one more run, and no reason to stop when the disk is full."""

import logging
import os
import stat
from pathlib import Path

import pytest

from baton.topology.log_file import LogFile, ProcessOutput, log_name

LINE = b"2026-03-01 11:59:59,001 INFO baton.request r-%d completed\n"


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def test_a_log_is_readable_by_its_user_only(tmp_path: Path) -> None:
    path = tmp_path / "logs" / "a.log"
    log = LogFile(path, 10)
    log.begin()
    assert (mode(path.parent), mode(path)) == (0o700, 0o600)
    log.write(b"more than ten bytes")
    assert mode(path) == mode(log.rotated) == 0o600


def test_a_log_that_is_a_link_is_refused(tmp_path: Path) -> None:
    target = tmp_path / "target"
    (tmp_path / "a.log").symlink_to(target)
    with pytest.raises(OSError):
        LogFile(tmp_path / "a.log", 10).begin()
    assert not target.exists()


def test_a_log_that_is_full_is_moved_and_nothing_is_lost(tmp_path: Path) -> None:
    path = tmp_path / "a.log"
    log = LogFile(path, 10)
    for text in (b"0123456789", b"first", b"12345", b"last"):
        log.write(text)
    assert log.rotated.read_bytes() == b"first12345"
    assert path.read_bytes() == b"last"


def test_a_process_that_is_added_again_goes_on_with_its_log(tmp_path: Path) -> None:
    path = tmp_path / "a.log"
    for text in (b"first", b"second"):
        log = LogFile(path, 10)
        log.begin()
        log.write(text)
        log.close()
    assert (log.rotated.read_bytes(), path.read_bytes()) == (b"first", b"second")


def written(output: ProcessOutput, *texts: bytes) -> None:
    """Write `texts` as a process does, and wait until they are in the log."""
    descriptor = output.open()
    for text in texts:
        os.write(descriptor, text)
    os.close(descriptor)
    output.join(10)


@pytest.mark.parametrize(
    ("texts", "line"),
    [((), ""), ((b"one\ntwo\n",), "two"), ((b"one\ntw", b"o"), "two"), ((LINE % 1,), "r-1 completed")],
)
def test_the_last_line_of_a_process_is_known(texts: tuple[bytes, ...], line: str, tmp_path: Path) -> None:
    output = ProcessOutput("one", LogFile(tmp_path / "a.log", 1000))
    written(output, *texts)
    assert output.last_line() == line


def test_everything_that_a_process_writes_is_in_its_log_in_order(tmp_path: Path) -> None:
    output = ProcessOutput("one", LogFile(tmp_path / "a.log", 1 << 20))
    written(
        output, b"".join(LINE % number for number in range(500)), b'{"level": "ERROR", "target": "t", "message": "m"}\n'
    )
    lines = (tmp_path / "a.log").read_bytes().splitlines(keepends=True)
    assert lines[:500] == [LINE % number for number in range(500)]
    assert lines[500].endswith(b" ERROR t m\n")


def test_a_log_on_a_full_disk_is_dropped_reported_once_and_counted(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    full = Path("/dev/full")
    if not full.exists():
        pytest.skip("no /dev/full")

    class Disk:
        """A log on a disk that is full until somebody frees space."""

        path = full

        def write(self, lines: bytes) -> None:
            with self.path.open("ab", buffering=0) as file:
                file.write(lines)

    disk = Disk()
    output = ProcessOutput("worker-0", disk)
    with caplog.at_level(logging.ERROR):
        written(output, LINE % 1, LINE % 2)
        written(output, LINE % 3)
    assert [record.getMessage() for record in caplog.records] == [
        "cannot write the log of worker-0 (No space left on device); its lines are dropped"
    ]
    disk.path = tmp_path / "a.log"
    written(output, LINE % 4)
    counted, last = disk.path.read_bytes().splitlines(keepends=True)
    assert counted.endswith(b"3 lines could not be written here\n")
    assert last == LINE % 4


def test_instances_on_one_port_and_different_hosts_have_logs_of_their_own() -> None:
    hosts = ("127.0.0.1", "127.0.0.2", "::1", "localhost")
    names = [log_name(host, 8000, "worker-0") for host in hosts]
    assert names[0] == "127.0.0.1-8000-worker-0.log"
    assert len(set(names)) == len(hosts)
    assert not any(character in name for name in names for character in "/:")
