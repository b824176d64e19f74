"""Generated control tokens: where they are, who can read them, and to whom they are sent."""

import stat
from pathlib import Path

import pytest

from baton.control.http.token_file import find_token, generate_token, published_token


def test_a_published_token_is_private_and_lasts_as_long_as_its_server(tmp_path: Path) -> None:
    directory = tmp_path / "control"
    with published_token(directory, "127.0.0.1", 9090, "s3cret"):
        [file] = directory.iterdir()
        assert file.name == "127.0.0.1-9090"
        assert file.read_text() == "s3cret"
        assert [stat.S_IMODE(path.stat().st_mode) for path in (directory, file)] == [0o700, 0o600]
        assert find_token(directory, "127.0.0.1", 9090) == "s3cret"
        assert find_token(directory, "127.0.0.1", 9091) is None
        assert find_token(directory, "127.0.0.2", 9090) is None
    assert not list(directory.iterdir())
    assert find_token(directory, "127.0.0.1", 9090) is None


def test_a_token_that_a_killed_worker_has_left_is_replaced(tmp_path: Path) -> None:
    (tmp_path / "127.0.0.1-9090").write_text("old")
    tmp_path.chmod(0o700)
    with published_token(tmp_path, "127.0.0.1", 9090, "new"):
        assert find_token(tmp_path, "127.0.0.1", 9090) == "new"


def test_a_token_is_sent_to_loopback_only(tmp_path: Path) -> None:
    with published_token(tmp_path / "control", "0.0.0.0", 9090, "s3cret"):
        assert find_token(tmp_path / "control", "127.0.0.1", 9090) == "s3cret"
        for host in ("192.0.2.1", "0.0.0.0", "no such host"):
            assert find_token(tmp_path / "control", host, 9090) is None


@pytest.mark.parametrize("mode", [0o770, 0o777])
def test_a_directory_that_others_can_write_to_is_not_used(
    tmp_path: Path, mode: int, caplog: pytest.LogCaptureFixture
) -> None:
    directory = tmp_path / "control"
    directory.mkdir()
    directory.chmod(mode)
    (directory / "127.0.0.1-9091").write_text("of another user")
    assert find_token(directory, "127.0.0.1", 9091) is None
    with published_token(directory, "127.0.0.1", 9090, "s3cret"):
        assert not (directory / "127.0.0.1-9090").exists()
    assert "chmod go-w" in caplog.text
    assert "s3cret" not in caplog.text


def test_tokens_are_different() -> None:
    assert len({generate_token() for _ in range(100)}) == 100
