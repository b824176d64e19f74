"""The settings of a process as operators may see them: those that differ from the defaults, without secrets."""

import re
import urllib.parse
from collections.abc import Sequence
from functools import reduce

from baton.config.load import options
from baton.config.settings import Settings

HIDDEN = "(hidden)"
_SECRET_KEYS = frozenset({"api_key", "control_token", "view_token"})
_SECRET_FLAG = re.compile(r"token|secret|passw|api[-_]?key|credential", re.IGNORECASE)


def public_settings(settings: Settings) -> dict[str, object]:
    """Return the settings that differ from the defaults, by key. Values that may be secret are hidden."""
    changed: dict[str, object] = {}
    for option in options():
        value = reduce(getattr, option.path, settings)
        if value != option.default:
            changed[option.key] = HIDDEN if option.key in _SECRET_KEYS else _public(value)
    return changed


def _public(value: object) -> object:
    if isinstance(value, tuple):
        return _public_arguments([str(each) for each in value])
    return _without_password(value) if isinstance(value, str) else value


def _public_arguments(arguments: Sequence[str]) -> list[str]:
    """Return the arguments of an engine; the value of a flag whose name sounds like a secret is hidden."""
    shown: list[str] = []
    hides_next = False
    for argument in arguments:
        name, equals, _ = argument.partition("=")
        is_secret = name.startswith("-") and _SECRET_FLAG.search(name) is not None
        if hides_next and not argument.startswith("-"):
            shown.append(HIDDEN)
        else:
            shown.append(f"{name}={HIDDEN}" if is_secret and equals else argument)
        hides_next = is_secret and not equals
    return shown


def _without_password(text: str) -> str:
    """Return addresses, separated by commas, without the passwords in them."""
    return ",".join(_without_user(part) if "://" in part and "@" in part else part for part in text.split(","))


def _without_user(url: str) -> str:
    try:
        parts = urllib.parse.urlsplit(url)
    except ValueError:
        return HIDDEN
    return parts._replace(netloc=parts.netloc.rpartition("@")[2]).geturl()
