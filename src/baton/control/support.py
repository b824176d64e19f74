"""Which orders an engine can take: what its capabilities do not list is refused by name."""

from collections.abc import Iterable

from baton.errors import Unsupported
from baton.ports.engine import Capabilities
from baton.protocol.control import (
    ClearCache,
    Continue,
    JoinGroup,
    LeaveGroup,
    Pause,
    ReleaseMemory,
    ResumeMemory,
    StartProfile,
    StopProfile,
    UpdateWeights,
    Verb,
)


def refuse_unsupported(verb: Verb, can: Capabilities) -> None:
    """Raise Unsupported if an engine with these capabilities cannot do `verb`."""
    match verb:
        case ReleaseMemory(tags=tags) | ResumeMemory(tags=tags):
            for tag in tags:
                _need(tag, can.memory_tags, "tags", "memory that can be released")
        case Pause(mode=mode):
            _need(mode, can.pause_modes, "mode", "way to pause")
        case Continue():
            _need_any(can.pause_modes, "pause")
        case ClearCache():
            _need_any(can.clear_cache, "clear a cache")
        case StartProfile() | StopProfile():
            _need_any(can.profile, "record a profile")
        case UpdateWeights(source=source):
            _need(str(source.__struct_config__.tag), can.weight_sources, "source", "source of weights")
        case JoinGroup() | LeaveGroup():
            _need("group", can.weight_sources, "source", "source of weights")


def _need(wanted: str, offered: frozenset[str], field: str, what: str) -> None:
    if wanted not in offered:
        raise Unsupported(f"{field}: {wanted!r} is no {what} of this engine; it has {_listed(offered)}")


def _need_any(offered: object, what: str) -> None:
    if not offered:
        raise Unsupported(f"this engine cannot {what}")


def _listed(names: Iterable[str]) -> str:
    return ", ".join(sorted(names)) or "none"
