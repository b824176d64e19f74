"""Logs of the last run are kept beside those of the current one, under names that say so."""

import os
import socket
import stat
from pathlib import Path

import pytest

from baton.config.directories import supervisor_directory
from baton.config.settings import Settings
from baton.control.process_entries import published_entry
from baton.errors import ConfigError
from baton.topology.ended_runs import MAX_ADDRESSES, remove_old_logs
from baton.topology.process_logs import begin_log, begin_run


def settings(directory: Path, port: int = 8000) -> Settings:
    return Settings(port=port, log_dir=str(directory))


def run(directory: Path, *processes: str, port: int = 8000) -> None:
    """Begin a run that has these processes."""
    begin_run(settings(directory, port))
    for process in processes:
        begin_log(settings(directory, port), process).close()


def names(directory: Path) -> set[str]:
    return {path.name for path in directory.iterdir()}


def test_the_logs_of_the_last_run_are_kept_apart_from_rotated_ones(tmp_path: Path) -> None:
    log = tmp_path / "127.0.0.1-8000-worker-0.log"
    run(tmp_path, "worker-0")
    log.write_text("last run")
    log.chmod(0o644)
    log.with_name(f"{log.name}.1").write_text("last run, before")
    run(tmp_path, "worker-0")
    assert log.read_text() == ""
    kept = log.with_name(f"{log.name}.previous")
    assert (kept.read_text(), stat.S_IMODE(kept.stat().st_mode)) == ("last run", 0o600)
    assert log.with_name(f"{log.name}.1.previous").read_text() == "last run, before"
    assert not log.with_name(f"{log.name}.1").exists()
    run(tmp_path, "worker-0")
    assert names(tmp_path) == {log.name, kept.name}, "one run is kept"


def test_logs_of_processes_that_a_run_does_not_have_are_moved_too(tmp_path: Path) -> None:
    run(tmp_path, "worker-0", port=9000)
    run(tmp_path, "prefill-0", "decode-0")
    (tmp_path / "127.0.0.1-8000-notes.txt").touch()
    run(tmp_path, "worker-0")
    assert names(tmp_path) == {
        "127.0.0.1-9000-worker-0.log",
        "127.0.0.1-8000-worker-0.log",
        "127.0.0.1-8000-prefill-0.log.previous",
        "127.0.0.1-8000-decode-0.log.previous",
        "127.0.0.1-8000-notes.txt",
    }


def test_a_run_that_has_left_no_log_keeps_those_of_the_run_before(tmp_path: Path) -> None:
    run(tmp_path, "worker-0")
    run(tmp_path)
    run(tmp_path)
    assert names(tmp_path) == {"127.0.0.1-8000-worker-0.log.previous"}


def test_a_log_that_is_a_link_is_refused(tmp_path: Path) -> None:
    target = tmp_path / "target"
    target.write_text("of another")
    (tmp_path / "127.0.0.1-8000-worker-0.log").symlink_to(target)
    with pytest.raises(ConfigError, match="--log-dir"):
        run(tmp_path, "worker-0")
    assert target.read_text() == "of another"


def leave_logs(directory: Path, ports: range) -> None:
    """Leave the logs of runs on `ports`, of which each was a second later than the one before."""
    directory.mkdir(parents=True, exist_ok=True)
    for port in ports:
        for ending in ("worker-0.log", "worker-0.log.1", "frontend.log.previous", "frontend.log.1.previous"):
            path = directory / f"127.0.0.1-{port}-{ending}"
            path.touch()
            os.utime(path, (port, port))


def ports_of(directory: Path) -> set[int]:
    return {int(name.split("-")[1]) for name in names(directory)}


def test_the_logs_of_a_bounded_number_of_addresses_are_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    directory = tmp_path / "baton" / "logs"
    leave_logs(directory, range(9000, 9000 + MAX_ADDRESSES + 5))
    with socket.socket(socket.AF_UNIX) as control:
        control.bind(str(tmp_path / "control.sock"))
        control.listen()
        with published_entry(supervisor_directory(), "http://[::1]:9000", f"unix:{tmp_path / 'control.sock'}"):
            begin_run(Settings(port=9001))
    assert ports_of(directory) == {9000, 9001, *range(9005, 9005 + MAX_ADDRESSES)}, "also those that serve"


def test_logs_of_runs_that_serve_and_files_of_others_stay(tmp_path: Path) -> None:
    leave_logs(tmp_path, range(9000, 9000 + MAX_ADDRESSES + 2))
    others = {"notes.log", "access.log.2", "127.0.0.1-9000-worker-0.logs"}
    for name in others:
        (tmp_path / name).touch()
    remove_old_logs(tmp_path, {9000})
    kept = names(tmp_path)
    assert others <= kept
    assert "127.0.0.1-9000-worker-0.log" in kept
    assert "127.0.0.1-9001-worker-0.log" not in kept


def test_a_directory_that_was_chosen_is_not_cleaned(tmp_path: Path) -> None:
    ports = range(9000, 9000 + MAX_ADDRESSES + 5)
    leave_logs(tmp_path, ports)
    run(tmp_path)
    assert ports_of(tmp_path) == set(ports)
