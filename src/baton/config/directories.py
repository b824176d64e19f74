"""Where Baton keeps files: fetched models, logs, discovery records, compiled code, released weights, profiles."""

from pathlib import Path

from baton.config.engines import TorchOptions
from baton.config.environment import user_cache
from baton.config.runtime import RuntimeOptions
from baton.config.settings import Settings


def cache_directory(settings: Settings) -> Path:
    """Return the directory of fetched models."""
    return _given_or_cached(settings.cache_dir, "")


def log_directory(settings: Settings) -> Path | None:
    """Return the directory that processes started by `baton serve` log to; None for standard error."""
    return None if settings.log_dir == "-" else _given_or_cached(settings.log_dir, "logs")


def discovery_directory(options: RuntimeOptions) -> Path:
    """Return the directory of file discovery. All processes of a user share it by default."""
    return _given_or_cached(options.directory, "discovery")


def shared_directory(options: RuntimeOptions) -> str:
    """Return the directory that the processes of one deployment have in common; "" without file discovery."""
    return str(discovery_directory(options).resolve()) if options.discovery == "file" else ""


def spill_directory(options: TorchOptions) -> Path:
    """Return the directory that released weights are written to."""
    return _given_or_cached(options.spill_dir, "spill")


def native_directory() -> Path:
    """Return the directory of compiled libraries."""
    return user_cache() / "native"


def control_directory() -> Path:
    """Return the directory of generated control tokens."""
    return user_cache() / "control"


def process_directory() -> Path:
    """Return the directory of the entries of running processes."""
    return user_cache() / "processes"


def supervisor_directory() -> Path:
    """Return the directory of the entries of running `baton serve` processes."""
    return user_cache() / "supervisors"


def profile_directory(settings: Settings) -> Path | None:
    """Return the directory that a profile is written to at exit; None without one."""
    return Path(settings.profile_dir).expanduser() if settings.profile_dir else None


def _given_or_cached(given: str, name: str) -> Path:
    return Path(given).expanduser() if given else user_cache() / name
