"""Which processes the views find on this machine, and with which token."""

from pathlib import Path

import pytest

from baton.control.http.token_file import published_token
from baton.control.process_entries import published_entry
from baton.views.deployment import find_local_processes


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path / "baton"


def test_a_process_is_found_with_its_generated_token(cache: Path) -> None:
    with (
        published_entry(cache / "processes", "8000/decode-0", "http://127.0.0.1:9191", discovery="/a"),
        published_token(cache / "control", "127.0.0.1", 9191, "generated"),
    ):
        [found] = find_local_processes()
        assert (found.name, found.deployment, found.url) == ("8000/decode-0", "8000", "http://127.0.0.1:9191")
        assert found.token == "generated"
        assert find_local_processes("8001") == []
        assert find_local_processes("8001", discovery="/b") == []
        assert find_local_processes("8001", discovery="/a") == [found], "a worker that was added to a deployment"
        assert find_local_processes("8000") == [found]
    assert find_local_processes() == []


def test_a_process_with_a_token_of_its_own_gets_the_given_one(cache: Path) -> None:
    with published_entry(cache / "processes", "8000/frontend", "http://127.0.0.1:8000", is_frontend=True):
        assert [found.token for found in find_local_processes(token="given")] == ["given"]
        assert [found.token for found in find_local_processes()] == [None]
