"""Units of systemd: valid, with settings that exist, and with commands that report their readiness and heartbeats."""

import configparser
import shlex
import signal
import socket
import subprocess
import time
from pathlib import Path

import pytest

from baton.config.load import options
from baton.config.settings import Settings
from tests.deploy.rendering import DEPLOY, run, tool
from tests.e2e.harness import BATON, START_S, STOP_S, environment, free_ports

pytestmark = [pytest.mark.deploy, pytest.mark.timeout(180)]

UNITS = sorted((DEPLOY / "systemd").iterdir())
INSTALLED = "/opt/baton/bin/baton"


def service_of(unit: Path) -> configparser.SectionProxy:
    parser = configparser.ConfigParser(interpolation=None, delimiters=("=",), strict=False)
    parser.optionxform = str  # type: ignore[assignment,method-assign]
    parser.read_string(unit.read_text())
    return parser["Service"]


def command_of(unit: Path, instance: str) -> list[str]:
    return shlex.split(service_of(unit)["ExecStart"].replace("%i", instance))


@pytest.mark.parametrize("unit", UNITS, ids=lambda unit: unit.name)
def test_units_are_valid(unit: Path, tmp_path: Path) -> None:
    installed = tmp_path / unit.name.replace("@", "@decode")
    installed.write_text(unit.read_text().replace(INSTALLED, BATON))
    run(tool("systemd-analyze", "Debian: systemd"), "verify", "--man=no", str(installed))


@pytest.mark.parametrize("unit", UNITS, ids=lambda unit: unit.name)
def test_commands_have_flags_that_exist(unit: Path) -> None:
    program, command, *words = command_of(unit, "decode")
    assert program == INSTALLED
    words = words[1:] if command == "router" else words
    known = {option.flag for option in options() if command in option.commands} | {"--config"}
    assert set(words[::2]) <= known


@pytest.mark.parametrize("unit", UNITS, ids=lambda unit: unit.name)
def test_a_process_has_time_to_drain(unit: Path) -> None:
    settings = Settings()
    assert float(service_of(unit)["TimeoutStopSec"]) >= settings.drain_timeout_s + settings.abort_timeout_s + 10


@pytest.mark.parametrize(
    ("name", "instance"), [("baton-worker@.service", "aggregated"), ("baton-frontend.service", "")]
)
@pytest.mark.e2e
@pytest.mark.slow
def test_a_unit_reports_readiness_and_heartbeats_and_stops(name: str, instance: str, tmp_path: Path) -> None:
    """Started as systemd does: with its socket, its interval of heartbeats and the unit's own command."""
    unit = DEPLOY / "systemd" / name
    service = service_of(unit)
    assert service["Type"] == "notify"
    port = free_ports(2)
    file = tmp_path / "settings.yaml"
    file.write_text(
        f"engine: echo\nport: {port}\nsystem_port: {port + 1}\nruntime: {{directory: {tmp_path}/discovery}}\n"
    )
    command = [word.replace("/etc/baton/settings.yaml", str(file)) for word in command_of(unit, instance)]
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as notified:
        notified.bind(str(tmp_path / "notify"))
        variables = {
            **environment(),
            "NOTIFY_SOCKET": str(tmp_path / "notify"),
            "WATCHDOG_USEC": str(int(float(service["WatchdogSec"]) * 1e6)),
        }
        with (tmp_path / "log").open("wb") as log:
            process = subprocess.Popen([BATON, *command[1:]], env=variables, stdout=log, stderr=log)
        try:
            wait_for(notified, b"READY=1")
            wait_for(notified, b"WATCHDOG=1")
            process.send_signal(signal.SIGTERM)
            assert process.wait(STOP_S) == 0, (tmp_path / "log").read_text()
        finally:
            process.kill()
            process.wait(10)


def wait_for(notified: socket.socket, message: bytes) -> None:
    """Read notifications until one has `message` in it."""
    end = time.monotonic() + 4 * START_S
    while True:
        notified.settimeout(max(0.1, end - time.monotonic()))
        if message in notified.recv(4096).split(b"\n"):
            return
