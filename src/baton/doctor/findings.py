"""What a check has found: whether it is well, and the command that mends it where it is not."""

from collections.abc import Callable, Iterator
from typing import Literal

import msgspec

from baton.config.settings import Settings

Level = Literal["ok", "note", "warning", "problem"]


class Finding(msgspec.Struct, frozen=True, kw_only=True):
    """One finding. A note is nothing to mend; with a warning Baton works worse, with a problem not at all.

    `mend` is a command, or what to do in words.
    """

    subject: str
    level: Level
    text: str
    mend: str = ""


Check = Callable[[Settings], Iterator[Finding]]


def ok(subject: str, text: str) -> Finding:
    """Return a finding of something that is as it should be."""
    return Finding(subject=subject, level="ok", text=text)


def note(subject: str, text: str) -> Finding:
    """Return a finding that explains what Baton does on this machine."""
    return Finding(subject=subject, level="note", text=text)


def warning(subject: str, text: str, mend: str) -> Finding:
    """Return a finding with which Baton works worse."""
    return Finding(subject=subject, level="warning", text=text, mend=mend)


def problem(subject: str, text: str, mend: str) -> Finding:
    """Return a finding with which Baton does not work as it is set up."""
    return Finding(subject=subject, level="problem", text=text, mend=mend)
