"""The commands of the control API: the one table of paths and methods. The server, its OpenAPI document and `baton ctl`
read it.
"""

import inspect
from typing import Literal, NamedTuple

from baton.control.capability_check import is_supported
from baton.ports.control import Status
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
    Outcome,
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
from baton.timelines.reports import AboutReply, TimelinesReply

PREFIX = "/control/"
BODY_BYTES = 1 << 20
TENSOR_BODY_BYTES = 1 << 28
"""For weights in the request itself. Larger models use a directory, shared memory or a process group."""


class CommandPath(NamedTuple):
    """One path under `/control/`. Without a command it only reports something, and does not wait for the engine."""

    path: str
    method: Literal["GET", "POST"]
    command: type[Command] | None
    reply: type[Outcome] | type[Status] | type[AboutReply] | type[TimelinesReply] = Outcome
    description: str = ""
    body_bytes: int = BODY_BYTES
    parameters: tuple[str, ...] = ()

    @property
    def summary(self) -> str:
        """One sentence: the first of the command's docstring."""
        text = " ".join((inspect.getdoc(self.command) or "").split()) if self.command is not None else self.description
        return text.split(". ")[0].rstrip(".")


COMMAND_PATHS = (
    CommandPath("status", "GET", None, Status, description="Return the state of the worker"),
    CommandPath("about", "GET", None, AboutReply, description="Return what this process is, its load and last errors"),
    CommandPath(
        "timelines",
        "GET",
        None,
        TimelinesReply,
        description="Return the timelines of running and of the last finished requests",
        parameters=("after", "limit"),
    ),
    CommandPath("memory/release", "POST", ReleaseMemory),
    CommandPath("memory/resume", "POST", ResumeMemory),
    CommandPath("pause", "POST", Pause),
    CommandPath("continue", "POST", Continue),
    CommandPath("weights/update", "POST", UpdateWeights, body_bytes=TENSOR_BODY_BYTES),
    CommandPath("weights/version", "GET", None, description="Return the version of the current weights"),
    CommandPath("weights/version", "POST", SetWeightVersion),
    CommandPath("weights/group/join", "POST", JoinGroup),
    CommandPath("weights/group/leave", "POST", LeaveGroup),
    CommandPath("cache/clear", "POST", ClearCache),
    CommandPath("profile/start", "POST", StartProfile),
    CommandPath("profile/stop", "POST", StopProfile),
    CommandPath("experts/record/start", "POST", StartExpertRecord),
    CommandPath("experts/record/stop", "POST", StopExpertRecord),
    CommandPath("experts/record/dump", "POST", DumpExpertRecord),
    CommandPath("lora/load", "POST", LoadLora),
    CommandPath("lora/unload", "POST", UnloadLora),
    CommandPath("lora/list", "GET", ListLoras),
)


def supported_paths(can: Capabilities) -> list[str]:
    """Return the paths of the commands that a worker whose engine has these capabilities takes."""
    return [
        entry.path
        for entry in COMMAND_PATHS
        if entry.method == "POST" and entry.command is not None and is_supported(entry.command, can)
    ]
