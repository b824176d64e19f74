"""Files of this machine that clients may name: regular files inside the configured directories. Blocks.

A path is opened without access to its content first. What was opened is checked, wherever links have led, and the same
file is then read; so a link that is replaced meanwhile changes nothing. Hard links cannot be told from other names of a
file: clients must not be able to write to the directories.
"""

import logging
import os
import stat
from pathlib import Path
from urllib.parse import unquote_to_bytes, urlsplit

from baton.errors import ConfigError
from baton.media.policy import Refused, refuse_large

log = logging.getLogger(__name__)

NOT_FOUND = "there is no such file in the directories of --media-local-dirs"


class LocalFiles:
    """The files in `directories`, separated by commas. Raises ConfigError if one of them is no absolute directory."""

    def __init__(self, directories: str) -> None:
        self._directories = tuple(_directory(text.strip()) for text in directories.split(",") if text.strip())

    def read(self, url: str, limit: int) -> bytes:
        """Return the content of a file: URL, of at most `limit` bytes. Raises Refused."""
        if not self._directories:
            raise Refused("file URLs are not enabled (--media-local-dirs)")
        path = _path(url)
        try:
            found = os.open(path, os.O_PATH | os.O_CLOEXEC)
        except (OSError, ValueError) as error:
            log.info("a file URL is refused: %r", error)
            raise Refused(NOT_FOUND) from None
        try:
            self._check(found)
            return _read(found, limit)
        finally:
            os.close(found)

    def _check(self, found: int) -> None:
        """Raise Refused unless the open file is a regular one inside a configured directory."""
        opened = os.readlink(f"/proc/self/fd/{found}")
        if not any(opened.startswith(f"{directory}/") for directory in self._directories):
            log.info("a file URL is refused: it leads outside of --media-local-dirs")
            raise Refused(NOT_FOUND)
        status = os.fstat(found)
        if not stat.S_ISREG(status.st_mode):
            raise Refused("it is not a regular file")
        if status.st_nlink == 0:
            raise Refused(NOT_FOUND)


def _directory(text: str) -> str:
    path = Path(text)
    if not path.is_absolute() or not path.is_dir():
        raise ConfigError(f"--media-local-dirs: {text} is not the absolute path of a directory")
    resolved = str(path.resolve())
    return resolved if resolved != "/" else ""


def _path(url: str) -> bytes:
    parts = urlsplit(url)
    if parts.netloc.lower() not in ("", "localhost"):
        raise Refused("a file URL has no host")
    if parts.query or parts.fragment:
        raise Refused("a file URL has no query and no fragment")
    path = unquote_to_bytes(parts.path)
    if not path.startswith(b"/"):
        raise Refused("a file URL has an absolute path")
    return path


def _read(found: int, limit: int) -> bytes:
    try:
        with open(f"/proc/self/fd/{found}", "rb", opener=_open_regular) as file:
            size = os.fstat(file.fileno()).st_size
            refuse_large(size, limit)
            data = file.read(size)  # no more, should it grow meanwhile
    except OSError as error:
        log.info("a file URL is refused: %r", error)
        raise Refused("the file cannot be read") from None
    if len(data) != size:
        raise Refused("the file has become shorter while it was read")
    return data


def _open_regular(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC)
