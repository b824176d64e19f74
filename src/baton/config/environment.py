"""Environment variables of the system and of other programs. Baton's own (`BATON_*`) are read by `load.py`."""

import os
from pathlib import Path

from baton.errors import ConfigError

SUPERVISOR_PID = "SUPERVISOR_PID"
PROCESS_NAME = "SUPERVISED_PROCESS_NAME"
PROCESS_RESTARTS = "SUPERVISED_PROCESS_RESTARTS"


def user_cache() -> Path:
    """Return the root of all of Baton's caches: $XDG_CACHE_HOME/baton, or ~/.cache/baton.

    Raises ConfigError if there is no home directory.
    """
    try:
        return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "baton"
    except RuntimeError:
        raise ConfigError("this user has no home directory: set XDG_CACHE_HOME to a directory for caches") from None


def notify_socket() -> str | None:
    """Return the address of the supervisor's notification socket, as systemd sets it."""
    return os.environ.get("NOTIFY_SOCKET") or None


def watchdog_s() -> float | None:
    """Return the interval within which the supervisor expects a watchdog message, as systemd sets it."""
    limit_us = os.environ.get("WATCHDOG_USEC")
    return int(limit_us) / 1e6 if limit_us else None


def supervisor_pid() -> int | None:
    """Return the process id of the `baton serve` that started this process."""
    pid = os.environ.get(SUPERVISOR_PID)
    return int(pid) if pid else None


def process_name() -> str | None:
    """Return the name that the `baton serve` that started this process has given it."""
    return os.environ.get(PROCESS_NAME) or None


def restarts() -> int:
    """Return how often the `baton serve` that started this process has started it again."""
    return int(os.environ.get(PROCESS_RESTARTS) or 0)


def short_process_name(default: str) -> str:
    """Return that name without the port of its `baton serve`; `default` for a process without a name."""
    return (process_name() or default).rpartition("/")[2]


def otel_variables() -> dict[str, str]:
    """Return the standard variables of OpenTelemetry."""
    return {name: value for name, value in os.environ.items() if name.startswith("OTEL_")}


def compiler() -> tuple[str, str, str]:
    """Return CXX, CXXFLAGS and PATH; empty where not set."""
    return os.environ.get("CXX", ""), os.environ.get("CXXFLAGS", ""), os.environ.get("PATH", "")


def expert_record_directory() -> Path:
    """Return the directory that engines write expert-distribution records to. SGLang reads the same variable."""
    return Path(os.environ.get("SGLANG_EXPERT_DISTRIBUTION_RECORDER_DIR", "/tmp"))
