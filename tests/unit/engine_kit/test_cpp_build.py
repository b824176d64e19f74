"""Compiled libraries are loaded only from files that no other user can have written."""

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from baton.engine_kit.cpp_build import BuildError, find_compiler, load_library

pytestmark = pytest.mark.process

ANOTHER_USER = 54321
IS_ROOT = os.geteuid() == 0


@pytest.fixture
def source(tmp_path: Path) -> Path:
    path = tmp_path / "one.cpp"
    path.write_text('extern "C" __attribute__((visibility("default"))) int one() { return 1; }')
    return path


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The directory of compiled libraries, which does not exist yet."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "baton" / "native"


def test_a_library_is_compiled_into_a_private_directory(source: Path, cache: Path) -> None:
    assert load_library([source], ()).one() == 1
    assert cache.stat().st_mode & 0o777 == 0o700


def test_the_supervisor_is_shown_what_takes_so_long(
    source: Path, cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as supervisor:
        supervisor.bind(str(tmp_path / "notify"))
        supervisor.settimeout(10)
        monkeypatch.setenv("NOTIFY_SOCKET", str(tmp_path / "notify"))
        load_library([source], ())
        assert supervisor.recv(1000).startswith(b"STATUS=compiling one.cpp with ")
        assert supervisor.recv(1000) == b"STATUS="


def test_a_compiler_of_the_system_is_preferred_to_one_from_pip(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    compiler = tmp_path / "clang++"
    compiler.touch(mode=0o700)
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert find_compiler() == [str(compiler)]
    compiler.unlink()
    assert find_compiler() == [sys.executable, "-m", "ziglang", "c++"]
    monkeypatch.setenv("CXX", "g++")
    with pytest.raises(BuildError, match=r"g\+\+ not found.*pip install ziglang"):
        find_compiler()


def test_without_any_compiler_it_says_which_to_install(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(sys, "path", [])
    with pytest.raises(BuildError, match=r"g\+\+, c\+\+ or clang\+\+ not found.*apt install g\+\+"):
        find_compiler()


def test_a_directory_that_others_can_write_to_is_refused(source: Path, cache: Path) -> None:
    cache.mkdir(parents=True)
    cache.chmod(0o777)
    with pytest.raises(BuildError, match="chmod go-w"):
        load_library([source], ())
    assert not list(cache.iterdir())


# Compiles once all processes are about to: those that do not wait for it would compile too.
COMPILER = """#!/bin/sh
case "$*" in
*--version) echo "$$" >> {0}/asked ;;
*)  echo "$$" >> {0}/compiled
    for turn in $(seq 600); do [ "$(wc -l < {0}/asked)" -lt 3 ] && sleep 0.1; done ;;
esac
exec g++ "$@"
"""
LOADS = "import sys; from pathlib import Path; from baton.engine_kit.cpp_build import load_library as load; "


def test_of_several_processes_one_compiles(source: Path, cache: Path, tmp_path: Path) -> None:
    compiler = tmp_path / "compiler"
    compiler.write_text(COMPILER.format(tmp_path))
    compiler.chmod(0o700)
    command = [sys.executable, "-c", LOADS + "assert load([Path(sys.argv[1])], ()).one() == 1", str(source)]
    loading = [subprocess.Popen(command, env={**os.environ, "CXX": str(compiler)}) for _ in range(3)]
    assert [each.wait(60) for each in loading] == [0, 0, 0]
    assert len((tmp_path / "compiled").read_text().splitlines()) == 1


@pytest.mark.skipif(not IS_ROOT, reason="only root can give files away")
def test_a_directory_of_another_user_is_refused(source: Path, cache: Path) -> None:
    cache.mkdir(parents=True)
    os.chown(cache, ANOTHER_USER, ANOTHER_USER)
    with pytest.raises(BuildError, match="belongs to another user"):
        load_library([source], ())


@pytest.mark.parametrize("mode", [0o600, 0o660, 0o606])
def test_a_library_that_others_can_write_to_is_compiled_again(
    source: Path, cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mode: int
) -> None:
    load_library([source], ())
    other = tmp_path / "other" / "baton" / "native"
    other.mkdir(parents=True, mode=0o700)
    planted = other / next(cache.iterdir()).name
    planted.write_bytes(b"not a library")
    planted.chmod(mode)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "other"))
    if mode == 0o600:
        with pytest.raises(BuildError):
            load_library([source], ())
    else:
        assert load_library([source], ()).one() == 1
        assert planted.stat().st_mode & 0o777 == 0o600


WITHOUT_HOME = f"""
import os, sys
from pathlib import Path
from baton.engine_kit.cpp_build import BuildError, load_library
os.environ.pop("HOME"), os.environ.pop("XDG_CACHE_HOME", None)
os.setuid({ANOTHER_USER})
try:
    load_library([Path(sys.argv[1])], ())
except BuildError as error:
    print(error)
"""


@pytest.mark.skipif(not IS_ROOT, reason="only root can become a user without a home")
def test_a_user_without_a_home_directory_gets_no_library(source: Path) -> None:
    done = subprocess.run([sys.executable, "-c", WITHOUT_HOME, str(source)], capture_output=True, text=True, check=True)
    assert "XDG_CACHE_HOME" in done.stdout, done.stderr
