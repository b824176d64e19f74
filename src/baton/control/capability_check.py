"""Refuses commands that the engine's capabilities do not cover. The one place that checks; engines do not."""

from collections.abc import Iterable

from baton.errors import Unsupported
from baton.ports.engine import Capabilities
from baton.protocol.commands import (
    ClearCache,
    Command,
    Continue,
    DumpExpertRecord,
    JoinGroup,
    LeaveGroup,
    ListLoras,
    LoadLora,
    Pause,
    ReleaseMemory,
    ResumeMemory,
    SetWeightVersion,
    StartExpertRecord,
    StartProfile,
    StopExpertRecord,
    StopProfile,
    UnloadLora,
    UpdateWeights,
)


def refuse_unsupported(command: Command, can: Capabilities) -> None:
    """Raise Unsupported if a worker whose engine has these capabilities cannot execute `command`."""
    match command:
        case ReleaseMemory(tags=tags) | ResumeMemory(tags=tags):
            _need_any(tags or can.memory_tags, "release its memory")
            for tag in tags:
                _need(tag, can.memory_tags, "tags", "memory tag")
        case Pause(mode=mode):
            _need(mode, pause_modes(can), "mode", "pause mode")
        case Continue():
            _need_any(can.pause_modes, "pause")
        case UpdateWeights(source=source):
            _need(str(source.__struct_config__.tag), can.weight_sources, "source", "weight source")
        case JoinGroup() | LeaveGroup():
            _need("group", can.weight_sources, "source", "weight source")
        case SetWeightVersion():
            pass  # the worker keeps the version
        case _:
            _refuse_by_flag(command, can)


def is_supported(kind: type[Command], can: Capabilities) -> bool:
    """Whether such a worker can execute commands of `kind`, with the right fields."""
    offered = {
        ReleaseMemory: can.memory_tags,
        ResumeMemory: can.memory_tags,
        Pause: can.pause_modes,
        Continue: can.pause_modes,
        UpdateWeights: can.weight_sources,
        JoinGroup: can.weight_sources & {"group"},
        LeaveGroup: can.weight_sources & {"group"},
        ClearCache: can.clear_cache,
        StartProfile: can.profile,
        StopProfile: can.profile,
        StartExpertRecord: can.expert_records,
        StopExpertRecord: can.expert_records,
        DumpExpertRecord: can.expert_records,
        LoadLora: can.lora,
        UnloadLora: can.lora,
        ListLoras: can.lora,
    }
    return bool(offered.get(kind, True))


def pause_modes(can: Capabilities) -> frozenset[str]:
    """Return the pause modes of such a worker: it can drain wherever the engine can keep requests in place."""
    return can.pause_modes | {"drain"} if "keep" in can.pause_modes else can.pause_modes


def _refuse_by_flag(command: Command, can: Capabilities) -> None:
    match command:
        case ClearCache():
            _need_any(can.clear_cache, "clear its prefix cache")
        case StartProfile() | StopProfile():
            _need_any(can.profile, "record a profile")
        case StartExpertRecord() | StopExpertRecord() | DumpExpertRecord():
            _need_any(can.expert_records, "record experts: it needs a model with experts, and --experts-recorder")
        case LoadLora() | UnloadLora() | ListLoras():
            _need_any(can.lora, "load LoRA adapters")


def _need(wanted: str, offered: frozenset[str], field: str, what: str) -> None:
    if wanted not in offered:
        raise Unsupported(f"{field}: {wanted!r} is not a {what} of this engine; it has {_listed(offered)}")


def _need_any(offered: object, what: str) -> None:
    if not offered:
        raise Unsupported(f"this engine cannot {what}")


def _listed(names: Iterable[str]) -> str:
    return ", ".join(sorted(names)) or "none"
