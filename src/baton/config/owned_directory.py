"""Temporary directories of a process, removed when it ends; by a later process of the same user if it was killed."""

import fcntl
import os
import shutil
import stat
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

from baton.config.private_files import open_private
from baton.errors import ConfigError

PREFIX = "baton-"
"""What the names of all of them begin with."""
LOCK_NAME = "run.lock"
YOUNG_S = 10.0
"""The lock of a directory that is younger may be about to be taken."""


@contextmanager
def owned_directory(name: str = "") -> Iterator[Path]:
    """A directory that only this user can read, with `name` in its name. Raises ConfigError.

    The lock in it is held as long as this process lives. Directories whose lock nobody holds are removed first.
    """
    with ExitStack() as stack:
        try:
            _remove_abandoned(Path(tempfile.gettempdir()))
            prefix = f"{PREFIX}{name}-" if name else PREFIX
            path = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix=prefix, ignore_cleanup_errors=True)))
            fcntl.flock(stack.enter_context(open_private(path / LOCK_NAME, os.O_EXCL)), fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            raise ConfigError(
                f"cannot create a temporary directory ({error.strerror}): set TMPDIR to a directory with free space"
            ) from None
        yield path


def _remove_abandoned(parent: Path) -> None:
    for path in parent.glob(f"{PREFIX}*"):
        with suppress(OSError):  # it is being made or removed, or its process lives
            status = path.lstat()
            if stat.S_ISDIR(status.st_mode) and status.st_uid == os.geteuid():
                _remove_unlocked(path)


def _remove_unlocked(path: Path) -> None:
    """Remove the directory of a process that has ended. Raises OSError if its lock is missing, held or young."""
    descriptor = os.open(path / LOCK_NAME, os.O_RDONLY | os.O_NOFOLLOW)
    try:
        if time.time() - os.fstat(descriptor).st_mtime < YOUNG_S:
            raise BlockingIOError
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        shutil.rmtree(path)
    finally:
        os.close(descriptor)
