"""`baton logs` finds the logs of a `baton serve` that has ended, also while another one runs."""

import socket
from pathlib import Path

import pytest
from click.testing import CliRunner

from baton.cli.logs import logs
from baton.config.directories import supervisor_directory
from baton.control.process_entries import published_entry

LINE = "2026-01-31 10:00:00,000 INFO x crashed\n"


@pytest.fixture
def ended_on_9000(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A `baton serve` on port 9000 that has left a log."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    directory = tmp_path / "baton" / "logs"
    directory.mkdir(parents=True)
    (directory / "127.0.0.1-9000-worker-0.log").write_text(LINE)


@pytest.mark.usefixtures("ended_on_9000")
def test_the_port_of_one_that_has_ended_selects_its_logs_while_another_runs(tmp_path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as control:
        control.bind(str(tmp_path / "control.sock"))
        control.listen()
        url = f"unix:{tmp_path / 'control.sock'}"
        with published_entry(supervisor_directory(), "http://127.0.0.1:8000", url):
            done = CliRunner().invoke(logs, ["--port", "9000"], catch_exceptions=False)
    assert (done.exit_code, done.output) == (0, LINE)


@pytest.mark.usefixtures("ended_on_9000")
def test_the_last_logs_are_shown_when_none_runs() -> None:
    assert CliRunner().invoke(logs, ["worker"], catch_exceptions=False).output.endswith(LINE)
    assert CliRunner().invoke(logs, ["decode"]).exit_code == 2
