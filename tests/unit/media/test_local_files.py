"""file: URLs: only regular files inside the configured directories, wherever links lead."""

import os
from pathlib import Path

import pytest

from baton.errors import ConfigError
from baton.media.local_files import LocalFiles
from baton.media.policy import Refused


@pytest.fixture
def allowed(tmp_path: Path) -> Path:
    directory = tmp_path / "allowed"
    (directory / "sub").mkdir(parents=True)
    (directory / "a.png").write_bytes(b"inside")
    (directory / "sub" / "with space.png").write_bytes(b"below")
    (tmp_path / "secret").write_bytes(b"secret")
    (tmp_path / "allowed-not").mkdir()
    (tmp_path / "allowed-not" / "a.png").write_bytes(b"secret")
    return directory


def read(directory: Path, url: str, limit: int = 100) -> bytes:
    return LocalFiles(str(directory)).read(url, limit)


def test_files_inside_are_read(allowed: Path) -> None:
    assert read(allowed, f"file://{allowed}/a.png") == b"inside"
    assert read(allowed, f"FILE://localhost{allowed}/a.png") == b"inside"
    assert read(allowed, f"file:{allowed}/a.png") == b"inside"
    assert read(allowed, f"file://{allowed}/sub/with%20space.png") == b"below"
    assert read(allowed, f"file://{allowed}/sub/../a.png") == b"inside"


def test_links_that_stay_inside_are_followed(allowed: Path) -> None:
    (allowed / "link.png").symlink_to("sub/with space.png")
    (allowed.parent / "other-name").symlink_to(allowed)
    assert read(allowed, f"file://{allowed}/link.png") == b"below"
    assert read(allowed.parent / "other-name", f"file://{allowed.parent}/other-name/a.png") == b"inside"


def test_nothing_outside_is_read_by_any_path(allowed: Path) -> None:
    (allowed / "link").symlink_to(allowed.parent / "secret")
    (allowed / "up").symlink_to("..")
    for path in (
        f"{allowed.parent}/secret",
        f"{allowed}/../secret",
        f"{allowed}/%2e%2e/secret",
        f"{allowed}/..%2fsecret",
        f"{allowed}/link",
        f"{allowed}/up/secret",
        f"{allowed}-not/a.png",
        f"{allowed}/missing",
        "/etc/passwd",
        "/proc/self/environ",
        f"/proc/self/cwd{allowed}/../secret",
        f"{allowed}/a.png%00.txt",
    ):
        with pytest.raises(Refused, match="there is no such file"):
            read(allowed, f"file://{path}")


def test_only_regular_files_are_read(allowed: Path) -> None:
    os.mkfifo(allowed / "pipe")
    for name in ("sub", "pipe"):
        with pytest.raises(Refused, match="not a regular file"):
            read(allowed, f"file://{allowed}/{name}")


def test_limits_and_permissions(allowed: Path) -> None:
    with pytest.raises(Refused, match="larger than the limit of 5 bytes"):
        read(allowed, f"file://{allowed}/a.png", limit=5)
    with (allowed / "sparse.png").open("wb") as file:
        file.truncate(10**12)
    with pytest.raises(Refused, match="larger than the limit"):
        read(allowed, f"file://{allowed}/sparse.png")


@pytest.mark.parametrize(
    ("url", "reason"),
    [
        ("file://host/a.png", "no host"),
        ("file:a.png", "absolute path"),
        ("file:///a.png?x=1", "no query"),
        ("file:///a.png#x", "no query"),
    ],
)
def test_other_forms_of_file_urls_are_refused(allowed: Path, url: str, reason: str) -> None:
    with pytest.raises(Refused, match=reason):
        read(allowed, url)


def test_without_directories_no_file_is_read(allowed: Path) -> None:
    with pytest.raises(Refused, match="not enabled"):
        LocalFiles("").read(f"file://{allowed}/a.png", 100)


@pytest.mark.parametrize("directories", ["relative", "/does/not/exist"])
def test_directories_are_checked_at_the_start(directories: str) -> None:
    with pytest.raises(ConfigError, match="--media-local-dirs"):
        LocalFiles(directories)
