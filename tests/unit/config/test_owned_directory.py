"""The directory of a process: removed at its end, and by the next process if it was killed."""

import fcntl
import os
import tempfile
import time
from pathlib import Path

import pytest

from baton.config.owned_directory import LOCK_NAME, PREFIX, YOUNG_S, owned_directory
from baton.errors import ConfigError


@pytest.fixture(autouse=True)
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return tmp_path


def leave(path: Path, age_s: float = 2 * YOUNG_S) -> Path:
    """Make a directory as a process leaves it that is killed, `age_s` after it began."""
    (path / "discovery").mkdir(parents=True)
    (path / LOCK_NAME).touch()
    began = time.time() - age_s
    os.utime(path / LOCK_NAME, (began, began))
    return path


def test_the_directory_is_private_and_removed_at_the_end() -> None:
    with owned_directory() as path:
        assert path.stat().st_mode & 0o077 == 0
        (path / "control.sock").touch()
    assert not path.exists()


def test_a_process_removes_what_a_killed_one_has_left(temporary: Path) -> None:
    left = [leave(temporary / f"{PREFIX}{name}") for name in ("left", "sglang-left")]
    with owned_directory("sglang") as path:
        assert not any(each.exists() for each in left)
        assert path.name.startswith("baton-sglang-")
        assert path.exists()


def test_a_process_keeps_the_directory_of_another_that_lives() -> None:
    with owned_directory() as first:
        with owned_directory() as second:
            assert first != second
            assert first.exists()
        assert first.exists()


def test_a_process_keeps_a_directory_whose_lock_may_be_about_to_be_taken(temporary: Path) -> None:
    young = leave(temporary / f"{PREFIX}young", 0.0)
    with owned_directory():
        assert young.exists()


def test_a_process_keeps_what_none_has_made(temporary: Path) -> None:
    other, real = temporary / f"{PREFIX}other", leave(temporary / "real")
    other.mkdir()
    link = temporary / f"{PREFIX}link"
    link.symlink_to(real)
    with owned_directory():
        assert other.exists()
        assert (real / LOCK_NAME).exists()
        assert link.is_symlink()


def test_a_held_lock_protects_a_directory(temporary: Path) -> None:
    held = leave(temporary / f"{PREFIX}held")
    with (held / LOCK_NAME).open() as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with owned_directory():
            assert held.exists()
    with owned_directory():
        assert not held.exists()


def test_no_space_is_a_configuration_error_and_an_error_within_is_not(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(OSError, match="of the caller"), owned_directory():
        raise OSError("of the caller")
    monkeypatch.setattr(tempfile, "tempdir", "/nowhere")
    with pytest.raises(ConfigError, match="set TMPDIR"), owned_directory():
        pass
