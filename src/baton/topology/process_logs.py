"""The logs of the processes of one `baton serve`: where they are, and that they can be written."""

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from baton.config.directories import log_directory
from baton.config.settings import Settings
from baton.errors import ConfigError
from baton.topology.ended_runs import keep_last_run, remove_old_logs
from baton.topology.instances import running_instances
from baton.topology.log_file import LogFile, ProcessOutput, StandardError, log_name

SOME_LOG_BYTES = 4096


def refuse_unusable_log_dir(settings: Settings) -> None:
    """Raise ConfigError if logs cannot be written."""
    if (directory := log_directory(settings)) is not None:
        with _log_errors(directory):
            directory.mkdir(parents=True, exist_ok=True, mode=0o700)
            with tempfile.TemporaryFile(dir=directory, buffering=0) as file:
                file.write(bytes(SOME_LOG_BYTES))


def log_path(settings: Settings, process: str) -> Path | None:
    """Return the log of `process`; None if it goes to standard error."""
    directory = log_directory(settings)
    return directory / log_name(settings.host, settings.port, process) if directory is not None else None


def begin_run(settings: Settings) -> None:
    """Give the logs of the last run at this address other names, of all its processes. Raises ConfigError.

    Old logs of other addresses are removed, but from our own directory only: in others they may be collected.
    """
    if (directory := log_directory(settings)) is not None:
        with _log_errors(directory):
            keep_last_run(directory, settings.host, settings.port)
        if not settings.log_dir:
            ports = {int(entry.name.rpartition(":")[2]) for entry in running_instances()}
            remove_old_logs(directory, ports | {settings.port})


def begin_log(settings: Settings, process: str) -> ProcessOutput:
    """Return the output of `process`, whose log goes on where one of its name has ended. Raises ConfigError."""
    if (path := log_path(settings, process)) is None:
        return ProcessOutput(process, StandardError(), settings.log_format)
    log_file = LogFile(path, settings.log_max_bytes)
    with _log_errors(path.parent):
        log_file.begin()
    return ProcessOutput(process, log_file, settings.log_format)


@contextmanager
def _log_errors(directory: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        what = f" {Path(error.filename).name}" if error.filename else ""
        raise ConfigError(
            f"cannot write log{what} in {directory} ({error.strerror}); choose another directory with --log-dir"
        ) from None
