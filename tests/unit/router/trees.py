"""Changed copies of topology files, for tests of invalid values."""

from copy import deepcopy
from typing import Any

MISSING = object()


def changed(tree: dict[str, Any], at: str, value: object) -> dict[str, Any]:
    """Return a copy with another value at `at`, a dotted path of keys and indices. MISSING removes the key."""
    copy = deepcopy(tree)
    *keys, last = [int(key) if key.isdigit() else key for key in at.split(".")]
    inner: Any = copy
    for key in keys:
        inner = inner[key]
    if value is MISSING:
        del inner[last]
    else:
        inner[last] = value
    return copy
