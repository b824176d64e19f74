"""The results of a run: a description of the machine and one record per measured cell."""

import hashlib
import os
import platform
import shlex
import subprocess
import sys
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Literal

import msgspec
import psutil

import baton
from bench.load import LoadResult

Kind = Literal["stream", "undisturbed", "stalled", "idle"]
PACKAGES = ("baton-serve", "ai-dynamo-runtime", "uvloop", "msgspec", "fastapi", "uvicorn", "httptools")


class Usage(msgspec.Struct, frozen=True):
    """CPU seconds and resident bytes of a system, by role (worker, frontend, other)."""

    cpu_s: dict[str, float]
    rss_bytes: dict[str, int]


class Cell(msgspec.Struct, frozen=True, kw_only=True):
    """One measurement of one system.

    `stream` cells are the matrix. `undisturbed` and `stalled` are the same load without and with one more
    client that never reads. `idle` keeps slow streams open and measures memory only.
    """

    kind: Kind
    system: str
    pace_ms: float
    streams: int
    tokens_per_request: int
    repeat: int
    load: LoadResult
    cpu_s: dict[str, float]
    rss_start_bytes: dict[str, int]
    """Resident memory after the first request."""
    rss_open_bytes: dict[str, int]
    """Resident memory while every stream of this cell was open."""
    foreign_cores: float
    """Cores kept busy by processes other than this system and the load generator."""

    @property
    def valid(self) -> bool:
        load = self.load
        if self.kind == "idle":
            return not load.errors
        return not load.errors and load.requests > 0 and load.tokens == load.requests * self.tokens_per_request


class Machine(msgspec.Struct, frozen=True, kw_only=True):
    cores: int
    cpu: str
    memory_bytes: int
    system: str
    python: str
    versions: dict[str, str]


class Results(msgspec.Struct, frozen=True, kw_only=True):
    date: str
    commit: str
    command: str
    source_changed: bool
    """Whether Baton's source files changed during the run, in which processes are started repeatedly."""
    machine: Machine
    cells: list[Cell]


def describe_run(cells: list[Cell], *, source_changed: bool, module: str = "bench.path") -> Results:
    return Results(
        date=datetime.now(UTC).isoformat(timespec="seconds"),
        commit=git_commit(),
        command=shlex.join(["python", "-m", module, *sys.argv[1:]]),
        source_changed=source_changed,
        machine=describe_machine(),
        cells=cells,
    )


def describe_machine() -> Machine:
    return Machine(
        cores=len(os.sched_getaffinity(0)),
        cpu=cpu_model(),
        memory_bytes=psutil.virtual_memory().total,
        system=platform.platform(),
        python=platform.python_version(),
        versions={name: version for name in PACKAGES if (version := package_version(name))},
    )


def cpu_model() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.processor()


def source_digest() -> str:
    """A digest of every Python file of the package, in a fixed order."""
    digest = hashlib.sha256()
    for file in sorted(Path(baton.__file__).parent.rglob("*.py")):
        digest.update(str(file).encode() + file.read_bytes())
    return digest.hexdigest()


def package_version(name: str) -> str:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return ""


def git_commit() -> str:
    """The commit of the working tree, with `+changes` if files differ from it; '' outside git."""
    here = Path(__file__).parent
    try:
        return subprocess.run(
            ["git", "describe", "--always", "--dirty=+changes", "--exclude=*"],
            cwd=here,
            capture_output=True,
            text=True,
            timeout=10,
            check=True,
        ).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return ""
