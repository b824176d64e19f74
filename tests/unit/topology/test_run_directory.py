"""The directory of a run: removed at its end, and by the next run if its supervisor was killed."""

import fcntl
import tempfile
from pathlib import Path

import pytest

from baton.errors import ConfigError
from baton.topology.run_directory import LOCK_NAME, PREFIX, run_directory


@pytest.fixture(autouse=True)
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return tmp_path


def leave(path: Path) -> Path:
    """Make a directory as a killed supervisor leaves it."""
    (path / "discovery").mkdir(parents=True)
    (path / LOCK_NAME).touch()
    return path


def test_the_directory_is_private_and_removed_at_the_end() -> None:
    with run_directory() as path:
        assert path.stat().st_mode & 0o077 == 0
        (path / "control.sock").touch()
    assert not path.exists()


def test_a_run_removes_what_a_killed_one_has_left(temporary: Path) -> None:
    left = leave(temporary / f"{PREFIX}left")
    with run_directory() as path:
        assert not left.exists()
        assert path.exists()


def test_a_run_keeps_the_directory_of_another_that_goes_on() -> None:
    with run_directory() as first:
        with run_directory() as second:
            assert first != second
            assert first.exists()
        assert first.exists()


def test_a_run_keeps_what_no_run_has_made(temporary: Path) -> None:
    other, real = temporary / f"{PREFIX}other", leave(temporary / "real")
    other.mkdir()
    link = temporary / f"{PREFIX}link"
    link.symlink_to(real)
    with run_directory():
        assert other.exists()
        assert (real / LOCK_NAME).exists()
        assert link.is_symlink()


def test_a_held_lock_protects_a_directory(temporary: Path) -> None:
    held = leave(temporary / f"{PREFIX}held")
    with (held / LOCK_NAME).open() as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with run_directory():
            assert held.exists()
    with run_directory():
        assert not held.exists()


def test_no_space_is_a_configuration_error_and_an_error_of_the_run_is_not(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(OSError, match="of the run"), run_directory():
        raise OSError("of the run")
    monkeypatch.setattr(tempfile, "tempdir", "/nowhere")
    with pytest.raises(ConfigError, match="set TMPDIR"), run_directory():
        pass
