"""Compiles C++ for this CPU, once, into the user's cache directory.

A library is named by a hash of its sources, compiler, flags and CPU: when one of them changes, it is compiled again.
The directory must belong to the user, or root, and be writable by nobody else.
"""

import ctypes
import fcntl
import functools
import hashlib
import importlib.util
import logging
import os
import platform
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from baton.config.directories import native_directory
from baton.config.environment import compiler
from baton.config.private_files import PRIVATE_FILE, make_private_directory, refuse_shared
from baton.errors import ConfigError
from baton.status.progress_line import show_status

log = logging.getLogger(__name__)

# Zig first compiles the C++ library, which takes a minute.
COMPILE_TIMEOUT_S = 300.0
LOCK_INTERVAL_S = 0.05
FLAGS = ("-std=c++17", "-fvisibility=hidden", "-fPIC", "-shared")
TARGETS = {"x86_64": "-march=native", "aarch64": "-mcpu=native"}
CPU_FIELDS = ("vendor_id", "cpu family", "model", "flags", "CPU implementer", "CPU part", "CPU variant", "Features")


class BuildError(Exception):
    """The library cannot be compiled or loaded."""


def load_library(sources: Sequence[Path], flags: tuple[str, ...]) -> ctypes.CDLL:
    """Return the library compiled from the first of `sources`, which may include the others. Raises BuildError.

    CXX and CXXFLAGS are respected. May be called from several threads and processes at once: one compiles, all wait.
    Blocks for seconds when it compiles, with Zig for a minute the first time.
    """
    try:
        return _load(tuple(sources), flags, *compiler(), native_directory())
    except (OSError, ValueError, subprocess.SubprocessError, ConfigError) as error:
        raise BuildError(str(error)) from error


def find_compiler() -> list[str]:
    """Return the command of the C++ compiler. Raises BuildError if there is none."""
    named, _, search = compiler()
    return _compiler(named, search)


def cpu_features() -> str:
    """Return the lines of /proc/cpuinfo that identify the instruction set of this CPU."""
    first = Path("/proc/cpuinfo").read_text().partition("\n\n")[0]
    return "\n".join(line for line in first.splitlines() if line.partition(":")[0].strip() in CPU_FIELDS)


@functools.cache
def _load(
    sources: tuple[Path, ...], flags: tuple[str, ...], named: str, more: str, search: str, cache: Path
) -> ctypes.CDLL:
    if sys.platform != "linux" or platform.machine() not in TARGETS:
        raise BuildError(f"{sys.platform} on {platform.machine()} is not supported")
    command = [*_compiler(named, search), *FLAGS, *flags, TARGETS[platform.machine()], *shlex.split(more)]
    return ctypes.CDLL(str(_built(sources, command, cache)))


def _compiler(named: str, search: str) -> list[str]:
    for command in [shlex.split(named)] if named else [["g++"], ["c++"], ["clang++"]]:
        if found := shutil.which(command[0], path=search):
            return [found, *command[1:]]
    if not named and importlib.util.find_spec("ziglang") is not None:  # a compiler that pip installs
        return [sys.executable, "-m", "ziglang", "c++"]
    missing = named or "g++, c++ or clang++"
    raise BuildError(
        f"no C++ compiler: {missing} not found; install one, as with `apt install g++` or `pip install ziglang`"
    )


def _is_zig(command: list[str]) -> bool:
    return command[1:3] == ["-m", "ziglang"]


def _name(command: list[str]) -> str:
    return "Zig" if _is_zig(command) else command[0]


def _built(sources: tuple[Path, ...], command: list[str], cache: Path) -> Path:
    """Return the path of the library; compile it if it is not in the cache, or if another user can have written it.

    Raises OSError for a directory that another user can write to: to load a library is to run it.
    """
    version = subprocess.run([*command, "--version"], capture_output=True, timeout=COMPILE_TIMEOUT_S, check=False)
    parts = [*(source.read_bytes() for source in sources), version.stdout]
    parts += [" ".join(command).encode(), cpu_features().encode()]
    digest = hashlib.sha256(b"".join(hashlib.sha256(part).digest() for part in parts)).hexdigest()[:32]
    library = cache / f"{digest}.so"
    make_private_directory(cache)
    if not _is_trusted(library):
        with _locked(cache):
            if not _is_trusted(library):
                _compile_into(library, sources[0], command)
    return library


def _compile_into(library: Path, source: Path, command: list[str]) -> None:
    hint = ": a minute, the first time" if _is_zig(command) else ""
    doing = f"compiling {source.name} with {_name(command)}{hint}"
    log.info("%s", doing)
    show_status(doing)
    try:
        with tempfile.TemporaryDirectory(dir=library.parent, ignore_cleanup_errors=True) as scratch:
            fresh = Path(scratch) / library.name
            _compile([*command, str(source), "-o", str(fresh)], Path(scratch) / "messages")
            fresh.chmod(PRIVATE_FILE)
            os.replace(fresh, library)
    finally:
        show_status("")
    log.info("compiled %s into %s", source.name, library)


@contextmanager
def _locked(directory: Path) -> Iterator[None]:
    """Hold a lock that processes share; if none lets go of it within a compilation's time, go on without it."""
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        deadline = time.monotonic() + COMPILE_TIMEOUT_S
        while not _try_lock(descriptor) and time.monotonic() < deadline:
            time.sleep(LOCK_INTERVAL_S)
        yield
    finally:
        os.close(descriptor)


def _try_lock(descriptor: int) -> bool:
    """Return whether there is nothing to wait for."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as error:  # a file system without locks
        log.debug("%s", error)
    return True


def _is_trusted(library: Path) -> bool:
    try:
        refuse_shared(library)
    except OSError:
        return False
    return True


def _compile(command: list[str], messages: Path) -> None:
    # Messages go to a file: child processes of the compiler would keep a pipe open after the timeout.
    with messages.open("wb") as out:
        process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=out, stderr=out, start_new_session=True)
        try:
            status = process.wait(COMPILE_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            raise BuildError(f"{_name(command)} took longer than {COMPILE_TIMEOUT_S:.0f} s") from None
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
    if status:
        text = messages.read_text(errors="replace").strip()
        raise BuildError(
            f"{_name(command)} failed with status {status}: {text.splitlines()[0] if text else 'no message'}"
        )
