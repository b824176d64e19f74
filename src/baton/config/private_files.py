"""Files that other users of the machine must not read or change."""

import os
import stat
from pathlib import Path
from typing import BinaryIO

PRIVATE_FILE = 0o600
PRIVATE_DIRECTORY = 0o700
TRUSTED_OWNERS = (0, os.geteuid())


def open_private(path: Path, flags: int) -> BinaryIO:
    """Open `path` to write to it, created if it does not exist; only this user can read it then.

    `flags` are O_APPEND, O_TRUNC or O_EXCL. Raises OSError, also for a file of another user or a link.
    """
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW | flags, PRIVATE_FILE)
    file = os.fdopen(descriptor, "ab" if flags & os.O_APPEND else "wb")
    try:
        os.fchmod(descriptor, PRIVATE_FILE)
    except OSError:
        file.close()
        raise
    return file


def make_private_directory(path: Path) -> None:
    """Create `path` with its parents, for this user only. Raises OSError, as `refuse_shared` does."""
    path.mkdir(parents=True, exist_ok=True, mode=PRIVATE_DIRECTORY)
    refuse_shared(path)


def refuse_shared(path: Path) -> None:
    """Raise PermissionError if another user than root owns `path` or can write to it."""
    status = path.stat()
    if status.st_uid not in TRUSTED_OWNERS:
        raise PermissionError(f"{path} belongs to another user (id {status.st_uid})")
    if status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise PermissionError(f"{path} can be written by other users: remove that permission (chmod go-w)")
