"""The targets that Prometheus gets: the processes of one `baton serve`, also those that were killed."""

import subprocess
import sys
from pathlib import Path

import msgspec
import pytest

from baton.config.settings import Settings
from baton.control.process_entries import ProcessEntry, published_entry, read_all_entries, read_entries
from baton.edge.own_routes import Target
from baton.process.metrics_targets import deployment_targets


@pytest.fixture
def directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("SUPERVISED_PROCESS_NAME", "8000/frontend")
    return tmp_path / "baton" / "processes"


def leave(directory: Path, like: ProcessEntry, **changes: object) -> ProcessEntry:
    """Leave the entry of a process that was killed."""
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait(10)
    entry = msgspec.structs.replace(like, pid=ended.pid, **changes)
    (directory / f"{ended.pid}.json").write_bytes(msgspec.json.encode(entry))
    return entry


def test_the_frontend_and_the_processes_of_its_deployment_are_listed(directory: Path) -> None:
    with published_entry(directory, "8000/worker-0", "http://127.0.0.1:9090"):
        found = deployment_targets(Settings(host="0.0.0.0", port=8000))()
    assert found == [
        Target(("127.0.0.1:8000",), {"process": "frontend", "__scheme__": "http"}),
        Target(("127.0.0.1:9090",), {"process": "worker-0", "__scheme__": "http"}),
    ]


def test_processes_of_other_deployments_are_not_listed(directory: Path) -> None:
    with published_entry(directory, "80001/worker-0", "http://127.0.0.1:9090"):
        assert len(deployment_targets(Settings(port=8000))()) == 1


def test_a_frontend_alone_lists_itself(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SUPERVISED_PROCESS_NAME")
    with published_entry(directory, "worker-4711", "http://127.0.0.1:9090"):
        [only] = deployment_targets(Settings(host="::", port=8000, tls_certificate="some.pem"))()
    assert only == Target(("[::1]:8000",), {"process": "frontend", "__scheme__": "https"})


@pytest.mark.process
def test_a_killed_process_is_listed_until_another_has_its_name(directory: Path) -> None:
    with published_entry(directory, "8000/worker-1", "http://127.0.0.1:2"):
        [running] = read_entries(directory)
        killed = leave(directory, running, name="8000/worker-0", url="http://127.0.0.1:1")
        assert read_all_entries(directory) == [killed, running]
        leave(directory, running, name="8000/worker-1", url="http://127.0.0.1:3")
        assert read_all_entries(directory) == [killed, running]
