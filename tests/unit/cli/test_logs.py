"""`baton logs` finds the logs of a `baton serve` that has ended, also while another one runs."""

import os
import socket
from pathlib import Path

import pytest
from click.testing import CliRunner

from baton.cli.logs import logs
from baton.config.directories import supervisor_directory
from baton.control.process_entries import published_entry
from baton.topology.log_file import log_name

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
@pytest.mark.parametrize("host", ["0.0.0.0", "192.0.2.1"])
@pytest.mark.parametrize("arguments", [[], ["--port", "9000"]])
def test_of_two_addresses_with_one_port_the_last_that_wrote_is_shown(
    tmp_path: Path, host: str, arguments: list[str]
) -> None:
    older = tmp_path / "baton" / "logs" / f"{host}-9000-worker-0.log"
    older.write_text(LINE.replace("crashed", "older"))
    older.with_name(f"{host}-9000-worker-1.log").write_text(LINE.replace("crashed", "older"))
    for each in older.parent.glob(f"{host}-*"):
        os.utime(each, (1, 1))
    assert CliRunner().invoke(logs, arguments, catch_exceptions=False).output == LINE


@pytest.mark.usefixtures("ended_on_9000")
def test_the_last_logs_are_shown_when_none_runs() -> None:
    assert CliRunner().invoke(logs, ["worker"], catch_exceptions=False).output.endswith(LINE)
    assert CliRunner().invoke(logs, ["decode"]).exit_code == 2


def test_the_logs_of_a_host_with_a_number_in_its_name_are_found(tmp_path: Path) -> None:
    (tmp_path / log_name("gpu-3-a", 8000, "decode-0")).write_text(LINE)
    arguments = ["decode", "--port", "8000", "--log-dir", str(tmp_path)]
    assert CliRunner().invoke(logs, arguments, catch_exceptions=False).output == LINE
